"""The SAS device function against its definition in torch and against 2^x."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from alspec import sas
from alspec.kernels.attention.sas_exp2 import sas_cutoff, sas_exp2


@triton.jit
def _apply(x_ptr, out_ptr, cutoff, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, sas_exp2(tl.load(x_ptr + index), cutoff))


@triton.jit
def _cutoffs(lengths_ptr, out_ptr):
    index = tl.program_id(0)
    tl.store(out_ptr + index, sas_cutoff(tl.load(lengths_ptr + index)))


def test_the_cutoff_on_the_device_matches_its_definition(device: torch.device) -> None:
    lengths = torch.tensor([1, 2, 3, 64, 1025, 131072, 2**31 - 1], dtype=torch.int32)
    out = torch.full(lengths.shape, torch.nan, device=device)
    _cutoffs[(len(lengths),)](lengths.to(device), out)
    expected = torch.tensor([-sas.cutoff(n) * math.log2(math.e) for n in lengths.tolist()])
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=0)
    assert (expected >= -125).all()


def test_the_device_function_matches_its_definition(device: torch.device) -> None:
    size = 8192
    x = -30 * torch.rand(size, generator=torch.Generator().manual_seed(3))
    x[:6] = torch.tensor([0.0, -0.5, -1.0, -17.0, -20.5, -torch.inf])
    out = torch.full((size,), torch.nan, device=device)
    _apply[(1,)](x.to(device), out, -20.0, SIZE=size)
    found, expected = out.cpu(), sas.sas_exp2(x, -20.0)
    assert torch.equal(found == 0, x < -20)
    kept = x >= -20
    # A GPU contracts a product and a sum to one FMA.
    torch.testing.assert_close(found[kept], expected[kept], rtol=3e-7, atol=0)
    exact = torch.exp2(x.double())[kept]
    assert ((found[kept].double() / exact - 1).abs() < sas.RELATIVE_ERROR).all()
    integers = x == x.round()
    assert torch.equal(found[integers & kept], torch.exp2(x[integers & kept]))


def test_ends_of_the_range(device: torch.device) -> None:
    """The lowest cutoff and the largest x give exponents next to the smallest and the largest of fp32."""
    x = torch.tensor([-125.0, -125.4, -124.5, -0.0, 0.5, 125.7, 126.49, 126.9])
    out = torch.full((8,), torch.nan, device=device)
    _apply[(1,)](x.to(device), out, -125.0, SIZE=8)
    exact = torch.where(x < -125, 0.0, torch.exp2(x.double()))
    torch.testing.assert_close(out.cpu().double(), exact, rtol=sas.RELATIVE_ERROR, atol=0)


def test_every_nan_stays_nan(device: torch.device) -> None:
    """A GPU computes the NaN 0x7fffffff, a CPU 0x7fc00000 with either sign."""
    x = torch.tensor([0x7FFFFFFF, 0x7FC00000, -0x400000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    out = torch.zeros(4, device=device)
    _apply[(1,)](x.to(device), out, -20.0, SIZE=4)
    assert out.isnan().all()
    assert sas.sas_exp2(x, -20.0).isnan().all()
