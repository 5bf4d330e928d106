"""What families add to the projections of a step, against fp64: biases, norms of heads, a factor of the rotation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from step_tensors import EPS, nan, normal, stream
from torch import Tensor

from alspec.kernels.attention.oracles import (
    embed_norm_ref,
    gate_up_silu_ref,
    push_partial_ref,
    qkv_rope_append_ref,
)
from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.comm.ll_packets import unpack_packets
from alspec.kernels.common.rotary import RotaryFrequencies
from alspec.kernels.linear.head_norm import norm_rope_append
from alspec.kernels.linear.projections import gate_up_silu, qkv_rope_append
from alspec.kernels.linear.push import push_partial
from alspec.kernels.norm.residual import embed_norm, num_square_sums

Check = Callable[[Tensor, Tensor, torch.dtype], None]
F32, BF16 = torch.float32, torch.bfloat16
CAPACITY, EPOCH = 9, 5


def opened(device: torch.device, is_gated: bool) -> Tensor | None:
    return torch.ones(1, dtype=torch.int32, device=device) if is_gated else None


# batch, hidden, num_qo_heads, num_kv_heads, head_dim, dtype, gated, norms. One request; several, on tensor cores; a
# program of several tiles; rows in slices.
QKV = [
    (1, 96, 4, 1, 32, F32, False, False),
    (3, 96, 3, 3, 16, BF16, False, False),
    (1, 72, 2, 1, 20, F32, True, True),
    (2, 64, 4, 2, 16, BF16, True, True),
    (1, 8192, 2, 1, 12, F32, True, False),
    (1, 8192, 2, 1, 12, BF16, True, True),
    (3, 40, 2, 2, 36, F32, False, True),
]


@pytest.mark.parametrize("case", QKV, ids=str)
def test_qkv_with_biases_and_norms(device: torch.device, case: tuple, check: Check) -> None:
    batch, hidden, num_qo_heads, num_kv_heads, head_dim, dtype, is_gated, has_norms = case
    x_norm, squares = stream(device, dtype, batch, hidden)
    rows = (num_qo_heads + 2 * num_kv_heads) * head_dim
    weight, bias = normal(device, dtype, rows, hidden), normal(device, dtype, rows) * hidden**0.5
    angle = torch.rand(batch, head_dim // 2, device=device) * 6
    rope = torch.stack([angle.cos(), angle.sin()], dim=1)
    seq_lens = torch.randint(1, CAPACITY + 1, (batch,), dtype=torch.int32, device=device)
    q = nan(device, dtype, batch, num_qo_heads, head_dim)
    caches = [nan(device, dtype, batch, num_kv_heads, CAPACITY, head_dim) for _ in range(2)]
    inbox = torch.full((batch, hidden + 2 * num_kv_heads * head_dim), -1, dtype=torch.int64, device=device)
    epoch = torch.tensor([EPOCH], dtype=torch.int32, device=device)
    norms = (normal(device, dtype, head_dim), normal(device, dtype, head_dim)) if has_norms else None
    raw = nan(device, F32, batch, rows) if has_norms else None
    rest = (opened(device, is_gated), None, inbox, epoch)
    qkv_rope_append(x_norm, squares, weight, rope, seq_lens, q, *caches, EPS, *rest, False, bias, raw)
    if norms is not None:
        assert q.isnan().all()
        assert all(cache.isnan().all() for cache in caches)
        assert (inbox == -1).all()
        norm_rope_append(raw, *norms, rope, seq_lens, q, *caches, hidden, EPS, *rest)
    expected = qkv_rope_append_ref(x_norm, squares, weight, rope, num_kv_heads, EPS, bias, norms)
    check(q, expected[0], dtype)
    handed_over = unpack_packets(inbox[:, hidden:], EPOCH).view(batch, 2, num_kv_heads, head_dim)
    for cache, new, pushed in zip(caches, expected[1:], handed_over.unbind(1), strict=True):
        written = torch.arange(CAPACITY, device=device) == (seq_lens - 1)[:, None]
        found = cache.transpose(1, 2)
        check(found[written], new, dtype)
        assert found[~written].isnan().all()
        assert torch.equal(pushed, found[written].float())
    assert (inbox[:, :hidden] == -1).all()


@pytest.mark.parametrize(("batch", "has_norms", "dtype"), [(1, False, F32), (3, True, F32), (2, False, BF16)])
def test_a_ring_wraps_around(device: torch.device, batch: int, has_norms: bool, dtype: torch.dtype) -> None:
    """The token at position p lies at p mod N."""
    hidden, rows, head_dim = 64, 4 * 16, 16
    x_norm, squares = stream(device, dtype, batch, hidden)
    weight, norm = normal(device, dtype, rows, hidden), normal(device, dtype, head_dim)
    rope = torch.rand(batch, 2, head_dim // 2, device=device)
    seq_lens = torch.tensor([1, CAPACITY, 2 * CAPACITY + 3][:batch], dtype=torch.int32, device=device) + CAPACITY
    raw, found = nan(device, F32, batch, rows) if has_norms else None, []
    for is_ring in (False, True):
        q = nan(device, dtype, batch, 2, head_dim)
        caches = [nan(device, dtype, batch, 1, CAPACITY if is_ring else 99, head_dim) for _ in range(2)]
        rest = (None, None, None, None, is_ring)
        qkv_rope_append(x_norm, squares, weight, rope, seq_lens, q, *caches, EPS, *rest, None, raw)
        if raw is not None:
            norm_rope_append(raw, norm, norm, rope, seq_lens, q, *caches, hidden, EPS, *rest)
        found.append((q, caches))
    (q, caches), (ring_q, rings) = found
    assert torch.equal(ring_q, q)
    for cache, ring in zip(caches, rings, strict=True):
        for request, length in enumerate(seq_lens.tolist()):
            slot = (length - 1) % CAPACITY
            assert torch.equal(ring[request, :, slot], cache[request, :, length - 1])
            assert ring[request, :, [at for at in range(CAPACITY) if at != slot]].isnan().all()


def test_a_closed_gate_leaves_the_norms_of_heads_out(device: torch.device) -> None:
    closed = torch.zeros(1, dtype=torch.int32, device=device)
    raw, norm = normal(device, F32, 1, 4 * 8), normal(device, F32, 8)
    q, cache = nan(device, F32, 1, 2, 8), nan(device, F32, 1, 1, 3, 8)
    rope, seq_lens = torch.ones(1, 2, 4, device=device), torch.ones(1, dtype=torch.int32, device=device)
    norm_rope_append(raw, norm, norm, rope, seq_lens, q, cache, cache, 16, EPS, closed)
    assert q.isnan().all()
    assert cache.isnan().all()


@pytest.mark.parametrize(
    ("batch", "hidden", "intermediate", "dtype", "is_gated"),
    [(1, 96, 36, F32, False), (3, 72, 40, BF16, True), (2, 64, 10, F32, True), (1, 8192, 19, BF16, True)],
)
def test_gate_and_up_with_biases(
    device: torch.device, batch: int, hidden: int, intermediate: int, dtype: torch.dtype, is_gated: bool, check: Check
) -> None:
    x_norm, squares = stream(device, dtype, batch, hidden)
    weight, bias = normal(device, dtype, 2 * intermediate, hidden), normal(device, dtype, 2 * intermediate) * 4
    out = nan(device, dtype, batch, intermediate)
    gate_up_silu(x_norm, squares, weight, out, EPS, opened(device, is_gated), bias)
    check(out, gate_up_silu_ref(x_norm, squares, weight, EPS, bias), dtype)


@pytest.mark.parametrize(
    ("batch", "hidden", "width", "dtype", "is_gated"),
    [(1, 37, 33, F32, False), (3, 40, 64, BF16, False), (2, 37, 48, BF16, True), (1, 70, 50, BF16, True)],
)
def test_row_parallel_products_with_biases(
    device: torch.device, batch: int, hidden: int, width: int, dtype: torch.dtype, is_gated: bool, check: Check
) -> None:
    act, weight, bias = normal(device, dtype, batch, width), normal(device, dtype, hidden, width), normal(
        device, dtype, hidden
    )  # fmt: skip
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    exchange = Exchange(nan(device, F32, batch, hidden), zero + EPOCH, zero, tp_rank=0, tp_size=1, rank=0)
    push_partial(act, weight, exchange, 0, opened(device, is_gated), 9 * bias)
    check(exchange.partial, push_partial_ref(act, weight, 9 * bias), F32)
    assert int(exchange.fault) == 0


def test_rotated_channels_have_a_factor(device: torch.device) -> None:
    """The others, of frequency 0, keep their values."""
    table, gamma = normal(device, F32, 7, 64), normal(device, F32, 64)
    rotary = RotaryFrequencies(torch.tensor([1.0, 0.3, 0.02, 0.0, 0.0], device=device))
    token_ids, seq_lens = torch.tensor([5, 2], device=device), torch.tensor([1, 90], dtype=torch.int32, device=device)
    x, x_norm = nan(device, F32, 2, 64), nan(device, F32, 2, 64)
    squares, rope = nan(device, F32, 2, num_square_sums(64)), nan(device, F32, 2, 2, 5)
    embed_norm(token_ids, seq_lens, table, gamma, rotary, x, x_norm, squares, rope, 1.25)
    expected = embed_norm_ref(token_ids, seq_lens, table, gamma, rotary, 1.25)[3]
    assert (rope - expected).abs().max() < 1e-4
    assert (rope[:, 0, 3:] == 1).all()
    assert (rope[:, 1, 3:] == 0).all()
