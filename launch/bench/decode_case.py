"""Cases of decode attention over a bf16 cache, who computes them, and the check of their results."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from alspec.kernels.attention.decode.lean_decode import lean_decode_attention, lean_recall_parts, spec_parts
from alspec.kernels.attention.dispatch import KVLayer, attend_workspace
from alspec.kernels.attention.oracles import decode_attention_ref, speculative_decode_attention_ref
from alspec.launch.bench.bench_common import check_close, combined, new_block_lse, new_recall, new_spec_output, written
from alspec.launch.bench.bench_quantised import QuantisedCase
from alspec.predictor import KV_TILE, predictor_ranges
from alspec.verdict import distance_sums

__all__ = ["COLD_BYTES", "Case", "Run", "check", "flashinfer", "lean", "sdpa"]

# Copies of the inputs rotate through this much memory, 35 times the L2, so that nearly all reads come from DRAM. With
# less, data that is loaded as evict_first, such as quantised records, would partly stay in the L2.
COLD_BYTES = 2 * 2**30
TOLERANCE = 1e-2  # relative RMS of a bf16 output against fp64

Run = Callable[[int], tuple[Tensor, ...]]  # the argument is the index of a copy


@dataclass
class Case:
    """One shape, with enough copies of its inputs to keep the L2 cold."""

    q: Tensor  # [copies, B, Hq, D] bf16
    k: Tensor  # [copies, B, Hkv, N, D] bf16
    v: Tensor
    seq_lens: Tensor  # [B] int32

    @classmethod
    def draw(
        cls,
        seq_lens: list[int],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        copies: int = 0,
        device: str = "cuda",
    ) -> Case:
        """Fresh random inputs; with copies = 0, as many copies as keep the L2 cold."""
        batch, capacity = len(seq_lens), max(seq_lens)
        copies = copies or max(8, min(128, COLD_BYTES // (4 * batch * num_kv_heads * capacity * head_dim)))

        def normal(*shape: int) -> Tensor:
            return torch.randn(copies, batch, *shape, dtype=torch.bfloat16, device=device)

        return cls(
            q=normal(num_qo_heads, head_dim),
            k=normal(num_kv_heads, capacity, head_dim),
            v=normal(num_kv_heads, capacity, head_dim),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        )

    def last(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and seq_lens of the last copy."""
        return self.q[-1], self.k[-1], self.v[-1], self.seq_lens

    @property
    def num_bytes(self) -> int:
        """Bytes that one launch must read."""
        heads, head_dim = self.k.shape[2], self.k.shape[4]
        return int(self.seq_lens.sum()) * heads * head_dim * 2 * self.k.itemsize


def lean(case: Case, chunk_size: int = 0, recall_blocks: int = 0, masses: bool = False) -> Run:
    """Our kernel on copy `i`. With `chunk_size` it also writes `A~`, with recalled blocks, and the sums.

    masses: without `chunk_size` it writes the weights of all blocks.
    """
    _, batch, hq, dim = case.q.shape
    device, hkv = case.q.device, case.k.shape[2]
    workspace = attend_workspace(KVLayer(case.k[0], case.v[0]), hq, device)
    out, lse = torch.full_like(case.q[0], math.nan), torch.full((batch, hq), math.nan, device=device)
    speculation, shape = None, (hq, hkv, case.k.shape[3])
    block_lse = new_block_lse(batch, shape, device) if masses else None
    if chunk_size:
        parts = spec_parts(chunk_size, batch, hq, hkv, dim, case.q.dtype, device)
        recall = new_recall(case.seq_lens, shape, chunk_size, recall_blocks, lean_recall_parts(recall_blocks))
        speculation, packets = new_spec_output(chunk_size, case.q[0], parts, device, recall)
        packets.fill_(-1)  # another epoch than that of the run

    def run(i: int) -> tuple[Tensor, ...]:
        lean_decode_attention(
            case.q[i], case.k[i], case.v[i], case.seq_lens, dim**-0.5, workspace, out, lse, speculation,
            block_lse=block_lse,
        )  # fmt: skip
        return written(out, speculation)

    return run


def _recalling_ref(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, chunk_size: int, recall_blocks: int) -> Tensor:
    """`A~` of the lists of `new_recall`, which are the same for all heads, in fp64: [B, Hq, D]."""
    recall = new_recall(seq_lens, (q.shape[1], k.shape[1], k.shape[2]), chunk_size, recall_blocks, 1)
    assert recall is not None
    outs = []
    for request, n in enumerate(seq_lens.tolist()):
        sink_end, window_start = (int(end) for end in predictor_ranges(seq_lens[request], chunk_size))
        token = torch.arange(n, device=q.device)
        listed = (recall.lists[request, 0][:, None] == token // KV_TILE).any(0)
        tokens = token[(token < sink_end) | (token >= window_start) | listed]
        one = slice(request, request + 1)
        length = torch.tensor([len(tokens)], device=q.device)
        outs.append(
            decode_attention_ref(q[one], k[one][:, :, tokens], v[one][:, :, tokens], length, q.shape[-1] ** -0.5)[0]
        )
    return torch.cat(outs)


def sdpa(case: Case) -> Run:
    """torch SDPA on copy `i`, with every request padded to the longest one."""
    _, batch, hq, dim = case.q.shape
    capacity = case.k.shape[3]
    ragged = bool((case.seq_lens != capacity).any())
    lens = case.seq_lens[:, None, None, None]
    mask = (torch.arange(capacity, device=case.q.device) < lens).expand(-1, hq, 1, -1) if ragged else None

    def run(i: int) -> tuple[Tensor, ...]:
        q = case.q[i][:, :, None]
        out = F.scaled_dot_product_attention(q, case.k[i], case.v[i], attn_mask=mask, enable_gqa=True)
        return (out.reshape(batch, hq, dim),)

    return run


def flashinfer(case: Case, use_tensor_cores: bool = True) -> Run | None:
    """FlashInfer's decode of one request on copy `i`; None if it is not installed, or for several requests."""
    if case.q.shape[1] != 1 or importlib.util.find_spec("flashinfer") is None:
        return None
    decode = importlib.import_module("flashinfer").single_decode_with_kv_cache

    def run(i: int) -> tuple[Tensor, ...]:
        q, k, v = case.q[i, 0], case.k[i, 0], case.v[i, 0]
        return (decode(q, k, v, kv_layout="HND", use_tensor_cores=use_tensor_cores)[None],)

    return run


def check(case: Case | QuantisedCase, run: Run, chunk_size: int = 0, recall_blocks: int = 0) -> None:
    """Compare the last copy's result with the fp64 oracle, request by request: outputs of long requests are small."""
    args = case.last()
    scale = case.q.shape[-1] ** -0.5
    found = run(case.q.shape[0] - 1)
    if chunk_size:
        spec_out, full_out, sums = speculative_decode_attention_ref(*args, chunk_size, scale)
        if recall_blocks:
            spec_out = _recalling_ref(*args, chunk_size, recall_blocks)
            sums = distance_sums(spec_out, full_out)
        spec = found[1] if found[1].is_floating_point() else combined(found[1], found[3] if len(found) > 3 else None, 0)
        found = (found[0], spec, found[2].sum(1))
        expected: tuple[Tensor, ...] = (full_out, spec_out, sums)
    else:
        expected = (decode_attention_ref(*args, scale)[0],)
    for ours, reference in zip(found, expected, strict=True):
        for length, row, reference_row in zip(case.seq_lens.tolist(), ours, reference, strict=True):
            check_close(f"result for seq_lens {length}", row, reference_row, TOLERANCE)
