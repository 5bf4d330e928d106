"""Formats that mix methods and bits: kernels write and restore the bits of their oracles."""

from __future__ import annotations

import pytest
import torch
from flashq_layers import assert_same, noisy_layer, on_cpu
from tiers import covering
from torch import Tensor

from alspec.kernels.kv_codec.codec_kernels import kv_append, kv_compact, kv_restore, kv_store
from alspec.kernels.kv_codec.codec_reference import (
    kv_append_ref,
    kv_compact_ref,
    kv_dequantize,
    kv_restore_ref,
    kv_store_ref,
)
from alspec.kernels.kv_codec.formats import FORMATS
from alspec.kernels.kv_codec.quantised_layer import BLOCK

MIXED = [name for name in FORMATS if name != "flashq"]
KINDS = ["normal", "constant", "zero", "outliers", "hot channel"]


def draw(kind: str, num_tokens: int, heads: int, head_dim: int, seed: int) -> Tensor:
    """K or V [n, H, D]."""
    x = torch.randn(num_tokens, heads, head_dim, generator=torch.Generator().manual_seed(seed))
    if kind == "constant":
        x = torch.ones_like(x) * 0.37
    elif kind == "zero":
        x = torch.zeros_like(x)
    elif kind == "outliers":
        x[num_tokens // 2, :, 7] = 1e4
    elif kind == "hot channel":
        x[:, :, 3] += 50
    return x


@pytest.mark.parametrize(("format", "head_dim", "kind"), covering(MIXED, [64, 128], KINDS))
def test_a_prompt_and_its_continuation_have_the_bits_of_the_oracles(
    format: str, head_dim: int, kind: str, device: torch.device
) -> None:
    heads, prompt, request = 2, 130, 1
    layer = noisy_layer(2, [4] * heads, head_dim, 4, device, format)
    expected = on_cpu(layer)
    k, v = (draw(kind, prompt, heads, head_dim, seed) for seed in (1, 2))
    outs = []
    for store, cache, on in ((kv_store, layer, device), (kv_store_ref, expected, torch.device("cpu"))):
        q8 = torch.zeros(2, heads, prompt, head_dim, dtype=torch.int8, device=on)
        scale = torch.zeros(2, heads, 3, device=on)
        store(k.to(on), v.to(on), cache, request, 0, *q8, *scale)
        outs.append((q8.cpu(), scale.cpu()))
    assert_same(layer, expected)
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    for step in range(1, 64 if kind == "normal" else 3):
        seq_lens = torch.tensor([prompt + step, prompt + step], dtype=torch.int32)
        new = [draw("normal", 2, heads, head_dim, 9 * step + side) for side in (0, 1)]
        kv_append(*(x.to(device) for x in new), layer, seq_lens.to(device))
        kv_append_ref(*new, expected, seq_lens)
        kv_compact(layer, seq_lens.to(device))
        kv_compact_ref(expected, seq_lens)
    assert_same(layer, expected)
    blocks = (prompt + step) // BLOCK
    restored = []
    for restore, cache, on in ((kv_restore, layer, device), (kv_restore_ref, expected, torch.device("cpu"))):
        q8 = torch.zeros(2, heads, blocks * BLOCK, head_dim, dtype=torch.int8, device=on)
        scale = torch.zeros(2, heads, blocks, device=on)
        restore(cache, request, blocks, *q8, *scale)
        restored.append((q8.cpu(), scale.cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*restored, strict=True))
    # Stage 1 of a restored block differs from the block's exact values by rounding to INT8 only.
    exact = kv_dequantize(on_cpu(expected), torch.tensor([1, blocks * BLOCK + 1]), torch.float64)
    for side in (0, 1):
        q8, scale = restored[0][0][side].double(), restored[0][1][side].double()
        found = q8 * scale.repeat_interleave(BLOCK, 1)[..., None]
        error = (found - exact[side][request, :, : blocks * BLOCK]).abs().amax((1, 2))
        assert bool((error <= 0.5001 * scale.amax(1)).all())


@pytest.mark.parametrize(("format", "head_dim"), covering(MIXED, [64, 128]))
def test_errors_are_those_of_the_codebooks(format: str, head_dim: int, device: torch.device) -> None:
    """On normal values, the mean square error of a TurboQuant side is that of its Lloyd-Max codebook."""
    expected = {4: 0.0095, 3: 0.0345, 2: 0.1175}
    layer = noisy_layer(1, [4, 4], head_dim, 3, torch.device("cpu"), format)
    sides = [draw("normal", 128, 2, head_dim, seed) for seed in (3, 4)]
    q8, scale = torch.zeros(2, 2, 128, head_dim, dtype=torch.int8), torch.zeros(2, 2, 2)
    kv_store_ref(*sides, layer, 0, 0, *q8, *scale)
    read = kv_dequantize(layer, torch.tensor([129]))
    for x, stored, side in zip(sides, read, FORMATS[format], strict=True):
        if side.method == "turboquant":
            error = (stored[0, :, :128] - x.transpose(0, 1)).square().mean()
            assert 0.9 * expected[side.bits] < error < 1.03 * expected[side.bits] + 2e-4
