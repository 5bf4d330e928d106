"""RMSNorm, SiLU gate and rotary embedding against their fp64 oracles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiers import covering
from torch import Tensor

from alspec.kernels.attention.oracles import add_rms_norm_ref, apply_rope_ref, rms_norm_ref, silu_mul_ref
from alspec.kernels.prompt import prompt_kernels
from alspec.kernels.prompt.elementwise import HeadNorms, add_rms_norm, rms_norm, rope_cos_sin, rotate_heads, silu_mul

Check = Callable[[Tensor, Tensor, torch.dtype], None]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [n, H, D] as queries, beside one key and one value."""
    q, _, _ = rotate_heads(torch.cat([x, x.new_zeros(len(x), 2, x.shape[2])], dim=1), 1, cos, sin)
    return q


DTYPES = [torch.float32, torch.bfloat16]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])


def draw(shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize(
    ("num_tokens", "hidden", "dtype"), covering([1, 3, 65], [1, 16, 80, 511, 4096], DTYPES), ids=str
)
def test_rms_norm_matches_the_oracle(
    num_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, check: Check
) -> None:
    x = draw((num_tokens, hidden), 0, device, torch.float32) * 3
    weight = draw((hidden,), 1, device, dtype)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    check(out, rms_norm_ref(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm_adds_epsilon_to_the_mean_square(scale: float, device: torch.device, check: Check) -> None:
    """Rows as small as sqrt(eps) show where the formula adds it."""
    x, weight = draw((4, 64), 0, device, torch.float32) * scale, draw((64,), 1, device, torch.float32)
    check(rms_norm(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5), torch.float32)


def test_rms_norm_of_zeros_is_zero(device: torch.device) -> None:
    out = rms_norm(torch.zeros(2, 16, device=device), torch.ones(16, device=device), 1e-6)
    assert torch.equal(out, torch.zeros_like(out))


def test_rms_norm_keeps_nan_in_its_row(device: torch.device, check: Check) -> None:
    x, weight = draw((3, 16), 0, device, torch.float32), torch.ones(16, device=device)
    x[1, 4] = torch.nan
    check(rms_norm(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6), torch.float32)


def test_rms_norm_of_a_row_whose_squares_overflow_is_nan(device: torch.device, check: Check) -> None:
    x, weight = draw((3, 16), 0, device, torch.float32), torch.ones(16, device=device)
    x[1, 4] = 1e20
    out = rms_norm(x, weight, 1e-6)
    assert out[1].isnan().all()
    check(out[::2], rms_norm_ref(x[::2], weight, 1e-6), torch.float32)


@by_dtype
@pytest.mark.parametrize("shape", [(1, 2), (3, 16), (65, 2 * 511)], ids=str)
def test_silu_mul_matches_the_oracle(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, check: Check
) -> None:
    gate_up = draw(shape, 0, device, dtype) * 4
    out = silu_mul(gate_up)
    assert out.dtype == dtype
    check(out, silu_mul_ref(gate_up), dtype)


def test_silu_mul_saturates(device: torch.device, check: Check) -> None:
    gate = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4]], device=device)
    gate_up = torch.cat([gate, torch.full_like(gate, 2.0)], dim=1)
    check(silu_mul(gate_up), silu_mul_ref(gate_up), torch.float32)


@by_dtype
@pytest.mark.parametrize("head_dim", [2, 16, 80, 128])
def test_rope_of_exact_angles(head_dim: int, dtype: torch.dtype, device: torch.device, check: Check) -> None:
    """Frequencies are powers of two, so angles are exact, and only cosine and sine round."""
    positions = torch.tensor([0, 1, 63, 64, 8191, 131071], device=device)
    inv_freq = 2.0 ** -torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    x = draw((len(positions), 3, head_dim), 0, device, dtype)
    out = apply_rope(x, *rope_cos_sin(positions, inv_freq))
    assert out.dtype == dtype
    check(out, apply_rope_ref(x, positions, inv_freq), dtype)


@by_dtype
def test_rope_of_real_frequencies(dtype: torch.dtype, device: torch.device, check: Check) -> None:
    # Positions are small, because the rounding of an angle of p radians grows with p.
    positions = torch.arange(8, device=device)
    inv_freq = 10_000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float32, device=device) / 64)
    x = draw((8, 3, 64), 0, device, dtype)
    check(apply_rope(x, *rope_cos_sin(positions, inv_freq)), apply_rope_ref(x, positions, inv_freq), dtype)


def test_rope_keeps_lengths_and_relative_scores(device: torch.device, check: Check) -> None:
    """A rotation keeps norms, and q k depends only on the distance of two positions."""
    inv_freq = 10.0 ** -torch.arange(16, dtype=torch.float32, device=device).div(8)
    q, k = (draw((1, 1, 32), seed, device, torch.float32).expand(5, -1, -1) for seed in (0, 1))
    start = torch.arange(5, device=device)
    rotated_q = apply_rope(q, *rope_cos_sin(start + 3, inv_freq))
    rotated_k = apply_rope(k, *rope_cos_sin(start, inv_freq))
    check(rotated_q.norm(dim=-1), q.norm(dim=-1), torch.float32)
    scores = (rotated_q * rotated_k).sum(-1)
    check(scores, scores[:1].expand(5, 1), torch.float32)
    assert not torch.allclose(rotated_q[0], rotated_q[1])


SIZES = [1, 16, 80, 511, 4096]


@pytest.mark.parametrize(("num_parts", "size", "dtype"), covering([0, 1, 2, 4], SIZES, DTYPES), ids=str)
def test_add_rms_norm_matches_the_oracle(
    num_parts: int, size: int, dtype: torch.dtype, device: torch.device, check: Check
) -> None:
    """Tests the kernel, interpreted or compiled, and the torch operations that replace it on the CPU."""
    x = draw((3, size), 0, device, torch.float32) * 3
    parts = draw((num_parts, 3, size), 2, device, dtype) if num_parts else None
    weight = draw((size,), 1, device, dtype)
    total, normed = add_rms_norm_ref(x, parts, weight, 1e-5)
    out, y = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan, dtype=dtype)
    prompt_kernels.add_rms_norm(x, parts, weight, out, y, 1e-5)
    for found_sum, found in ((x if parts is None else out, y), add_rms_norm(x, parts, weight, 1e-5)):
        # The bound is four roundings of numbers below 16.
        torch.testing.assert_close(found_sum.double(), total, rtol=0, atol=4 * 2**-21)
        check(found, normed, dtype)
    if parts is None:
        assert bool(out.isnan().all())


def test_parts_are_added_in_their_order(device: torch.device) -> None:
    """All ranks compute (a + b) + c, which differs from a + (b + c) here, and add x last."""
    parts = torch.tensor([1e8, -1e8, 1.0], device=device)[:, None, None].expand(3, 1, 16).contiguous()
    x, weight = torch.full((1, 16), 2.0**-30, device=device), torch.ones(16, device=device)
    out, y = torch.empty_like(x), torch.empty_like(x)
    prompt_kernels.add_rms_norm(x, parts, weight, out, y, 1e-5)
    for total in (out, add_rms_norm(x, parts, weight, 1e-5)[0]):
        assert bool((total == 1.0).all())


@by_dtype
@pytest.mark.parametrize("heads", [(1, 1, 2), (4, 2, 16), (7, 1, 80), (32, 8, 128)], ids=str)
def test_rotate_heads_matches_the_oracle(
    heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device, check: Check
) -> None:
    num_qo_heads, num_kv_heads, head_dim = heads
    positions = torch.tensor([0, 3, 131071], device=device)
    inv_freq = 2.0 ** -torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    qkv = draw((3, num_qo_heads + 2 * num_kv_heads, head_dim), 0, device, dtype)
    cos, sin = rope_cos_sin(positions, inv_freq)
    q = torch.full((3, num_qo_heads, head_dim), torch.nan, dtype=dtype, device=device)
    k = torch.full((3, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
    prompt_kernels.rotate_heads(qkv, cos, sin, q, k)
    expected = apply_rope_ref(qkv, positions, inv_freq).split([num_qo_heads, num_kv_heads, num_kv_heads], dim=1)
    *by_torch, v = rotate_heads(qkv, num_kv_heads, cos, sin)
    for found in ((q, k), by_torch):
        for heads_found, heads_expected in zip(found, expected[:2], strict=True):
            assert heads_found.dtype == dtype
            check(heads_found, heads_expected, dtype)
    assert torch.equal(v, qkv[:, -num_kv_heads:])


@by_dtype
@pytest.mark.parametrize("heads", [(1, 1, 2), (5, 2, 20), (32, 8, 128)], ids=str)
def test_heads_are_normalised_before_the_rotation(
    heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device, check: Check
) -> None:
    """Also with a factor of the rotation, and channels that are not rotated."""
    num_qo_heads, num_kv_heads, head_dim = heads
    positions, eps = torch.tensor([0, 3, 999], device=device), 0.01
    inv_freq = 2.0 ** -torch.arange(head_dim // 2, dtype=torch.float32, device=device)
    inv_freq[head_dim // 3 :] = 0
    factors = torch.where(inv_freq > 0, 1.5, 1.0)
    qkv = draw((3, num_qo_heads + 2 * num_kv_heads, head_dim), 0, device, dtype) * 3
    norms = HeadNorms(draw((head_dim,), 1, device, dtype), draw((head_dim,), 2, device, dtype), eps)
    cos, sin = rope_cos_sin(positions, inv_freq, factors)
    q = torch.full((3, num_qo_heads, head_dim), torch.nan, dtype=dtype, device=device)
    k = torch.full((3, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
    prompt_kernels.rotate_heads(qkv, cos, sin, q, k, *norms)
    *by_torch, v = rotate_heads(qkv, num_kv_heads, cos, sin, norms)
    parts = qkv.split([num_qo_heads, num_kv_heads, num_kv_heads], dim=1)
    for index, norm in enumerate(norms[:2]):
        expected = apply_rope_ref(rms_norm_ref(parts[index], norm, eps), positions, inv_freq)
        expected = expected * factors.double().repeat(2)
        for found in ((q, k), by_torch):
            assert found[index].dtype == dtype
            check(found[index], expected, dtype)
    assert torch.equal(v, parts[2])


@by_dtype
@pytest.mark.parametrize("size", SIZES)
def test_the_silu_mul_kernel_matches_the_oracle(
    size: int, dtype: torch.dtype, device: torch.device, check: Check
) -> None:
    gate_up = draw((3, 2 * size), 0, device, dtype) * 4
    gate_up[0, 0], gate_up[1, 0] = -1e4, 1e4
    out = torch.full((3, size), torch.nan, dtype=dtype, device=device)
    prompt_kernels.silu_mul(gate_up, out)
    check(out, silu_mul_ref(gate_up), dtype)
