"""FlashQ's arithmetic: both stages over their whole range, error bounds against fp64, and the choice of 2-bit heads."""

from __future__ import annotations

import math

import pytest
import torch
from tiers import covering
from torch import Tensor

from alspec.kernels.kv_codec.flashq.quantize import (
    INT8_MAX,
    SELECTORS,
    compress,
    dequantize,
    fake_quantize,
    head_priority,
    quantize_int8,
    reconstruct,
    select_bits,
)
from alspec.kernels.kv_codec.quantised_layer import BLOCK

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HIGHEST = {4: 127, 2: 121}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [4, 2])
def test_stage_2_is_exact_for_every_range_of_a_channel(bits: int) -> None:
    """Covers every (min, max) of a channel and every code between them, in exact integers."""
    low, high = torch.meshgrid(torch.arange(-119, 120), torch.arange(-119, 120), indexing="ij")
    low, high = (bound[low <= high] for bound in (low, high))
    codes = torch.arange(-119, 120)[:, None].clamp(
        low, high
    )  # [239 tokens, pairs]: each pair has all codes of its range
    q2, s_int, z = compress(codes.to(torch.int8), bits)

    levels = 2**bits - 1
    assert torch.equal(z.int(), low.int())
    assert s_int.tolist() == [
        max(1, math.ceil((b - a) / levels)) for a, b in zip(low.tolist(), high.tolist(), strict=True)
    ]
    assert int(q2.max()) == levels
    restored = reconstruct(q2, s_int, z).int()
    exact = q2.int() * s_int.int() + z.int()
    assert torch.equal(restored, exact), "a code is outside INT8"
    assert int(exact.min()) == -119
    assert int(exact.max()) == HIGHEST[bits]
    # Round half up: the error is in (-s_int / 2, s_int / 2].
    error = 2 * (exact - codes)
    assert bool(((error > -s_int.int()) & (error <= s_int.int())).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 127, 128, 200])
def test_stage_1_rounds_by_half_a_step(num_tokens: int, dtype: torch.dtype) -> None:
    x = (draw(2, 3, num_tokens, 80) * 3).to(dtype)
    q1, scale = quantize_int8(x)
    assert q1.dtype == torch.int8
    assert q1.shape == x.shape
    assert scale.shape == (2, 3, math.ceil(num_tokens / BLOCK))
    for block in range(scale.shape[-1]):
        tokens = slice(block * BLOCK, (block + 1) * BLOCK)
        part, codes, s = x[..., tokens, :].double(), q1[..., tokens, :].double(), scale[..., block, None, None].double()
        highest = part.abs().amax((-2, -1), keepdim=True)
        assert torch.allclose(s, highest / 119, rtol=2**-24, atol=0)
        assert torch.equal(codes.abs().amax((-2, -1)), torch.full((2, 3), 119.0, dtype=torch.double))
        assert bool(((codes * s - part).abs() <= s / 2 * (1 + 1e-5)).all())
    assert torch.equal(dequantize(q1, scale), fake_quantize(x.float(), 8))


@pytest.mark.parametrize(("num_tokens", "bits", "block"), covering([1, 31, 64, 129, 300], [2, 4, 8], [32, 64, 128]))
def test_the_error_of_both_stages_has_a_bound(num_tokens: int, bits: int, block: int) -> None:
    """Each stage rounds by half a step at most. s_int comes from the range of the channel."""
    x = draw(3, num_tokens, 64, seed=num_tokens) * torch.rand(64, generator=torch.Generator().manual_seed(1)) * 10
    found = fake_quantize(x, bits, block).double()
    exact = x.double()
    for start in range(0, num_tokens, block):
        part = exact[:, start : start + block]
        scale = part.abs().amax((1, 2), keepdim=True) / INT8_MAX
        bound = scale / 2
        if bits != 8 and part.shape[1] == block:
            spread = (part.amax(1, keepdim=True) - part.amin(1, keepdim=True)) / scale + 1
            bound = bound + scale * torch.ceil(spread / (2**bits - 1)).clamp(min=1) / 2
        error = (found[:, start : start + block] - part).abs()
        assert bool((error <= bound * (1 + 1e-5)).all())
    whole = num_tokens // block * block
    assert torch.equal(fake_quantize(x, bits, block)[:, whole:], fake_quantize(x, 8, block)[:, whole:])


def test_zeros_and_constants_are_exact() -> None:
    assert torch.equal(fake_quantize(torch.zeros(2, 100, 64), 2), torch.zeros(2, 100, 64))
    q1, scale = quantize_int8(torch.zeros(2, 64, 64))
    assert int(q1.abs().max()) == 0
    assert torch.equal(scale, torch.ones(2, 1))
    # A constant channel has s_int = 1 and all codes 0, so only stage 1 rounds it.
    codes = torch.randint(-119, 120, (64,), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    q2, s_int, z = compress(codes.expand(64, 64), 2)
    assert int(q2.max()) == 0
    assert bool((s_int == 1).all())
    assert torch.equal(z, codes)
    assert torch.equal(reconstruct(q2, s_int, z), codes.expand(64, 64))


@pytest.mark.parametrize("magnitude", [1e30, 3e38, 1e-30, 1e-44])
def test_outliers_stay_in_range(magnitude: float) -> None:
    """One huge value decides the scale. The smallest floats have an inexact scale, and their codes are in range too."""
    x = draw(1, 64, 64) * min(magnitude, 1.0)
    x[0, 5, 7] = -magnitude
    q1, scale = quantize_int8(x)
    assert bool(scale.isfinite().all())
    assert bool((scale > 0).all())
    assert int(q1.int().abs().max()) <= 119
    if magnitude > 1:
        assert int(q1[0, 5, 7]) == -119
        assert int(q1.int().abs().sum()) == 119


def test_rounding_is_half_to_even_then_half_up() -> None:
    x = torch.zeros(64, 64)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = 119.0, 2.5, 3.5, -2.5
    assert quantize_int8(x)[0][:4, 0].tolist() == [119, 2, 4, -2]
    codes = torch.zeros(64, 1, dtype=torch.int8)
    codes[:3, 0] = torch.tensor([6, 1, 3])
    q2, s_int, z = compress(codes, 2)  # range 6 in 3 steps of 2
    assert (int(s_int), int(z)) == (2, 0)
    assert q2[:4, 0].tolist() == [3, 1, 2, 0]


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="bits: expected 2, 3 or 4, found 5"):
        compress(torch.zeros(64, 8, dtype=torch.int8), 5)


@pytest.mark.parametrize("selector", SELECTORS)
def test_head_priority_matches_fp64(selector: str) -> None:
    k, v = (draw(5, 130, 64, seed=seed) * torch.linspace(1, 4, 5)[:, None, None] for seed in (3, 4))

    def one(x: Tensor) -> float:
        values = x.double()
        ranges = [float(values[:, c].max() - values[:, c].min()) for c in range(64)]
        mean = sum(ranges) / 64
        std = math.sqrt(sum((value - mean) ** 2 for value in ranges) / 64)
        gap = float(values.max() - values.min())
        codes = torch.round(x / (x.abs().max() / 119)).flatten().tolist()
        shares = [codes.count(code) / len(codes) for code in set(codes)]
        entropy = -sum(share * math.log2(share) for share in shares)
        return {"gap_std": gap * std, "min_max": gap, "variation": std, "entropy": entropy}[selector]

    expected = torch.tensor([one(k[h]) + one(v[h]) for h in range(5)])
    assert torch.allclose(head_priority(k, v, selector), expected, rtol=1e-4)


def test_the_heads_of_lowest_priority_get_2_bits() -> None:
    priority = torch.tensor([3.0, 1.0, 2.0, 1.0])
    assert select_bits(priority, 2).tolist() == [4, 2, 4, 2]
    assert select_bits(priority, 1).tolist() == [4, 2, 4, 4]
    assert select_bits(priority, 0).tolist() == [4, 4, 4, 4]
    assert select_bits(torch.ones(4), 2).tolist() == [2, 2, 4, 4]
