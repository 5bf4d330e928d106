"""What interpreter.py computes with NumPy, against PyTorch. Zeros come first: they fix the kept types."""

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.float32, torch.float64]
SIZE = 64


@triton.jit
def values_kernel(left_ptr, right_ptr, out_ptr, SIZE: tl.constexpr, ARE_INTEGERS: tl.constexpr):
    at = tl.arange(0, SIZE)
    left, right = tl.load(left_ptr + at), tl.load(right_ptr + at)
    tl.store(out_ptr + at, left + right)
    tl.store(out_ptr + 1 * SIZE + at, left - right)
    tl.store(out_ptr + 2 * SIZE + at, left * right)
    tl.store(out_ptr + 3 * SIZE + at, left + 3)
    tl.store(out_ptr + 4 * SIZE + at, 5 - left)
    tl.store(out_ptr + 5 * SIZE + at, tl.where(left > 1, left, right))
    tl.store(out_ptr + 6 * SIZE + at, tl.where(left < right, left, 7))
    tl.store(out_ptr + 7 * SIZE + at, tl.minimum(left, right))
    tl.store(out_ptr + 8 * SIZE + at, tl.maximum(left, 2))
    pairs = tl.permute(tl.reshape(tl.join(left, right), (SIZE // 2, 2, 2)), (2, 0, 1))
    tl.store(out_ptr + 9 * SIZE + tl.arange(0, 2 * SIZE), tl.reshape(pairs, (2 * SIZE,)))
    first, second = tl.split(tl.reshape(left, (SIZE // 2, 2)))
    table = tl.arange(0, SIZE // 2)[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    tl.store(out_ptr + 11 * SIZE + table, first[:, None] + second[None, :])
    if ARE_INTEGERS:
        out_ptr += 11 * SIZE + SIZE * SIZE // 4
        divisor = tl.where(right == 0, 3, right)
        tl.store(out_ptr + at, left & right)
        tl.store(out_ptr + 1 * SIZE + at, left | 5)
        tl.store(out_ptr + 2 * SIZE + at, left ^ right)
        tl.store(out_ptr + 3 * SIZE + at, left << 3)
        tl.store(out_ptr + 4 * SIZE + at, left >> 2)
        tl.store(out_ptr + 5 * SIZE + at, left // divisor)
        tl.store(out_ptr + 6 * SIZE + at, left % divisor)


@triton.jit
def truths_and_ratios_kernel(left_ptr, right_ptr, truths_ptr, ratios_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    left, right = tl.load(left_ptr + at), tl.load(right_ptr + at)
    tl.store(truths_ptr + at, left < right)
    tl.store(truths_ptr + 1 * SIZE + at, left <= right)
    tl.store(truths_ptr + 2 * SIZE + at, left > 0)
    tl.store(truths_ptr + 3 * SIZE + at, left >= 2)
    tl.store(truths_ptr + 4 * SIZE + at, left == right)
    tl.store(truths_ptr + 5 * SIZE + at, (left != right) & (left != 0))
    tl.store(truths_ptr + 6 * SIZE + at, left < 0.1)
    tl.store(ratios_ptr + at, left.to(tl.float32) / right.to(tl.float32))
    tl.store(ratios_ptr + 1 * SIZE + at, 1.0 / left.to(tl.float32))
    tl.store(ratios_ptr + 2 * SIZE + at, 0.0 * left.to(tl.float32))
    tl.store(ratios_ptr + 3 * SIZE + at, -0.0 * left.to(tl.float32))


def values(left: torch.Tensor, right: torch.Tensor) -> list[torch.Tensor]:
    """The results that `values_kernel` stores, in order."""
    pairs = torch.stack((left, right), -1).reshape(SIZE // 2, 2, 2).permute(2, 0, 1)
    smaller = torch.where(left < right, left, 7).to(left.dtype)
    found = [left + right, left - right, left * right, left + 3, 5 - left, torch.where(left > 1, left, right), smaller]
    found += [torch.minimum(left, right), left.clamp(min=2), pairs, left[0::2, None] + left[None, 1::2]]
    if left.dtype in INTEGERS:
        divisor = torch.where(right == 0, 3, right).to(left.dtype)
        found += [left & right, left | 5, left ^ right, left << 3, left >> 2]
        found += [torch.div(left, divisor, rounding_mode="trunc"), torch.fmod(left, divisor)]
    return found


def operands(dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands from the whole range of a type, with equal ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        pair = torch.randint(
            limits.min + 1 if limits.min else 0, limits.max, (2, SIZE), generator=generator, dtype=dtype
        )
    else:
        pair = (torch.randn(2, SIZE, generator=generator, dtype=torch.float64) * 100).to(dtype)
        pair[0, 3], pair[1, 5], pair[0, 11] = float("inf"), -float("inf"), 0.1
    pair[0, 7], pair[1, 9], pair[1, 20:25] = 0, 0, pair[0, 20:25]
    return pair[0].contiguous(), pair[1].contiguous()


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
def test_operators_match_torch_after_zeros(dtype: torch.dtype) -> None:
    zeros = torch.zeros(SIZE, dtype=dtype), torch.zeros(SIZE, dtype=dtype)
    for left, right in (zeros, operands(dtype, 1), operands(dtype, 2)):
        expected = torch.cat([each.flatten() for each in values(left, right)])
        out = torch.empty_like(expected)
        values_kernel[1,](left, right, out, SIZE, dtype in INTEGERS)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)

        truths, ratios = torch.empty(7, SIZE, dtype=torch.bool), torch.empty(4, SIZE)
        truths_and_ratios_kernel[1,](left, right, truths, ratios, SIZE)
        orders = [left < right, left <= right, left > 0, left >= 2, left == right, (left != right) & (left != 0)]
        orders += [left.double() < torch.tensor(0.1).double()]  # a constant has 32 bits
        assert truths.equal(torch.stack(orders))
        x, y = left.float(), right.float()
        expected = torch.stack([x / y, 1.0 / x, 0.0 * x, 0.0 * x])  # Triton has no constant of -0.0
        torch.testing.assert_close(ratios, expected, rtol=0, atol=0, equal_nan=True)
        signed = ~expected.isnan()
        assert ratios.signbit()[signed].equal(expected.signbit()[signed])


@triton.jit
def rare_kernel(x_ptr, flags_ptr, out_ptr, SIZE: tl.constexpr, TO: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, flags = tl.load(x_ptr + at), tl.load(flags_ptr + at)
    tl.store(out_ptr + at, (flags == 2).to(TO))
    first, second = tl.split(tl.load(x_ptr + tl.arange(0, 2)))
    tl.store(out_ptr + SIZE, (first + second).to(TO))
    tl.store(out_ptr + SIZE + 1, tl.argmax(x, 0).to(TO))


def test_rare_arguments_take_the_slow_path() -> None:
    """A flag is compared with a number, a pair of scalars is split, and the language calls an operator itself."""
    for flag in (False, True):
        x, flags = torch.randn(SIZE, generator=torch.Generator().manual_seed(int(flag))), torch.full((SIZE,), flag)
        out = torch.empty(SIZE + 2)
        rare_kernel[1,](x, flags, out, SIZE, tl.float32)
        assert out.equal(torch.cat([torch.zeros(SIZE), (x[0] + x[1])[None], x.argmax()[None].float()]))


@triton.jit
def conversion_kernel(x_ptr, rounded_ptr, back_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(rounded_ptr + at, tl.load(x_ptr + at).to(tl.bfloat16))
    tl.store(back_ptr + at, tl.load(rounded_ptr + at).to(tl.float32))


def test_bf16_is_rounded_as_in_torch() -> None:
    """Any bits of fp32: ties, subnormal numbers, the largest ones, infinities, NaN."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0))
    bits[:1024] &= ~0xFFFF
    bits[:512] |= 0x8000  # ties
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7F7FFFFF, 0x7F7F7FFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF]
    bits[-2 * len(edges) :] = torch.tensor(edges + [edge - 2**31 for edge in edges])
    x = bits.int().view(torch.float32)
    rounded, back = torch.empty(4096, dtype=torch.bfloat16), torch.empty(4096)
    conversion_kernel[1,](x, rounded, back, 4096)
    same_number = ~x.isnan()
    assert torch.equal(rounded.isnan(), x.isnan())
    assert torch.equal(rounded.view(torch.int16)[same_number], x.bfloat16().view(torch.int16)[same_number])
    assert torch.equal(back.view(torch.int32), rounded.float().view(torch.int32))
