"""Cases of `bench_kernels.py --bench turbo`: random quantised caches, enough of them to keep the L2 cold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from alspec.kernels.attention.decode_quantised.quantised_decode import (
    quantised_decode_attention,
    quantised_recall_parts,
    quantised_spec_parts,
)
from alspec.kernels.attention.dispatch import attend_workspace
from alspec.kernels.kv_codec.codec_reference import dequantize_side
from alspec.kernels.kv_codec.formats import format_of, record_words, side_of, side_words
from alspec.kernels.kv_codec.quantised_layer import BLOCK, QuantisedLayer
from alspec.launch.bench.bench_common import new_block_lse, new_recall, new_spec_output, written
from alspec.sas import Softmax

__all__ = ["QuantisedCase", "quantised_run"]


@dataclass
class QuantisedCase:
    """One shape, with enough copies of its inputs to keep the L2 cold."""

    q: Tensor  # [copies, B, Hq, D] bf16
    layers: list[QuantisedLayer]  # one for each copy
    seq_lens: Tensor  # [B] int32

    @classmethod
    def draw(
        cls, seq_lens: list[int], num_qo_heads: int, num_kv_heads: int, head_dim: int, codec: str, cold_bytes: int
    ) -> QuantisedCase:
        """Fresh random inputs. Parameters and scales are like those of quantised normal values; codes are uniform."""
        device, format = torch.device("cuda"), format_of(codec)
        batch, num_blocks = len(seq_lens), max(seq_lens) // BLOCK + 1
        bits = torch.full((batch, num_kv_heads), 2 if codec == "turbo2" else 4, dtype=torch.int32)
        if codec == "turbo-mixed":
            bits[:, 1::2] = 2
        sizes = torch.tensor([num_blocks * record_words(format, int(width), head_dim) for width in bits.flatten()])
        offset = (sizes.cumsum(0) - sizes).view_as(bits)
        copies = max(8, min(1024, cold_bytes // (4 * int(sizes.sum()))))

        def uniform(low: float, *shape: int) -> Tensor:
            return low * (1 + torch.rand(shape, device=device))

        layers = []
        for _ in range(copies):
            words = torch.randint(-(2**31), 2**31, (int(sizes.sum()),), dtype=torch.int64, device=device).int()
            for head, width in enumerate(bits.flatten().tolist()):
                begin = int(offset.flatten()[head])
                for is_v, side in enumerate(_sides(words, format, width, head_dim, begin, num_blocks)):
                    method, own_bits = side_of(format, bool(is_v), width)
                    codes = 2 * head_dim * own_bits
                    side[:, codes:] = _parameters(method, num_blocks, head_dim, own_bits, device)
            layers.append(
                QuantisedLayer(
                    words=words,
                    offset=offset.to(device),
                    bits=bits.to(device),
                    scales=uniform(0.015, batch, num_kv_heads, num_blocks, 2),
                    tail=torch.randint(
                        -119, 120, (batch, num_kv_heads, 2, BLOCK, head_dim), dtype=torch.int8, device=device
                    ),
                    tail_scale=uniform(0.015, batch, num_kv_heads, 2),
                    format=format,
                )
            )
        q = torch.randn(copies, batch, num_qo_heads, head_dim, device=device, dtype=torch.bfloat16)
        return cls(q, layers, torch.tensor(seq_lens, dtype=torch.int32, device=device))

    def last(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v (fp64, dequantised) and seq_lens of the last copy."""
        layer, lengths = self.layers[-1], self.seq_lens.tolist()
        batch, heads, dim = layer.batch_size, layer.num_kv_heads, layer.head_dim
        k, v = torch.zeros(2, batch, heads, max(lengths), dim, dtype=torch.float64, device=layer.words.device)
        for request, length in enumerate(lengths):
            full = (length - 1) // BLOCK
            for head in range(heads):
                width, begin = int(layer.bits[request, head]), int(layer.offset[request, head])
                sides = _sides(layer.words, layer.format, width, dim, begin, full)
                for side, (values, words) in enumerate(zip((k, v), sides, strict=True)):
                    method, own_bits = side_of(layer.format, bool(side), width)
                    exact = dequantize_side(words, method, own_bits, dim, bool(side), torch.float64)
                    exact *= layer.scales[request, head, :full, side, None, None].double()
                    newest = layer.tail[request, head, side, : length - full * BLOCK].double()
                    values[request, head, : full * BLOCK] = exact.flatten(0, 1)
                    values[request, head, full * BLOCK : length] = newest * layer.tail_scale[request, head, side]
        return self.q[-1], k, v, self.seq_lens

    @property
    def num_bytes(self) -> int:
        """Bytes that one launch must read: records and their scales, and the tail with its scales."""
        layer, total = self.layers[0], 0
        for length, widths in zip(self.seq_lens.tolist(), layer.bits.tolist(), strict=True):
            full = (length - 1) // BLOCK
            for width in widths:
                total += full * (4 * record_words(layer.format, width, layer.head_dim) + 8)
                total += (length - full * BLOCK) * 2 * layer.head_dim + 8
        return total


def _sides(words: Tensor, format: str, bits: int, head_dim: int, begin: int, num_blocks: int) -> tuple[Tensor, ...]:
    """The K and V sides, [num_blocks, side_words], of the records of a head that begin at a word; views."""
    sizes = [side_words(format, is_v, bits, head_dim) for is_v in (False, True)]
    records = words[begin : begin + num_blocks * sum(sizes)].view(num_blocks, sum(sizes))
    return tuple(records.split(sizes, 1))


def _parameters(method: str, num_blocks: int, head_dim: int, bits: int, device: torch.device) -> Tensor:
    """Parameters of a side, int32: `s_int` and `z + 128`, for values in most of [-119, 119]; or ratios of tokens."""
    if method != "flashq":
        return (0.5 + 0.5 * torch.rand(num_blocks, BLOCK, device=device)).half().view(torch.int32)
    top = 238 // (2**bits - 1)
    s_int = torch.randint(top // 2, top + 1, (num_blocks, head_dim), dtype=torch.int32, device=device)
    span = 239 - (2**bits - 1) * s_int
    z = (torch.rand(s_int.shape, device=device) * span).int() + (128 - 119)
    return torch.cat([s_int, z], 1).to(torch.uint8).view(torch.int32)


def quantised_run(
    case: QuantisedCase, chunk_size: int, softmax: Softmax = "exact", recall_blocks: int = 0, masses: bool = False
) -> Callable[[int], tuple[Tensor, ...]]:
    """Our kernel on copy `i`. See `lean` in decode_case.py."""
    _, batch, hq, dim = case.q.shape
    device, hkv = case.q.device, case.layers[0].num_kv_heads
    workspace = attend_workspace(case.layers[0], hq, device)
    out, lse = torch.full_like(case.q[0], math.nan), torch.full((batch, hq), math.nan, device=device)
    layers = [replace(layer, softmax=softmax) for layer in case.layers]
    speculation, shape = None, (hq, hkv, int(case.seq_lens.max()))
    block_lse = new_block_lse(batch, shape, device) if masses else None
    if chunk_size:
        parts = quantised_spec_parts(batch, hq // hkv, device)
        recall = new_recall(case.seq_lens, shape, chunk_size, recall_blocks, quantised_recall_parts(recall_blocks))
        speculation, packets = new_spec_output(chunk_size, case.q[0], parts, device, recall)
        packets.fill_(-1)  # another epoch than that of the run

    def run(i: int) -> tuple[Tensor, ...]:
        quantised_decode_attention(
            case.q[i], layers[i], case.seq_lens, dim**-0.5, workspace, out, lse, speculation, block_lse=block_lse
        )
        return written(out, speculation)

    return run
