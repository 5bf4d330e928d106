"""Launches of decode attention over a random FlashQ cache, for its tests and the emulated cases."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from attention_launch import EPOCH, AttentionLaunch
from comparison import close
from torch import Tensor

from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import LeanWorkspace, SpecOutput
from alspec.kernels.attention.decode_quantised.quantised_decode import (
    QuantisedSettings,
    quantised_decode_attention,
    quantised_settings,
)
from alspec.kernels.kv_codec.flashq.layout import BlockCodes, pack_side
from alspec.kernels.kv_codec.formats import FORMATS, record_words
from alspec.kernels.kv_codec.quantised_layer import QuantisedLayer
from alspec.kernels.kv_codec.turboquant.token_codes import TokenCodes, dequantize_tokens, pack_tokens_side
from alspec.sas import Softmax

__all__ = ["TOLERANCE", "Launch", "draw", "draw_codes"]

TOLERANCE = 2**-10  # see test_quantised_decode.py


@dataclass(kw_only=True)
class Launch(AttentionLaunch):
    """A launch over a random quantised cache, with noise in unused memory. `k` and `v` are dequantised, in fp64."""

    layer: QuantisedLayer
    settings: QuantisedSettings

    @property
    def softmax(self) -> Softmax:
        return self.layer.softmax

    @softmax.setter
    def softmax(self, softmax: Softmax) -> None:
        self.layer = replace(self.layer, softmax=softmax)

    def slide(self, sliding_window: int) -> None:
        """Give the launch a sliding window, with NaN as scales of the blocks in front of it."""
        self.sliding_window, self.layer = sliding_window, replace(self.layer, sliding_window=sliding_window)
        for request, n in enumerate(self.seq_lens.tolist()):
            self.layer.scales[request, :, : max(0, n - sliding_window) // 64] = math.nan

    def run(self, *phases: str, gate: Tensor | None = None) -> None:
        self.clear()
        for phase in phases or ("all",):
            quantised_decode_attention(
                self.q, self.layer, self.seq_lens, self.sm_scale, self.workspace, self.out, self.lse,
                self.speculation, phase, gate, settings=self.settings,
            )  # type: ignore[arg-type]  # fmt: skip

    def compare(self, tolerance: float = TOLERANCE) -> None:
        def bounded(name: str, found: Tensor, expected: Tensor) -> None:
            if name == "lse":
                assert float((found.cpu() - expected).abs().max()) < 8 * tolerance
            else:
                close(found, expected, 4 * tolerance if name == "sums" else tolerance)

        self.compare_each(bounded)


def draw_codes(num_blocks: int, head_dim: int, bits: int, kind: str, generator: torch.Generator) -> BlockCodes:
    """Codes whose reconstruction fits into 8 bits, like that of a quantiser."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (num_blocks, *shape), generator=generator)

    top = 2**bits - 1
    codes = integers(0, top + 1, 64, head_dim)
    s_int = integers(1, 1 + -(-238 // top), head_dim)
    z = -119 + (integers(0, 1000, head_dim) % (239 - (s_int - 1) * top).clamp(min=1))
    if kind == "constant":  # all tokens and channels are equal
        codes, s_int = torch.zeros_like(codes), torch.ones_like(s_int)
    elif kind == "zero":
        codes, s_int, z = torch.zeros_like(codes), torch.ones_like(s_int), torch.zeros_like(z)
    elif kind in ("widest", "highest"):
        s_int, z = torch.full_like(s_int, -(-238 // top)), torch.full_like(z, -119)
        codes = torch.full_like(codes, top) if kind == "highest" else codes
    elif kind == "high":
        s_int, z = torch.ones_like(s_int), torch.full_like(z, 119 - top)
    return BlockCodes(codes, s_int, z)


def draw_side(
    method: str, num_blocks: int, head_dim: int, bits: int, is_v: bool, kind: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Words of blocks of K or V, [num_blocks, side_words]; their values [num_blocks, 64, D] fp64, without scales."""
    if method == "flashq":
        codes = draw_codes(num_blocks, head_dim, bits, kind, generator)
        integers = codes.codes * codes.s_int[:, None] + codes.z[:, None]
        return pack_side(codes, bits, is_v), integers.double()
    shape = (num_blocks, 64, head_dim)
    levels = torch.randint(0, 2**bits, shape, generator=generator).to(torch.uint8)
    ratio = torch.rand(shape[:2], generator=generator)
    if kind != "random":
        level = {"highest": 2**bits - 1, "high": 2**bits - 2, "widest": 0}.get(kind, 2 ** (bits - 1))
        levels, ratio = torch.full_like(levels, level), torch.full_like(ratio, float(kind != "zero"))
    tokens = TokenCodes(levels, ratio.half(), torch.ones(num_blocks))
    return pack_tokens_side(tokens, bits, is_v), dequantize_tokens(tokens, bits, not is_v, torch.float64)


def draw(
    lengths: tuple[int, ...],
    ratio: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    num_programs: int,
    chunk_size: int = 0,
    codec: str = "turbo-mixed",
    num_warps: int = 1,
    kind: str = "random",
    dtype: torch.dtype = torch.float32,
    scale: float = 0.02,
    parts: int = 1,
) -> Launch:
    batch, num_blocks = len(lengths), max(lengths) // 64 + 2
    generator = torch.Generator().manual_seed(sum(lengths) + ratio * head_dim + num_warps)
    format = codec if codec in FORMATS else "flashq"
    bits = torch.full((batch, num_kv_heads), 2 if codec == "turbo2" else 4, dtype=torch.int32)
    if codec == "turbo-mixed":
        for request in range(batch):
            bits[request, torch.randperm(num_kv_heads, generator=generator)[: num_kv_heads // 2 + request % 2]] = 2
    values = torch.full((2, batch, num_kv_heads, 64 * num_blocks, head_dim), math.nan, dtype=torch.float64)
    scales = scale * (0.2 + torch.rand(batch, num_kv_heads, num_blocks, 2, generator=generator))
    tail = torch.randint(-128, 128, (batch, num_kv_heads, 2, 64, head_dim), generator=generator, dtype=torch.int8)
    tail_scale = scale * (0.2 + torch.rand(batch, num_kv_heads, 2, generator=generator))
    records, offset, at = [], [], 0
    for request, length in enumerate(lengths):
        full = (length - 1) // 64
        for head in range(num_kv_heads):
            width = int(bits[request, head])
            sides = [
                draw_side(how.method, num_blocks, head_dim, how.bits or width, bool(is_v), kind, generator)
                for is_v, how in enumerate(FORMATS[format])
            ]
            words = torch.cat([side_words for side_words, _ in sides], -1)
            words[full:] = torch.randint(-(2**31), 2**31, words[full:].shape, generator=generator).int()
            scales[request, head, full:] = math.nan
            for side, (_, integers) in enumerate(sides):
                exact = integers[:full] * scales[request, head, :full, side, None, None].double()
                values[side, request, head, : 64 * full] = exact.flatten(0, 1)
                newest = tail[request, head, side, : length - 64 * full].double()
                values[side, request, head, 64 * full : length] = newest * tail_scale[request, head, side].double()
            gap = 4 * int(torch.randint(0, 9, (), generator=generator))
            records += [torch.randint(-(2**31), 2**31, (gap,), generator=generator).int(), words.flatten()]
            offset.append(at + gap)
            at += gap + num_blocks * record_words(format, width, head_dim)
    layer = QuantisedLayer(
        words=torch.cat(records).to(device),
        offset=torch.tensor(offset).view(batch, num_kv_heads).to(device),
        bits=bits.to(device),
        scales=scales.to(device),
        tail=tail.to(device),
        tail_scale=tail_scale.to(device),
        format=format,
    )
    q = torch.randn(batch, ratio * num_kv_heads, head_dim, generator=generator).to(device, dtype)
    launch = Launch(
        q=q,
        layer=layer,
        k=values[0],
        v=values[1],
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        workspace=LeanWorkspace.allocate(batch, q.shape[1], num_kv_heads, head_dim, device, num_programs),
        out=torch.empty_like(q, dtype=torch.float32),
        lse=torch.empty(q.shape[:2], device=device),
        settings=replace(quantised_settings(device), num_warps=num_warps),
    )
    if chunk_size:
        launch.speculation = SpecOutput(
            chunk_size,
            spec_out=torch.empty(parts, *q.shape, dtype=torch.int64, device=device),
            sums=torch.empty(batch, num_sums(batch, q.shape[1], head_dim), 2, device=device),
            epoch=torch.tensor([EPOCH], dtype=torch.int32, device=device),
            spec_lse=torch.empty(parts, *q.shape[:2], dtype=torch.int64, device=device) if parts > 1 else None,
        )
    return launch
