"""Projections of a step with quantised weights, against fp64 products of the dequantised weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from step_tensors import EPS, nan, normal, stream
from torch import Tensor

from alspec.kernels.attention.oracles import gate_up_silu_ref, lm_head_ref, push_partial_ref, qkv_rope_append_ref
from alspec.kernels.comm.exchange import Exchange, LogitExchange
from alspec.kernels.linear.decode_weight import DecodeWeight, fits, pack_weight, packed_bytes
from alspec.kernels.linear.projections import gate_up_silu, qkv_rope_append
from alspec.kernels.linear.push import lm_head, push_partial
from alspec.kernels.linear.unpack_weight import unpack_weight

Check = Callable[[Tensor, Tensor, torch.dtype], None]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CAPACITY, EPOCH = 9, 5


def quantised(
    device: torch.device, kind: str, rows: int, columns: int, group_size: int, stride: int, symmetric: bool = False
) -> tuple[DecodeWeight, Tensor]:
    """Random codes, all scales different, and their values [out, in] in fp64, by arithmetic of this test."""
    groups = -(-columns // group_size)
    scales = (torch.rand(rows, groups) + 0.5) / columns**0.5
    zeros = None
    if kind == "fp8":
        codes = torch.randn(rows, columns).mul(3).to(torch.float8_e4m3fn)
        codes.view(torch.uint8)[:, ::7] &= 0x87  # subnormal numbers and both zeros
        values = codes.double()
    else:
        scales = scales.to(BF16).float()
        codes = torch.randint(16, (rows, columns), dtype=torch.uint8)
        zeros = None if symmetric else torch.randint(16, (rows, groups), dtype=torch.uint8)
        points = torch.full((rows, groups), 8.0) if zeros is None else zeros
        values = codes.double() - points.double().repeat_interleave(group_size, 1)[:, :columns]
    values = values * scales.double().repeat_interleave(group_size, 1)[:, :columns]
    parts = (codes.to(device), scales.to(device), None if zeros is None else zeros.to(device))
    return pack_weight(*parts, kind, min(group_size, columns), stride), values.to(device)


# kind, columns, group size, symmetric: one and several slices, partial ones, rows that end within a line or a group.
FORMATS = [
    ("fp8", 96, 96, True),
    ("fp8", 4096, 4096, True),
    ("fp8", 712, 128, True),
    ("int4", 64, 32, True),
    ("int4", 200, 32, False),
    ("int4", 712, 64, True),
    ("int4", 2112, 128, False),
    ("int4", 4096, 128, False),
    ("int4", 328, 328, False),
    ("int4", 512, 256, True),
]


@pytest.mark.parametrize("stride", [8, 24, 40])
@pytest.mark.parametrize("case", FORMATS, ids=str)
def test_a_packed_weight_has_the_values_of_its_codes(device: torch.device, case: tuple, stride: int) -> None:
    kind, columns, group_size, symmetric = case
    weight, values = quantised(device, kind, 4 * stride + 5 * (stride == 8), columns, group_size, stride, symmetric)
    assert torch.equal(weight.dequantise(torch.float64).float(), values.float())
    assert weight.nbytes == packed_bytes(weight.shape, stride, kind, min(group_size, columns))
    found = nan(device, F32, *weight.shape)
    unpack_weight(weight, found)
    assert torch.equal(found, values.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scales_keep_20_bits(dtype: torch.dtype) -> None:
    """Those of 16 bits are exact, those in fp32 are rounded to nearest: docs/weights.md states the error."""
    scales = torch.rand(64, 4, generator=torch.Generator().manual_seed(0)).add(0.01).to(dtype)
    codes, zeros = torch.full((64, 128), 9, dtype=torch.uint8), torch.full((64, 4), 8, dtype=torch.uint8)
    found = pack_weight(codes, scales, zeros, "int4", 32).dequantise(torch.float32)
    exact = scales.double().repeat_interleave(32, 1)
    error = float(((found.double() - exact) / exact).abs().max())
    assert error <= 2**-20
    assert (error > 2**-22) == (dtype == torch.float32)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("group_size", [128, 256])
def test_a_code_of_nan_is_seen(device: torch.device, group_size: int, code: int) -> None:
    """Kernels move the bits of a code: without more they would read it as 480."""
    codes = torch.randn(37, 256, device=device).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[20, 130] = code
    weight = pack_weight(codes, torch.ones(37, 256 // group_size, device=device), None, "fp8", group_size)
    found, is_nan = nan(device, F32, 37, 256), torch.zeros(37, 256, dtype=torch.bool, device=device)
    is_nan[20, 128 if group_size == 128 else 0 :] = True
    unpack_weight(weight, found)
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(weight.dequantise(F32).isnan(), is_nan)
    fault = torch.zeros(1, dtype=torch.int32, device=device)
    exchange = Exchange(nan(device, F32, 2, 37), fault + EPOCH, fault, tp_rank=0, tp_size=1, rank=0)
    push_partial(torch.ones(2, 256, dtype=BF16, device=device), weight, exchange, 0)
    assert int(fault) != 0
    assert exchange.partial.isnan().any(0).nonzero().flatten().tolist() == [20]


def test_a_scale_of_nan_is_seen() -> None:
    """Whatever its bits are: rounding must not carry them into the sign."""
    scales = torch.ones(16, 2)
    scales.view(torch.int32)[3, 0], scales.view(torch.int32)[4, 1] = 0x7FFFFFFF, -1
    codes = torch.full((16, 64), 9, dtype=torch.uint8)
    found = pack_weight(codes, scales, None, "int4", 32).dequantise(F32).isnan()
    assert found[3, :32].all()
    assert found[4, 32:].all()
    assert int(found.sum()) == 64


def test_layouts_that_do_not_exist() -> None:
    assert fits((48, 64), 8, 64)
    assert not fits((48, 68), 8, 32)  # a lane would read half of its inputs
    assert not fits((40, 64), 20, 32)  # half a tile would have other rows
    assert not fits((48, 64), 16, 32)
    assert not fits((48, 512), 8, 48)
    with pytest.raises(ValueError, match=r"weight: no layout for \[48, 512\]"):
        pack_weight(torch.zeros(48, 512, dtype=torch.uint8), torch.ones(48, 11), None, "int4", 48)


def row_parallel(x: Tensor, weight: DecodeWeight, bias: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    zero = torch.zeros(1, dtype=torch.int32, device=x.device)
    exchange = Exchange(nan(x.device, F32, len(x), weight.shape[0]), zero + EPOCH, zero, tp_rank=0, tp_size=1, rank=0)
    push_partial(x, weight, exchange, 0, gate, bias)
    assert int(exchange.fault) == 0
    return exchange.partial


@pytest.mark.parametrize("batch", [1, 3, 8, 13])
@pytest.mark.parametrize("case", FORMATS, ids=str)
def test_row_parallel_products(device: torch.device, case: tuple, batch: int, check: Check) -> None:
    """The bits of a request are the same alone and among others."""
    kind, columns, group_size, symmetric = case
    dtype = F16 if batch == 3 else BF16
    weight, values = quantised(device, kind, 37, columns, group_size, 8, symmetric)
    # Memory behind the inputs must not be read.
    x = torch.cat([normal(device, dtype, batch, columns).flatten(), nan(device, dtype, 64)])[:-64].view(batch, columns)
    bias, gate = normal(device, dtype, 37), torch.ones(1, dtype=torch.int32, device=device) if batch == 3 else None
    found = row_parallel(x, weight, bias, gate)
    check(found, push_partial_ref(x, values, bias), F32)
    assert torch.equal(row_parallel(x[batch - 1 :], weight, bias)[0], found[-1])


@pytest.mark.parametrize(("batch", "is_gated"), [(1, False), (9, True)])
@pytest.mark.parametrize("case", FORMATS[2:6], ids=str)
def test_gate_and_up(device: torch.device, case: tuple, batch: int, is_gated: bool, check: Check) -> None:
    kind, columns, group_size, symmetric = case
    weight, values = quantised(device, kind, 48, columns, group_size, 24, symmetric)
    x_norm, squares = stream(device, BF16, batch, columns)
    gate = torch.ones(1, dtype=torch.int32, device=device) if is_gated else None
    bias = normal(device, BF16, 48)
    out = nan(device, BF16, batch, 24)
    gate_up_silu(x_norm, squares, weight, out, EPS, gate, bias)
    check(out, gate_up_silu_ref(x_norm, squares, values, EPS, bias), BF16)


@pytest.mark.parametrize(("batch", "is_gated", "case"), [(1, False, 2), (11, True, 4), (2, False, 6), (1, True, 7)])
def test_qkv(device: torch.device, case: int, batch: int, is_gated: bool, check: Check) -> None:
    kind, columns, group_size, symmetric = FORMATS[case]
    num_qo_heads, num_kv_heads, head_dim = 3, 1, 48
    rows = (num_qo_heads + 2 * num_kv_heads) * head_dim
    weight, values = quantised(device, kind, rows, columns, group_size, head_dim // 2, symmetric)
    x_norm, squares = stream(device, BF16, batch, columns)
    angle = torch.rand(batch, head_dim // 2, device=device) * 6
    rope = torch.stack([angle.cos(), angle.sin()], dim=1)
    seq_lens = torch.randint(1, CAPACITY + 1, (batch,), dtype=torch.int32, device=device)
    q = nan(device, BF16, batch, num_qo_heads, head_dim)
    caches = [nan(device, BF16, batch, num_kv_heads, CAPACITY, head_dim) for _ in range(2)]
    bias, gate = normal(device, BF16, rows), torch.ones(1, dtype=torch.int32, device=device) if is_gated else None
    qkv_rope_append(x_norm, squares, weight, rope, seq_lens, q, *caches, EPS, gate, bias=bias)
    expected = qkv_rope_append_ref(x_norm, squares, values, rope, num_kv_heads, EPS, bias)
    check(q, expected[0], BF16)
    for cache, new in zip(caches, expected[1:], strict=True):
        written = torch.arange(CAPACITY, device=device) == (seq_lens - 1)[:, None]
        check(cache.transpose(1, 2)[written], new, BF16)
        assert cache.transpose(1, 2)[~written].isnan().all()


def test_the_head(device: torch.device, check: Check) -> None:
    weight, values = quantised(device, "fp8", 53, 96, 96, 8)
    x_norm, squares = stream(device, BF16, 2, 96)
    one = torch.ones(1, dtype=torch.int32, device=device)
    exchange = LogitExchange(nan(device, F32, 2, 53), one, one * 0, rank=0, world_size=1)
    lm_head(x_norm, squares, weight, exchange, EPS, 0)
    check(exchange.shard, lm_head_ref(x_norm, squares, values, EPS), F32)


@pytest.mark.parametrize("closed", [False, True])
def test_programs_with_several_tiles(device: torch.device, closed: bool, check: Check) -> None:
    """Behind a gate few programs compute many tiles; a closed gate writes nothing."""
    rows = 16 * 700 if device.type == "cuda" else 16 * 6
    gate = torch.full((1,), int(not closed), dtype=torch.int32, device=device)
    for kind, columns, group_size in (("fp8", 520, 520), ("int4", 1100 // 8 * 8, 64)):
        weight, values = quantised(device, kind, rows, columns, group_size, 8)
        x = normal(device, BF16, 1, columns)
        found = row_parallel(x, weight, None, gate)
        if closed:
            assert found.isnan().all()
        else:
            check(found, push_partial_ref(x, values), F32)


def test_fp32_is_refused(device: torch.device) -> None:
    weight, _ = quantised(device, "fp8", 16, 64, 64, 8)
    with pytest.raises(ValueError, match=r"x: expected up to 16 rows of 16-bit numbers, found 1 of torch\.float32"):
        row_parallel(normal(device, F32, 1, 64), weight)
