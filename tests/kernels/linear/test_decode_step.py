"""The fused kernels of a step against fp64. One process runs all ranks of a group, each with its own packets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from step_tensors import EPS, nan, normal, stream
from tiers import covering, fast
from torch import Tensor

from alspec.kernels.attention.oracles import (
    collect_logits_ref,
    embed_norm_ref,
    gate_up_silu_ref,
    lm_head_ref,
    push_partial_ref,
    qkv_rope_append_ref,
    reduce_norm_ref,
)
from alspec.kernels.comm.exchange import Exchange, LogitExchange
from alspec.kernels.comm.ll_packets import BAD_NUMBERS, LATE_PACKET, fault_code, split_fault, unpack_packets
from alspec.kernels.common.jit_launch import num_sms
from alspec.kernels.common.rotary import RotaryFrequencies
from alspec.kernels.linear import projections
from alspec.kernels.linear.gemv_tile import inputs_at_once
from alspec.kernels.linear.packed_tile import tile_settings
from alspec.kernels.linear.projections import gate_up_silu, qkv_rope_append
from alspec.kernels.linear.push import lm_head, push_partial
from alspec.kernels.norm.residual import embed_norm, num_square_sums, reduce_norm
from alspec.kernels.sampling.next_token import (
    RING_HEADER,
    RING_STEPS,
    collect_logits,
    finish_step,
    num_candidates,
)

Check = Callable[[Tensor, Tensor, torch.dtype], None]
DTYPES = [torch.float32, torch.bfloat16]
TIMEOUT_NS = 10**8
EPOCH = 9


def build_exchanges(
    device: torch.device, batch: int, hidden: int, num_reduces: int, tp_size: int, epoch: int
) -> list[Exchange]:
    """The exchange of every rank of a group. Its packets have the epoch of the previous step."""
    packets = [
        torch.full((num_reduces, batch, tp_size, hidden), (epoch - 1) << 32, device=device) for _ in range(tp_size)
    ]
    peers = torch.tensor([each.data_ptr() for each in packets], device=device)
    return [
        Exchange(
            partial=nan(device, torch.float32, batch, hidden),
            epoch=torch.tensor([epoch], dtype=torch.int32, device=device),
            fault=torch.zeros(1, dtype=torch.int32, device=device),
            tp_rank=rank,
            tp_size=tp_size,
            rank=rank + 2,
            packets=packets[rank],
            peers=peers,
        )
        for rank in range(tp_size)
    ]


def inbox_of(device: torch.device, batch: int, packets: int) -> tuple[Tensor, Tensor]:
    """The inbox of a paired rank, whose packets have no epoch yet, and the epoch of the step."""
    inbox = torch.full((batch, packets), -1, dtype=torch.int64, device=device)
    return inbox, torch.tensor([EPOCH], dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "hidden", "head_dim"), [(1, 96, 16), (3, 256, 64), (2, 64, 80)])
def test_the_embedding_gives_x_its_norm_and_the_angles(
    device: torch.device, dtype: torch.dtype, batch: int, hidden: int, head_dim: int, check: Check
) -> None:
    table, gamma = normal(device, dtype, 50, hidden), normal(device, dtype, hidden)
    rotary = RotaryFrequencies(torch.rand(head_dim // 2, device=device))
    token_ids = torch.randint(50, (batch,), device=device)
    seq_lens = torch.randint(1, 4000, (batch,), dtype=torch.int32, device=device)
    x, x_norm = nan(device, torch.float32, batch, hidden), nan(device, dtype, batch, hidden)
    squares = nan(device, torch.float32, batch, num_square_sums(hidden))
    rope = nan(device, torch.float32, batch, 2, head_dim // 2)
    embed_norm(token_ids, seq_lens, table, gamma, rotary, x, x_norm, squares, rope)
    expected = embed_norm_ref(token_ids, seq_lens, table, gamma, rotary)
    check(x, expected[0], torch.float32)
    check(x_norm, expected[1], dtype)
    check(squares.sum(1), expected[2], torch.float32)
    # In fp32 an angle of 4000 has a fraction of 12 bits.
    assert (rope.double() - expected[3]).abs().max() < 4000 * 2**-22


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_angles_follow_the_length(device: torch.device, kind: str) -> None:
    """Up to C tokens, and behind them; channels that are not rotated stay so."""
    table, gamma, context = normal(device, torch.float32, 7, 64), normal(device, torch.float32, 64), 1000
    inv_freq = torch.tensor([1.0, 0.3, 0.02, 0.0, 0.0], device=device)
    rotary = RotaryFrequencies(inv_freq, context, long_freq=inv_freq / 3)
    if kind == "dynamic":
        exponents = torch.tensor([0.0, -0.5, -1.0, 0.0, 0.0], dtype=torch.float64, device=device)
        rotary = RotaryFrequencies(inv_freq, context, factor=3.0, exponents=exponents)
    lengths = [1, 999, 1000, 1001, 1002, 3000]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    token_ids = torch.zeros(len(lengths), dtype=torch.int64, device=device)
    x, x_norm = (nan(device, torch.float32, len(lengths), 64) for _ in range(2))
    squares, rope = nan(device, torch.float32, len(lengths), 2), nan(device, torch.float32, len(lengths), 2, 5)
    embed_norm(token_ids, seq_lens, table, gamma, rotary, x, x_norm, squares, rope, 1.25)
    expected = embed_norm_ref(token_ids, seq_lens, table, gamma, rotary, 1.25)[3]
    assert (rope - expected).abs().max() < 3000 * 2**-22
    plain = embed_norm_ref(token_ids, seq_lens, table, gamma, RotaryFrequencies(inv_freq), 1.25)[3]
    assert torch.equal((expected != plain).flatten(1).any(1).cpu(), torch.tensor(lengths) > context)


# batch, hidden, num_qo_heads, num_kv_heads, head_dim
QKV_SHAPES = [(1, 256, 4, 1, 32), (3, 96, 3, 3, 16), (8, 200, 8, 2, 48), (2, 4096, 4, 2, 64), (13, 104, 3, 3, 16)]
KEPT_QKV = [(shape, DTYPES[(index + 1) // 2 % 2]) for index, shape in enumerate(QKV_SHAPES)]


@pytest.mark.parametrize(("shape", "dtype"), fast(list(itertools.product(QKV_SHAPES, DTYPES)), KEPT_QKV), ids=str)
def test_qkv_rope_append_matches_the_oracle(
    device: torch.device, shape: tuple[int, int, int, int, int], dtype: torch.dtype, check: Check
) -> None:
    batch, hidden, num_qo_heads, num_kv_heads, head_dim = shape
    capacity = 70
    x_norm, squares = stream(device, dtype, batch, hidden)
    weight = normal(device, dtype, (num_qo_heads + 2 * num_kv_heads) * head_dim, hidden)
    angle = torch.rand(batch, head_dim // 2, device=device) * 6
    rope = torch.stack([angle.cos(), angle.sin()], dim=1)
    seq_lens = torch.randint(1, capacity + 1, (batch,), dtype=torch.int32, device=device)
    q = nan(device, dtype, batch, num_qo_heads, head_dim)
    caches = [nan(device, dtype, batch, num_kv_heads, capacity, head_dim) for _ in range(2)]
    inbox, epoch = inbox_of(device, batch, hidden + 2 * num_kv_heads * head_dim)
    qkv_rope_append(x_norm, squares, weight, rope, seq_lens, q, *caches, EPS, inbox=inbox, epoch=epoch)
    expected = qkv_rope_append_ref(x_norm, squares, weight, rope, num_kv_heads, EPS)
    check(q, expected[0], dtype)
    handed_over = unpack_packets(inbox[:, hidden:], EPOCH).view(batch, 2, num_kv_heads, head_dim)
    for cache, new, pushed in zip(caches, expected[1:], handed_over.unbind(1), strict=True):
        written = torch.arange(capacity, device=device) == (seq_lens - 1)[:, None]
        found = cache.transpose(1, 2)
        check(found[written], new, dtype)
        assert found[~written].isnan().all()
        assert torch.equal(pushed, found[written].float())
    assert (inbox[:, :hidden] == -1).all(), "the projection wrote the packets of x"


def test_a_tail_of_another_shape_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch would write beyond the tail."""
    monkeypatch.setattr("alspec.kernels.linear.projections.jit_launch", None)
    x_norm, squares = stream(device, torch.float32, 1, 64)
    weight, rope = normal(device, torch.float32, 4 * 64, 64), nan(device, torch.float32, 1, 2, 32)
    seq_lens, q = torch.ones(1, dtype=torch.int32, device=device), nan(device, torch.float32, 1, 2, 64)
    cache = nan(device, torch.float32, 1, 1, 1, 64)
    for shape in ((1, 2, 2, 64, 64), (1, 1, 2, 32, 64), (2, 1, 2, 64, 64)):
        layer: Any = SimpleNamespace(tail=torch.zeros(shape, dtype=torch.int8, device=device))
        with pytest.raises(ValueError, match=r"layer: expected a tail for k_cache \[1, 1, 1, 64\], found"):
            qkv_rope_append(x_norm, squares, weight, rope, seq_lens, q, cache, cache, EPS, layer=layer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "hidden", "intermediate"), [(1, 256, 96), (8, 72, 40), (2, 4096, 6), (15, 72, 40)])
def test_gate_up_silu_matches_the_oracle(
    device: torch.device, dtype: torch.dtype, batch: int, hidden: int, intermediate: int, check: Check
) -> None:
    x_norm, squares = stream(device, dtype, batch, hidden)
    weight = normal(device, dtype, 2 * intermediate, hidden)
    out = nan(device, dtype, batch, intermediate)
    gate_up_silu(x_norm, squares, weight, out, EPS)
    check(out, gate_up_silu_ref(x_norm, squares, weight, EPS), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [8192, 16384])
def test_long_rows_behind_a_gate_are_loaded_in_slices(
    device: torch.device, dtype: torch.dtype, hidden: int, check: Check
) -> None:
    """A program has several tiles. The last tile of some programs does not exist."""
    assert inputs_at_once(1, hidden, dtype.itemsize, closes=True) < hidden
    assert inputs_at_once(1, hidden, dtype.itemsize, closes=False) == hidden
    gates = [torch.full((1,), is_open, dtype=torch.int32, device=device) for is_open in (0, 1)]
    x_norm, squares = stream(device, dtype, 1, hidden)
    intermediate = 16 * num_sms(device) * 2 + 5 if device.type == "cuda" else 37
    weight = normal(device, dtype, 2 * intermediate, hidden)
    out = nan(device, dtype, 1, intermediate)
    gate_up_silu(x_norm, squares, weight, out, EPS, gates[0])
    assert out.isnan().all()
    gate_up_silu(x_norm, squares, weight, out, EPS, gates[1])
    check(out, gate_up_silu_ref(x_norm, squares, weight, EPS), dtype)

    weight = normal(device, dtype, (2 + 2 * 1) * 32, hidden)
    angle = torch.rand(1, 16, device=device) * 6
    rope = torch.stack([angle.cos(), angle.sin()], dim=1)
    seq_lens = torch.tensor([3], dtype=torch.int32, device=device)
    q = nan(device, dtype, 1, 2, 32)
    caches = [nan(device, dtype, 1, 1, 4, 32) for _ in range(2)]
    inbox, epoch = inbox_of(device, 1, hidden + 2 * 32)
    qkv_rope_append(x_norm, squares, weight, rope, seq_lens, q, *caches, EPS, gates[1], inbox=inbox, epoch=epoch)
    expected = qkv_rope_append_ref(x_norm, squares, weight, rope, 1, EPS)
    check(q, expected[0], dtype)
    handed_over = unpack_packets(inbox[:, hidden:], EPOCH).view(2, 1, 1, 32)
    for cache, new, pushed in zip(caches, expected[1:], handed_over, strict=True):
        check(cache[:, :, 2], new, dtype)
        assert torch.equal(pushed, cache[:, :, 2].float())
        assert cache[:, :, [0, 1, 3]].isnan().all()


@pytest.mark.parametrize(
    ("sizes", "tp_size", "dtype"),
    covering([(1, 64, 33), (3, 96, 256), (8, 40, 3584)], [1, 2, 3, 4], DTYPES),
    ids=str,
)
def test_all_reduce_over_packets(
    device: torch.device, sizes: tuple[int, int, int], tp_size: int, dtype: torch.dtype, check: Check
) -> None:
    batch, hidden, width = sizes
    epoch, reduce_index = 7, 1
    ranks = build_exchanges(device, batch, hidden, 3, tp_size, epoch)
    acts = [normal(device, dtype, batch, width) for _ in ranks]
    weights = [normal(device, dtype, hidden, width) for _ in ranks]
    for exchange, act, weight in zip(ranks, acts, weights, strict=True):
        push_partial(act, weight, exchange, reduce_index)
    partials = torch.stack([push_partial_ref(act, weight) for act, weight in zip(acts, weights, strict=True)])
    start, gamma = normal(device, torch.float32, batch, hidden), normal(device, dtype, hidden)
    expected = reduce_norm_ref(partials, start, gamma)
    outputs = []
    for exchange in ranks:
        x, x_norm = start.clone(), nan(device, dtype, batch, hidden)
        squares = nan(device, torch.float32, batch, num_square_sums(hidden))
        inbox, _ = inbox_of(device, batch, hidden + 5)
        reduce_norm(exchange, reduce_index, TIMEOUT_NS, x, gamma, x_norm, squares, inbox=inbox)
        assert torch.equal(unpack_packets(inbox[:, :hidden], epoch), x)
        assert (inbox[:, hidden:] == -1).all(), "the kernel wrote the packets of k and v"
        check(x, expected[0], torch.float32)
        check(x_norm, expected[1], dtype)
        check(squares.sum(1), expected[2], torch.float32)
        assert int(exchange.fault) == 0
        outputs.append(x)
    assert all(torch.equal(x, outputs[0]) for x in outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partial_sums_without_packets(device: torch.device, dtype: torch.dtype, check: Check) -> None:
    batch, hidden, width = 2, 96, 128
    exchange = replace(build_exchanges(device, batch, hidden, 1, 1, 3)[0], packets=None, peers=None)
    act, weight = normal(device, dtype, batch, width), normal(device, dtype, hidden, width)
    push_partial(act, weight, exchange, 5)
    expected = push_partial_ref(act, weight)
    check(exchange.partial, expected, torch.float32)
    x, gamma = normal(device, torch.float32, batch, hidden), normal(device, dtype, hidden)
    total = reduce_norm_ref(expected[None], x, gamma)[0]
    x_norm, squares = nan(device, dtype, batch, hidden), nan(device, torch.float32, batch, num_square_sums(hidden))
    reduce_norm(exchange, 5, TIMEOUT_NS, x, gamma, x_norm, squares)
    check(x, total, torch.float32)


def test_packets_keep_the_smallest_and_the_largest_values(device: torch.device) -> None:
    hidden = 64
    exchange = build_exchanges(device, 1, hidden, 1, 1, 1)[0]
    values = torch.tensor([1e-40, 3e38, -1e-45, 0.0] * (hidden // 4), device=device)
    weight = torch.zeros(hidden, 16, device=device)
    weight[:, 0] = values
    push_partial(torch.ones(1, 16, device=device), weight, exchange, 0)
    x, gamma = torch.zeros(1, hidden, device=device), torch.ones(hidden, device=device)
    squares = torch.empty(1, num_square_sums(hidden), device=device)
    reduce_norm(exchange, 0, TIMEOUT_NS, x, gamma, torch.empty_like(x), squares)
    assert torch.equal(x[0], values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_closed_gate_writes_nothing(device: torch.device, dtype: torch.dtype) -> None:
    batch, hidden = 2, 64
    exchange = build_exchanges(device, batch, hidden, 1, 1, 3)[0]
    before = exchange.packets.clone()
    closed = torch.zeros(1, dtype=torch.int32, device=device)
    x_norm, squares = stream(device, dtype, batch, hidden)
    weight = normal(device, dtype, hidden, hidden)
    out = nan(device, dtype, batch, hidden // 2)
    gate_up_silu(x_norm, squares, weight, out, EPS, closed)
    assert out.isnan().all()
    push_partial(x_norm, weight, exchange, 0, closed)
    assert torch.equal(exchange.packets, before)
    x = normal(device, torch.float32, batch, hidden)
    before_x = x.clone()
    inbox, epoch = inbox_of(device, batch, hidden + 32)
    gamma = squares[0, :1].to(dtype).expand(hidden).contiguous()
    reduce_norm(exchange, 0, 0, x, gamma, x_norm, squares, closed, inbox=inbox)
    assert torch.equal(x, before_x)
    q = nan(device, dtype, batch, 2, 16)
    cache = nan(device, dtype, batch, 1, 8, 16)
    rope, seq_lens = torch.ones(batch, 2, 8, device=device), torch.ones(batch, dtype=torch.int32, device=device)
    qkv_rope_append(x_norm, squares, weight, rope, seq_lens, q, cache, cache, EPS, closed, inbox=inbox, epoch=epoch)
    assert q.isnan().all()
    assert cache.isnan().all()
    assert (inbox == -1).all()
    opened = closed + 1
    gate_up_silu(x_norm, squares, weight, out, EPS, opened)
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", [1, 2])
def test_an_open_gate_changes_no_bit(device: torch.device, gate: int, dtype: torch.dtype) -> None:
    batch, hidden = 2, 96
    opened = torch.tensor([gate], dtype=torch.int32, device=device)
    x_norm, squares = stream(device, dtype, batch, hidden)
    weight = normal(device, dtype, 96, hidden)
    rope, seq_lens = torch.rand(batch, 2, 8, device=device), torch.ones(batch, dtype=torch.int32, device=device)
    found = []
    for pointer in (None, opened):
        exchange = build_exchanges(device, batch, hidden, 1, 1, 3)[0]
        out, q = nan(device, dtype, batch, hidden // 2), nan(device, dtype, batch, 2, 16)
        k, v = (nan(device, dtype, batch, 2, 1, 16) for _ in range(2))
        qkv_rope_append(x_norm, squares, weight, rope, seq_lens, q, k, v, EPS, pointer)
        gate_up_silu(x_norm, squares, weight, out, EPS, pointer)
        push_partial(x_norm, weight, exchange, 0, pointer)
        found.append((q, k, v, out, exchange.packets))
    assert all(torch.equal(plain, gated) for plain, gated in zip(*found, strict=True))
    assert not any(each.isnan().any() for each in found[1][:4])


def test_long_rows_have_the_tiles_of_a_gated_launch_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group of a linked pair has gates, the other has none, and both must get the same bits of x."""
    device, chosen = torch.device("cpu"), []

    def recorded(*args: Any) -> tuple[int, int, int]:
        chosen.append(tile_settings(*args))
        return chosen[-1]

    monkeypatch.setattr(projections, "tile_settings", recorded)
    x_norm, squares = stream(device, torch.float32, 1, 4096)
    weight, opened = normal(device, torch.float32, 64, 4096), torch.ones(1, dtype=torch.int32)
    found = [nan(device, torch.float32, 1, 32) for _ in range(3)]
    gate_up_silu(x_norm, squares, weight, found[0], EPS, opened)
    gate_up_silu(x_norm, squares, weight, found[1], EPS, like_gated=True)
    gate_up_silu(x_norm, squares, weight, found[2], EPS)
    assert chosen[0] == chosen[1] != chosen[2]
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("hidden", [96, 1152])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_request_has_the_same_bits_in_a_batch_of_two_and_of_eight(
    device: torch.device, dtype: torch.dtype, hidden: int
) -> None:
    x, squares = stream(device, dtype, 8, hidden)
    weight = normal(device, dtype, 80, hidden)
    found = []
    for batch in (2, 5, 8):
        exchange = replace(build_exchanges(device, batch, 80, 1, 1, 3)[0], packets=None, peers=None)
        out = nan(device, torch.float32, batch, 40)
        push_partial(x[:batch], weight, exchange, 0)
        gate_up_silu(x[:batch], squares[:batch], weight, out, EPS)
        found.append((exchange.partial[:2], out[:2]))
    for each in found[1:]:
        assert all(torch.equal(*both) for both in zip(each, found[0], strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_numbers_name_reduce_index_and_rank(device: torch.device, bad: float) -> None:
    ranks = build_exchanges(device, 1, 64, 4, 2, 3)
    act = torch.ones(1, 32, device=device)
    weight = torch.ones(64, 32, device=device)
    weight[17, 5] = bad
    push_partial(act, weight, ranks[1], 2)
    push_partial(act, weight, ranks[1], 3)  # the first fault stays
    assert split_fault(int(ranks[1].fault)) == (BAD_NUMBERS, 2, 3)
    assert int(ranks[0].fault) == 0


@pytest.mark.parametrize("batch", [1, 8, 11])
def test_squares_that_overflow_make_a_request_nan(device: torch.device, batch: int) -> None:
    """A norm of infinity would give products of 0, which no check finds. Other requests keep their values."""
    x_norm, squares = stream(device, torch.bfloat16, batch, 256)
    weight = normal(device, torch.bfloat16, 2 * 96, 256)
    plain, found = (nan(device, torch.float32, batch, 96) for _ in range(2))
    gate_up_silu(x_norm, squares, weight, plain, EPS)
    squares[batch // 2, 0] = torch.inf
    gate_up_silu(x_norm, squares, weight, found, EPS)
    assert found[batch // 2].isnan().all()
    others = torch.arange(batch) != batch // 2
    assert torch.equal(found[others], plain[others])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_missing_rank_is_named_after_the_timeout() -> None:
    device = torch.device("cuda")
    ranks = build_exchanges(device, 1, 64, 2, 2, 3)
    act, weight = torch.ones(1, 32, device=device), torch.ones(64, 32, device=device)
    push_partial(act, weight, ranks[0], 1)
    x, gamma = torch.zeros(1, 64, device=device), torch.ones(64, device=device)
    squares = torch.empty(1, num_square_sums(64), device=device)
    reduce_norm(ranks[0], 1, 10**7, x, gamma, torch.empty_like(x), squares)
    assert split_fault(int(ranks[0].fault)) == (LATE_PACKET, 1, 3)
    # After a late packet the kernel does not wait again, and the first fault stays.
    first = fault_code(LATE_PACKET, 0, 2)
    ranks[0].fault.fill_(first)
    reduce_norm(ranks[0], 1, 600 * 10**9, x, gamma, torch.empty_like(x), squares)
    assert int(ranks[0].fault) == first


VOCABULARIES = [(1, 1), (1, 130), (1, 2500), (3, 1), (3, 130), (3, 2500)]


@pytest.mark.parametrize(
    ("world_size", "vocab_size"), fast(VOCABULARIES, keep=[case for case in VOCABULARIES if case != (1, 2500)])
)
def test_logits_and_the_next_token_match_the_oracle(
    device: torch.device, world_size: int, vocab_size: int, check: Check
) -> None:
    batch, hidden, epoch = 3, 64, 21
    rows = -(-vocab_size // world_size)
    x_norm, squares = stream(device, torch.bfloat16, batch, hidden)
    weight = normal(device, torch.bfloat16, vocab_size, hidden)
    packets = [torch.zeros(batch, world_size, rows, dtype=torch.int64, device=device) for _ in range(world_size)]
    peers = torch.tensor([each.data_ptr() for each in packets], device=device)
    ranks = [
        LogitExchange(
            shard=nan(device, torch.float32, batch, rows),
            epoch=torch.tensor([epoch], dtype=torch.int32, device=device),
            fault=torch.zeros(1, dtype=torch.int32, device=device),
            rank=rank,
            world_size=world_size,
            packets=packets[rank],
            peers=peers,
        )
        for rank in range(world_size)
    ]
    for exchange in ranks:
        shard = weight[exchange.rank * rows : (exchange.rank + 1) * rows]
        lm_head(x_norm, squares, shard, exchange, EPS, 9)
        plain = replace(exchange, packets=None, peers=None)
        lm_head(x_norm, squares, shard, plain, EPS, 9)
    expected = lm_head_ref(x_norm, squares, weight, EPS)
    gathered = torch.stack([exchange.shard for exchange in ranks])
    for exchange in (ranks[-1], replace(ranks[-1], packets=None, peers=None)):
        logits = nan(device, torch.float32, batch, vocab_size)
        best = nan(device, torch.float32, batch, num_candidates(vocab_size))
        best_token = torch.full_like(best, -1, dtype=torch.int32)
        collect_logits(exchange, gathered, TIMEOUT_NS, 9, logits, best, best_token)
        check(logits, expected, torch.float32)
        tokens = collect_logits_ref(logits.double()[None], vocab_size)[1]
        assert int(exchange.fault) == 0

        token_ids = torch.full((batch,), -1, device=device)
        seq_lens = torch.tensor([5, 8, 9], dtype=torch.int32, device=device)
        ring = torch.full((RING_STEPS, RING_HEADER + batch), -1)
        stamps = torch.full((RING_STEPS,), -1, dtype=torch.int32)
        if device.type == "cuda":
            ring, stamps = ring.pin_memory(), stamps.pin_memory()
        finish_step(best, best_token, None, token_ids, seq_lens, 9, exchange, ring, stamps)
        if device.type == "cuda":
            torch.cuda.synchronize()
        entry = epoch % RING_STEPS
        assert stamps.tolist() == [epoch if index == entry else -1 for index in range(RING_STEPS)]
        assert torch.equal(token_ids, tokens)
        assert ring[entry, RING_HEADER:].tolist() == tokens.tolist()
        assert ring[entry, 1] == 0
        assert (ring[:entry] == -1).all()
        assert seq_lens.tolist() == [6, 9, 9]
        assert int(exchange.epoch) == epoch + 1
        exchange.epoch.fill_(epoch)


def test_the_first_of_equal_logits_wins_and_a_sampled_token_replaces_it(device: torch.device) -> None:
    exchange = LogitExchange(
        shard=torch.zeros(1, 3000, device=device),
        epoch=torch.ones(1, dtype=torch.int32, device=device),
        fault=torch.zeros(1, dtype=torch.int32, device=device),
    )
    exchange.shard[0, [700, 1800, 2999]] = 4.0
    best = nan(device, torch.float32, 1, num_candidates(3000))
    best_token = torch.zeros_like(best, dtype=torch.int32)
    logits = nan(device, torch.float32, 1, 3000)
    collect_logits(exchange, exchange.shard, TIMEOUT_NS, 9, logits, best, best_token)
    ring, stamps = torch.zeros(RING_STEPS, RING_HEADER + 1, dtype=torch.int64), torch.zeros(16, dtype=torch.int32)
    if device.type == "cuda":
        ring, stamps = ring.pin_memory(), stamps.pin_memory()
    token_ids, seq_lens = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device).int()
    finish_step(best, best_token, None, token_ids, seq_lens, 9, exchange, ring, stamps)
    assert token_ids.tolist() == [700]
    finish_step(best, best_token, torch.tensor([42], device=device), token_ids, seq_lens, 9, exchange, ring, stamps)
    assert token_ids.tolist() == [42]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_logits_set_the_fault_word(device: torch.device, bad: float) -> None:
    exchange = LogitExchange(
        shard=torch.zeros(1, 1500, device=device),
        epoch=torch.ones(1, dtype=torch.int32, device=device),
        fault=torch.zeros(1, dtype=torch.int32, device=device),
        world_size=2,
    )
    gathered = torch.zeros(2, 1, 1500, device=device)
    gathered[1, 0, 700] = bad
    best = nan(device, torch.float32, 1, num_candidates(3000))
    logits = nan(device, torch.float32, 1, 3000)
    collect_logits(exchange, gathered, TIMEOUT_NS, 8, logits, best, torch.zeros_like(best, dtype=torch.int32))
    assert split_fault(int(exchange.fault)) == (BAD_NUMBERS, 8, 1)
