"""Products of many rows by the library against fp64, with and without packets, packed weights, biases and rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from step_tensors import EPS, nan, normal, stream
from torch import Tensor

from alspec.kernels.attention.oracles import gate_up_silu_ref, lm_head_ref, push_partial_ref, qkv_rope_append_ref
from alspec.kernels.comm.exchange import Exchange, LogitExchange
from alspec.kernels.comm.ll_packets import BAD_NUMBERS, split_fault, unpack_packets
from alspec.kernels.linear.decode_weight import pack_weight
from alspec.kernels.linear.gemm_products import GemmProducts

Check = Callable[[Tensor, Tensor, torch.dtype], None]
DTYPES = [torch.float32, torch.bfloat16]
EPOCH, ROWS = 6, 21


def products_of(device: torch.device, widest: int, packed_numbers: int = 0) -> GemmProducts:
    unpacked = torch.empty(packed_numbers, dtype=torch.bfloat16, device=device) if packed_numbers else None
    return GemmProducts(nan(device, torch.float32, ROWS * widest), unpacked)


def exchange_of(device: torch.device, hidden: int, tp_size: int, rank: int) -> Exchange:
    exchange = Exchange(
        nan(device, torch.float32, ROWS, hidden), torch.tensor([EPOCH], dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device), rank, tp_size, rank + 4,
    )  # fmt: skip
    if tp_size == 1:
        return exchange
    packets = torch.zeros(3, ROWS, tp_size, hidden, dtype=torch.int64, device=device)
    return replace(exchange, packets=packets, peers=torch.tensor([packets.data_ptr()], device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_qkv_is_rotated_and_appended(device: torch.device, dtype: torch.dtype, has_bias: bool, check: Check) -> None:
    """Seven requests of three rows, the last of which repeats the one before."""
    hidden, (q_heads, kv_heads, head_dim), requests, capacity = 104, (6, 2, 48), 7, 40
    x_norm, squares = stream(device, dtype, ROWS, hidden)
    x_norm[2::3], squares[2::3] = x_norm[1::3].clone(), squares[1::3].clone()
    weight = normal(device, dtype, (q_heads + 2 * kv_heads) * head_dim, hidden)
    bias = normal(device, dtype, len(weight)) if has_bias else None
    first = torch.randint(1, capacity - 1, (requests,), dtype=torch.int32, device=device)
    seq_lens = torch.stack([first, first + 1, first + 1], 1).flatten()
    angle = (seq_lens[:, None] * torch.rand(head_dim // 2, device=device)).float()
    rope = torch.stack([angle.cos(), angle.sin()], dim=1)
    q = nan(device, dtype, ROWS, q_heads, head_dim)
    caches = [nan(device, dtype, requests, kv_heads, capacity, head_dim) for _ in range(2)]
    products_of(device, len(weight)).qkv_rope_append(
        x_norm, squares, weight, rope, seq_lens, q, *caches, EPS, bias=bias
    )
    expected = qkv_rope_append_ref(x_norm, squares, weight, rope, kv_heads, EPS, bias)
    check(q, expected[0], dtype)
    request = torch.arange(requests, device=device).repeat_interleave(3)
    for cache, new in zip(caches, expected[1:], strict=True):
        check(cache[request, :, seq_lens - 1], new, dtype)
        written = torch.zeros(requests, capacity, dtype=torch.bool, device=device)
        written[request, seq_lens - 1] = True
        assert cache.transpose(1, 2)[~written].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_up_silu(device: torch.device, dtype: torch.dtype, has_bias: bool, check: Check) -> None:
    hidden, intermediate = 72, 1033
    x_norm, squares = stream(device, dtype, ROWS, hidden)
    weight = normal(device, dtype, 2 * intermediate, hidden)
    bias = normal(device, dtype, len(weight)) if has_bias else None
    out = nan(device, dtype if device.type == "cuda" else torch.float32, ROWS, intermediate)
    products_of(device, len(weight)).gate_up_silu(x_norm, squares, weight, out, EPS, bias=bias)
    check(out, gate_up_silu_ref(x_norm, squares, weight, EPS, bias), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tp_size", [1, 3])
def test_partial_sums_and_logits(device: torch.device, dtype: torch.dtype, tp_size: int, check: Check) -> None:
    hidden, width, rank = 1100, 136, tp_size - 1
    products, exchange = products_of(device, hidden), exchange_of(device, hidden, tp_size, rank)
    act, weight, bias = normal(device, dtype, ROWS, width), normal(device, dtype, hidden, width), None
    if rank:
        bias = normal(device, dtype, hidden)
    products.push_partial(act, weight, exchange, 2, bias=bias)
    found = exchange.partial
    if exchange.packets is not None:
        found = unpack_packets(exchange.packets[2, :, rank], EPOCH)
        assert not exchange.packets[:2].any()
        assert not exchange.packets[2, :, :rank].any()
    check(found, push_partial_ref(act, weight, bias), torch.float32)

    x_norm, squares = stream(device, dtype, ROWS, width)
    logits = LogitExchange(nan(device, torch.float32, ROWS, hidden), exchange.epoch, exchange.fault, rank, tp_size)
    if tp_size > 1:
        packets = torch.zeros(ROWS, tp_size, hidden + 7, dtype=torch.int64, device=device)
        peers = torch.tensor([packets.data_ptr()], device=device)
        shard = nan(device, torch.float32, ROWS, hidden + 7)
        logits = replace(logits, shard=shard, packets=packets, peers=peers)
    products.lm_head(x_norm, squares, weight, logits, EPS, 9)
    found = logits.shard
    if logits.packets is not None:
        found = unpack_packets(logits.packets[:, rank, :hidden], EPOCH)
    check(found, lm_head_ref(x_norm, squares, weight, EPS), torch.float32)
    assert int(exchange.fault) == 0


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_sum_that_is_not_finite_is_a_fault(device: torch.device, tp_size: int) -> None:
    hidden, width = 40, 16
    exchange = exchange_of(device, hidden, tp_size, 0)
    act, weight = normal(device, torch.float32, ROWS, width), normal(device, torch.float32, hidden, width)
    act[ROWS - 1, 3] = torch.nan
    products_of(device, hidden).push_partial(act, weight, exchange, 1)
    kind, reduce_index, rank = split_fault(int(exchange.fault))
    assert (kind, reduce_index, rank) == (BAD_NUMBERS, 1, 4)


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_packed_weight_is_unpacked(device: torch.device, pieces: int, check: Check) -> None:
    """In pieces, where the room holds a part of it, as of a large LM head."""
    rows, columns = 112, 128
    codes = torch.randint(16, (rows, columns), dtype=torch.uint8, device=device)
    scales = (torch.rand(rows, columns // 32, device=device) + 0.1).div(16).bfloat16()
    weight = pack_weight(codes, scales, None, "int4", 32)
    values = weight.dequantise(torch.bfloat16)
    act, exchange = normal(device, torch.bfloat16, ROWS, columns), exchange_of(device, rows, 1, 0)
    room = rows * columns if pieces == 1 else 50 * columns
    products_of(device, rows, room).push_partial(act, weight, exchange, 0)
    check(exchange.partial, push_partial_ref(act, values), torch.float32)
