"""Quantised weights against theory, against brute force, and against compressed-tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from alspec.models.checkpoint.quantised import quantisers
from alspec.models.checkpoint.quantised.packed_weight import PackedWeight
from alspec.models.checkpoint.quantised.quantisers import CLIPS, quantise_fp8_channel, quantise_int4
from alspec.models.matrix_formats import packed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))).to(dtype)


def relative_error(packed: PackedWeight, weight: Tensor) -> float:
    error = packed.dequantise(torch.float64) - weight.double()
    return float(error.norm() / weight.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_rounds_to_the_nearest_number(dtype: torch.dtype) -> None:
    """Compared with all 253 numbers of e4m3 that are not NaN."""
    weight = normal(5, 67, dtype)
    weight[3] = 0.0
    weight[4] *= 1e-6 if dtype != torch.float16 else 1.0
    packed = quantise_fp8_channel(weight)
    assert (packed.format, packed.shape, packed.group_size) == ("fp8", (5, 67), 67)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = numbers[~numbers.isnan()]
    possible = numbers * packed.scales.double()[:, :, None]  # [out, 1, numbers]
    nearest = (weight.double()[..., None] - possible).abs().amin(-1)
    found = (packed.dequantise(torch.float32).double() - weight.double()).abs()
    assert ((found - nearest).abs() <= 1e-6 * weight.double().abs()).all()  # scaling rounds in fp32
    assert torch.equal(packed.dequantise(torch.float32)[3], torch.zeros(67))
    largest = weight.float().abs().amax(1)
    assert torch.allclose(packed.dequantise(torch.float32).abs().amax(1), largest, rtol=1e-6)


def test_fp8_error_is_that_of_three_bits() -> None:
    """Rounding to 4 significant bits: the relative error is uniform in +-2^-4 of the binade's start.

    Over a binade [1, 2) the mean square is (2^-3)^2 / 12, and that of x is 7 / 3, if x is uniform in it.
    """
    expected = ((2**-3) ** 2 / 12 / (7 / 3)) ** 0.5  # 0.0236
    weight = normal(64, 1024)
    assert relative_error(quantise_fp8_channel(weight), weight) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_is_the_best_of_its_candidates(symmetric: bool, group_size: int, dtype: torch.dtype) -> None:
    """Brute force over candidates, and for each number over all 16 codes."""
    weight = normal(3, 256, dtype, seed=2)
    weight[0, :64] = weight[0, :64].abs() + 0.01  # one-sided: the range begins at 0
    weight[1, 5] = 0.3  # far out
    weight[2, :128] = 0.0
    packed = quantise_int4(weight, group_size, symmetric)
    size = 256 if group_size == -1 else group_size
    assert (packed.format, packed.shape, packed.group_size) == ("int4", (3, 256), size)
    assert packed.scales.dtype == dtype
    assert (packed.zeros is None) == symmetric
    values = packed.dequantise(torch.float32)
    for row in range(3):
        for start in range(0, 256, size):
            group = weight[row, start : start + size].float()
            error = float(((values[row, start : start + size] - group) ** 2).sum())
            assert error == pytest.approx(least_error(group, symmetric, dtype), rel=1e-4, abs=1e-12)


def least_error(group: Tensor, symmetric: bool, dtype: torch.dtype) -> float:
    errors = []
    least, most = min(float(group.min()), 0.0), max(float(group.max()), 0.0)
    if symmetric:
        least, most = -max(-least, most), max(-least, most)
    if most == least:
        return 0.0
    for clip in CLIPS:
        scale = float(torch.tensor((most - least) * clip / 15).to(dtype))
        zero = 8 if symmetric else min(max(round(-clip * least / scale), 0), 15)
        codes = (torch.arange(16) - zero) * scale
        errors.append(float(((group[:, None] - codes).abs().amin(1) ** 2).sum()))
    return min(errors)


@pytest.mark.parametrize(("symmetric", "limit"), [(False, 0.105), (True, 0.105)])
def test_int4_error_of_normal_numbers(symmetric: bool, limit: float) -> None:
    """15 steps over +-2.7 sigma, the mean range of 128 normal numbers: a step of 0.36 sigma has an error of 0.104.

    Clipping can only lower it.
    """
    weight = normal(64, 1024)
    error = relative_error(quantise_int4(weight, 128, symmetric), weight)
    assert 0.08 < error < limit


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_search_pays(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(64, 1024, torch.bfloat16)
    error = relative_error(quantise_int4(weight, 128, symmetric), weight)
    monkeypatch.setattr(quantisers, "CLIPS", (1.0,))
    assert error < 0.985 * relative_error(quantise_int4(weight, 128, symmetric), weight)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_int4_keeps_a_number_that_is_not_finite_visible(symmetric: bool, bad: float) -> None:
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    weight[3, 40] = bad
    found = quantise_int4(weight, 32, symmetric, torch.bfloat16).dequantise(torch.float32)
    assert found[3, 32:64].isnan().all()
    found[3, 32:64] = 0
    assert found.isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_fp8_keeps_a_number_that_is_not_finite_visible(bad: float) -> None:
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    weight[3, 40] = bad
    found = quantise_fp8_channel(weight)
    for values in (found.dequantise(torch.float32), packed(found, 8).dequantise(torch.float32)):
        assert values[3].isnan().all()
        assert values[[0, 1, 2, 4]].isfinite().all()


def test_int4_of_int4_is_exact() -> None:
    """Numbers that are codes times a scale come back, if they reach both ends of the range."""
    codes = torch.randint(0, 16, (8, 128), generator=torch.Generator().manual_seed(4))
    codes[:, 0], codes[:, 1] = 0, 15
    weight = (codes - 6) * 0.03125
    packed = quantise_int4(weight, 128)
    assert torch.equal(packed.dequantise(torch.float32), weight)
    assert packed.zeros is not None
    assert (packed.zeros == 6).all()


@pytest.mark.parametrize("group_size", [3, 48, 0, -2, 256])
def test_group_sizes_that_do_not_fit(group_size: int) -> None:
    with pytest.raises(ValueError, match="group_size"):
        quantise_int4(normal(2, 128), group_size)


SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "int4-zeros": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
}


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_rounds_alike(name: str) -> None:
    """The package's codes with the same scales and zero points."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

    weight, args = normal(24, 256), QuantizationArgs(**SCHEMES[name])
    packed = quantise_fp8_channel(weight) if name == "fp8" else quantise_int4(weight, 32, args.symmetric)
    zeros = None if packed.zeros is None else (packed.zeros.to(torch.int8) - 8)
    codes = quantize(weight, packed.scales, zeros, args, dtype=args.pytorch_dtype())
    expected = dequantize(codes, packed.scales, zeros, args)
    # The package adds the zero point before it rounds: halves may go to the other neighbour.
    found = packed.dequantise(torch.float32)
    assert float((found != expected).float().mean()) < 1e-3
    assert torch.allclose((found - weight).abs(), (expected - weight).abs(), rtol=1e-4, atol=1e-7)
