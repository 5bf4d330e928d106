"""The handover between two groups. One process runs all ranks; a kernel runs after those that write its packets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch
from flashq_layers import assert_same, noisy_layer, on_cpu
from paired_ranks import TIMEOUT_NS, nan, pairs, sums_for
from torch import Tensor

from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import LeanWorkspace, lean_decode_attention
from alspec.kernels.attention.dispatch import KVLayer
from alspec.kernels.attention.oracles import reduce_norm_ref, speculative_decode_attention_ref
from alspec.kernels.comm.ll_packets import BAD_NUMBERS, LATE_PACKET, fault_code, split_fault
from alspec.kernels.comm.pair_state import Mailbox, PairShape, PairState
from alspec.kernels.kv_codec.codec_reference import kv_append_ref
from alspec.kernels.norm.residual import num_square_sums
from alspec.kernels.speculation.handover import pair_spec_output, receive_handover, receive_residual
from alspec.kernels.speculation.roles import decide, update_roles

ACCEPTED = 0x3F800000  # 1.0, the data of a packet

Check = Callable[[Tensor, Tensor, torch.dtype], None]


def copy_of_fields(mailbox: Mailbox) -> list[Tensor]:
    return [getattr(mailbox, field.name).clone() for field in fields(mailbox)]


@dataclass
class State:
    """The tensors of a rank's step."""

    x: Tensor
    k: Tensor
    v: Tensor
    attn_out: Tensor


SHAPES = [
    pytest.param(PairShape(3, 1, 1, 64, 4, 2, 16), 5, id="one request"),
    pytest.param(PairShape(2, 2, 1, 200, 8, 1, 48), 9, id="odd head_dim"),
    pytest.param(PairShape(2, 3, 1, 97, 9, 3, 20), 70, id="odd hidden size"),
]


def draw_state(device: torch.device, shape: PairShape, capacity: int, dtype: torch.dtype) -> State:
    cache = (shape.batch_size, shape.num_kv_heads, capacity, shape.head_dim)
    k, v = (torch.randn(cache).to(dtype).to(device) for _ in range(2))
    out = nan(device, dtype, shape.batch_size, shape.num_qo_heads, shape.head_dim)
    return State(torch.randn(shape.batch_size, shape.hidden_size).to(device), k, v, out)


def copy(state: State) -> State:
    return State(*(getattr(state, field.name).clone() for field in fields(state)))


def packets_of(values: Tensor, epoch: int) -> Tensor:
    """LL packets of values and an epoch, as a kernel packs them."""
    return values.float().view(torch.int32).long() & 0xFFFFFFFF | epoch << 32


def push(source: PairState, layer: int, state: State, seq_lens: Tensor) -> None:
    """Push x and the newest k and v, as the kernels that compute them do (see test_decode_step.py)."""
    newest = [cache[torch.arange(len(cache)), :, seq_lens.long() - 1].flatten(1) for cache in (state.k, state.v)]
    values = torch.cat([state.x, *(each.float() for each in newest)], 1)
    source.peer_inbox(layer).copy_(packets_of(values, int(source.exchange.epoch)))


def push_residual(source: PairState, x: Tensor) -> None:
    """Push x after the last layer."""
    packets = packets_of(x, int(source.exchange.epoch))
    source.peer_inbox(source.shape.num_layers)[:, : x.shape[1]].copy_(packets)


def same(found: State, expected: State) -> bool:
    return all(
        torch.allclose(getattr(found, field.name), getattr(expected, field.name), rtol=0, atol=0, equal_nan=True)
        for field in fields(found)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "capacity"), SHAPES)
def test_a_handover_arrives_exactly(device: torch.device, dtype: torch.dtype, shape: PairShape, capacity: int) -> None:
    epoch, layer = 6, shape.num_layers - 1
    ((source,), (target,)) = pairs(device, shape, epoch)
    seq_lens = torch.randint(1, capacity + 1, (shape.batch_size,), dtype=torch.int32, device=device)
    mine, theirs = (draw_state(device, shape, capacity, dtype) for _ in range(2))
    mine.x[0, :4] = torch.tensor([torch.inf, -0.0, 1e-41, -torch.inf])
    before, mailbox = copy(theirs), copy_of_fields(source.own)
    target.is_receiver.fill_(1)
    push(source, layer, mine, seq_lens)
    speculation = pair_spec_output(source, layer, 64, nan(device, torch.float32, 1))
    assert speculation.spec_out.data_ptr() == target.own.spec_out[layer].data_ptr()
    assert speculation.spec_lse is None
    spec_out = torch.randn(theirs.attn_out.shape, device=device)
    speculation.spec_out.copy_(packets_of(spec_out, epoch))
    receive_handover(target, layer, theirs.x, KVLayer(theirs.k, theirs.v), seq_lens, theirs.attn_out, TIMEOUT_NS)
    assert torch.equal(theirs.x.view(torch.int32), mine.x.view(torch.int32))
    written = torch.arange(capacity, device=device) == (seq_lens - 1)[:, None]
    for found, sent, old in ((theirs.k, mine.k, before.k), (theirs.v, mine.v, before.v)):
        expected = torch.where(written[:, None, :, None], sent, old)
        assert torch.equal(found, expected)
    assert torch.equal(theirs.attn_out, spec_out.to(dtype))
    assert int(target.exchange.fault) == 0
    # The mailbox of the sender is unchanged. Only this layer's inbox was written.
    assert all(torch.equal(now, then) for now, then in zip(copy_of_fields(source.own), mailbox, strict=True))
    assert not target.own.inbox[:layer].any()
    assert not target.own.inbox[-1].any()
    assert ((target.own.inbox[layer] >> 32) == epoch).all()


def test_in_the_first_layer_both_groups_have_the_embedding(device: torch.device) -> None:
    """So no kernel pushes x there, and the receiver neither waits for it nor writes it."""
    shape = PairShape(2, 2, 1, 97, 9, 3, 20)
    ((source,), (target,)) = pairs(device, shape, 6)
    seq_lens = torch.tensor([3, 5], dtype=torch.int32, device=device)
    mine, theirs = (draw_state(device, shape, 5, torch.float32) for _ in range(2))
    target.is_receiver.fill_(1)
    push(source, 0, mine, seq_lens)
    target.own.inbox[0, :, : shape.hidden_size] = 5 << 32
    pair_spec_output(source, 0, 64, nan(device, torch.float32, 1)).spec_out.copy_(packets_of(theirs.attn_out, 6))
    before = copy(theirs)
    receive_handover(target, 0, theirs.x, KVLayer(theirs.k, theirs.v), seq_lens, theirs.attn_out, TIMEOUT_NS)
    assert torch.equal(theirs.x, before.x)
    requests = torch.arange(2)
    assert torch.equal(theirs.k[requests, :, seq_lens.long() - 1], mine.k[requests, :, seq_lens.long() - 1])
    assert torch.equal(theirs.v[requests, :, seq_lens.long() - 1], mine.v[requests, :, seq_lens.long() - 1])
    assert int(target.exchange.fault) == 0


@pytest.mark.parametrize("gate", [0, 1])
def test_a_handover_goes_into_the_tail_of_a_quantised_cache(device: torch.device, gate: int) -> None:
    """Outliers are clamped. Positions are the last of a tail, and the first ones of a new tail."""
    shape = PairShape(2, 3, 1, 97, 6, 2, 64)
    ((source,), (target,)) = pairs(device, shape, 6)
    seq_lens = torch.tensor([64, 65, 130], dtype=torch.int32, device=device)
    mine = draw_state(device, shape, 130, torch.bfloat16)
    layer = noisy_layer(3, [2, 4], 64, 2, device)
    layer.tail_scale[1] = 0.01
    expected = on_cpu(layer)
    x, attn_out = nan(device, torch.float32, 3, 97), nan(device, torch.bfloat16, 3, 6, 64)
    target.is_receiver.fill_(gate)
    push(source, 1, mine, seq_lens)
    pair_spec_output(source, 1, 64, nan(device, torch.float32, 1)).spec_out.fill_(6 << 32)
    receive_handover(target, 1, x, layer, seq_lens, attn_out, TIMEOUT_NS)
    if gate:
        assert torch.equal(x, mine.x)
        newest = [cache[torch.arange(3), :, seq_lens.long() - 1].cpu() for cache in (mine.k, mine.v)]
        kv_append_ref(*newest, expected, seq_lens.cpu())
        assert int(layer.tail[1, :, :, 0].abs().max()) == 119, "no outlier was clamped"
    assert_same(layer, expected)
    assert int(target.exchange.fault) == 0


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("parts", "empty"), [(2, 0), (2, 1), (3, 0), (4, 2), (5, 0), (5, 4)])
def test_parts_of_a_spec_output_are_combined(
    device: torch.device, check: Check, parts: int, empty: int, batch: int
) -> None:
    """The last `empty` parts have no tokens."""
    shape, epoch, layer = PairShape(3, batch, 1, 97, 9, 3, 20, parts), 6, 1
    ((source,), (target,)) = pairs(device, shape, epoch)
    target.is_receiver.fill_(1)
    speculation = pair_spec_output(source, layer, 64, nan(device, torch.float32, 1))
    assert speculation.spec_lse is not None
    assert speculation.spec_lse.data_ptr() == target.own.spec_lse[layer].data_ptr()
    o, lse = torch.randn(parts, batch, 9, 20), 20 * torch.randn(parts, batch, 9)
    o[parts - empty :] = 0
    lse[parts - empty :] = -torch.inf
    speculation.spec_out.copy_(packets_of(o.to(device), epoch))
    speculation.spec_lse.copy_(packets_of(lse.to(device), epoch))
    state = draw_state(device, shape, 5, torch.float32)
    target.own.inbox.fill_(epoch << 32)
    seq_lens = torch.full((batch,), 3, dtype=torch.int32, device=device)
    receive_handover(target, layer, state.x, KVLayer(state.k, state.v), seq_lens, state.attn_out, TIMEOUT_NS)
    weight = (lse.double() * math.log(2)).softmax(0)
    check(state.attn_out, (o.double() * weight[..., None]).sum(0).to(device), torch.float32)
    assert int(target.exchange.fault) == 0


@pytest.mark.parametrize("length", [1, 200, 256, 300, 400])
def test_parts_that_attention_sends_arrive_as_one_spec_output(device: torch.device, check: Check, length: int) -> None:
    shape, epoch, layer, chunk = PairShape(2, 1, 1, 64, 4, 2, 16, 3), 6, 1, 128
    ((source,), (target,)) = pairs(device, shape, epoch)
    state, theirs = (draw_state(device, shape, 400, torch.float32) for _ in range(2))
    seq_lens = torch.tensor([length], dtype=torch.int32, device=device)
    q = torch.randn(1, 4, 16).to(device)
    sums, lse = nan(device, torch.float32, 1, num_sums(1, 4, 16), 2), nan(device, torch.float32, 1, 4)
    workspace = LeanWorkspace.allocate(1, 4, 2, 16, device, 11)
    lean_decode_attention(
        q,
        state.k,
        state.v,
        seq_lens,
        0.25,
        workspace,
        state.attn_out,
        lse,
        pair_spec_output(source, layer, chunk, sums),
    )
    target.is_receiver.fill_(1)
    target.own.inbox.fill_(epoch << 32)
    receive_handover(target, layer, theirs.x, KVLayer(theirs.k, theirs.v), seq_lens, theirs.attn_out, TIMEOUT_NS)
    spec_out, full_out, expected = speculative_decode_attention_ref(q, state.k, state.v, seq_lens, chunk, 0.25)
    check(theirs.attn_out, spec_out, torch.float32)
    check(state.attn_out, full_out, torch.float32)
    check(sums.sum(1), expected, torch.float32)


@pytest.mark.parametrize(("shape", "capacity"), SHAPES)
def test_closed_gates_write_nothing(device: torch.device, shape: PairShape, capacity: int) -> None:
    ((source,), (target,)) = pairs(device, shape, 3)
    state = draw_state(device, shape, capacity, torch.float32)
    before = copy(state)
    seq_lens = torch.ones(shape.batch_size, dtype=torch.int32, device=device)
    for rank in (source, target):
        rank.own.inbox.fill_(3 << 32)
        rank.own.spec_out.fill_(3 << 32)
    mailboxes = copy_of_fields(source.own), copy_of_fields(target.own)
    receive_handover(target, 0, state.x, KVLayer(state.k, state.v), seq_lens, state.attn_out, 0)
    x_norm, squares = state.x.clone(), nan(device, torch.float32, shape.batch_size, num_square_sums(shape.hidden_size))
    receive_residual(target, state.x, state.x[0].clone(), x_norm, squares, 0)
    hits = torch.full((shape.num_layers, shape.batch_size), -1, dtype=torch.int32, device=device)
    sums = torch.ones(shape.batch_size, shape.num_qo_heads, 2, device=device)
    decide(source, 0, sums, torch.ones_like(seq_lens), 0.1, hits, 0)
    assert same(state, before)
    assert torch.equal(x_norm, before.x)
    assert squares.isnan().all()
    assert (hits == -1).all()
    assert (source.priority.tolist(), target.priority.tolist()) == ([2, 0], [0, 2])
    for rank, mailbox in zip((source, target), mailboxes, strict=True):
        assert all(torch.equal(now, then) for now, then in zip(copy_of_fields(rank.own), mailbox, strict=True))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("stale", [5, 7, 0, -6])
def test_packets_and_verdicts_of_another_step_are_not_accepted(device: torch.device, stale: int, parts: int) -> None:
    if device.type == "cuda":
        pytest.skip("a GPU waits for the timeout: see the test below")
    shape, capacity, epoch = PairShape(2, 2, 1, 64, 4, 2, 16, parts), 5, 6
    ((source,), (target,)) = pairs(device, shape, epoch)
    source.exchange.epoch.fill_(stale)
    source.is_sender.fill_(1)
    target.is_receiver.fill_(1)
    mine, theirs = (draw_state(device, shape, capacity, torch.float32) for _ in range(2))
    seq_lens = torch.full((2,), 3, dtype=torch.int32, device=device)
    live = torch.ones_like(seq_lens)
    hits = torch.full((2, 2), -1, dtype=torch.int32, device=device)
    push(source, 1, mine, seq_lens)
    push_residual(source, mine.x)
    decide(source, 0, sums_for(device, [True, True], 4), live, 0.5, hits, 0)
    # With several parts, the packets of A~ have come, and those of its lse have not.
    target.own.spec_out.fill_((stale if parts == 1 else epoch) << 32)
    target.own.spec_lse.fill_(stale << 32)
    theirs.attn_out.zero_()
    receive_handover(target, 1, theirs.x, KVLayer(theirs.k, theirs.v), seq_lens, theirs.attn_out, 0)
    assert theirs.x.isnan().all()
    assert theirs.attn_out.isnan().all()
    x, x_norm = theirs.x.clone().zero_(), theirs.x.clone()
    receive_residual(target, x, theirs.x[0].clone(), x_norm, nan(device, torch.float32, 2, num_square_sums(64)), 0)
    assert x.isnan().all()
    target.priority.copy_(torch.tensor([1, 2]))
    update_roles(target, 1, hits, 0)
    assert target.priority.tolist() == [1, 2], "the rank took an accepted verdict of another step"
    assert int(target.is_receiver) == 1
    assert (hits[0] == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_late_paired_rank_is_named_after_the_timeout() -> None:
    device = torch.device("cuda")
    shape = PairShape(4, 1, 1, 64, 4, 2, 16)
    seq_lens = torch.ones(1, dtype=torch.int32, device=device)
    hits = torch.zeros(4, 1, dtype=torch.int32, device=device)
    for missing in ("verdict", "x k v", "spec_out", "lse", "residual"):
        _, (target,) = pairs(device, replace(shape, spec_parts=3) if missing == "lse" else shape, 6)
        target.own.spec_lse.fill_((5 if missing == "lse" else 6) << 32)
        state = draw_state(device, shape, 5, torch.bfloat16)
        target.is_receiver.fill_(1)
        target.own.spec_out.fill_((5 if missing == "spec_out" else 6) << 32)
        target.own.inbox.fill_((5 if missing in ("x k v", "residual") else 6) << 32)
        target.own.verdicts.fill_(5 << 32 | ACCEPTED)
        if missing == "verdict":
            target.priority.copy_(torch.tensor([1, 2]))
            update_roles(target, 3, hits, 10**7)
            assert (target.priority.tolist(), int(target.is_receiver)) == ([1, 2], 1), (
                "the rank took the verdict of the previous step"
            )
        elif missing == "residual":
            squares = nan(device, torch.float32, 1, num_square_sums(64))
            receive_residual(target, state.x, state.x[0].clone(), state.x.clone(), squares, 10**7)
            assert state.x.isnan().all()
        else:
            receive_handover(target, 2, state.x, KVLayer(state.k, state.v), seq_lens, state.attn_out, 10**7)
        late_index = 2 * (5 if missing == "residual" else 2)
        assert split_fault(int(target.exchange.fault)) == (LATE_PACKET, late_index, 0), missing


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("fault", [0, BAD_NUMBERS, LATE_PACKET])
def test_kernels_wait_after_bad_numbers_and_not_after_a_late_packet(fault: int) -> None:
    device, side_stream = torch.device("cuda"), torch.cuda.Stream()
    for late_by in (0, 10**8):  # cycles; the first round compiles
        ((source,), (target,)) = pairs(device, PairShape(2, 1, 1, 64, 4, 2, 16), 6)
        target.is_receiver.fill_(1)
        target.exchange.fault.fill_(fault_code(fault, 1, 0) if fault else 0)
        sent, x = torch.randn(1, 64, device=device), torch.zeros(1, 64, device=device)
        torch.cuda.synchronize()
        packets = packets_of(sent, 6)
        torch.cuda.synchronize()
        with torch.cuda.stream(side_stream):
            torch.cuda._sleep(late_by)
            source.peer_inbox(2)[:, :64].copy_(packets)
        squares = nan(device, torch.float32, 1, num_square_sums(64))
        receive_residual(target, x, sent[0].clone(), x.clone(), squares, 5 * 10**9)
        torch.cuda.synchronize()
        if late_by and fault == LATE_PACKET:
            assert x.isnan().all()
        else:
            assert torch.equal(x, sent)
        assert int(target.exchange.fault) == (fault_code(fault, 1, 0) if fault else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "hidden"), [(1, 64), (3, 97)])
def test_the_residual_reaches_the_other_group(
    device: torch.device, dtype: torch.dtype, batch: int, hidden: int, check: Check
) -> None:
    ((source,), (target,)) = pairs(device, PairShape(2, batch, 1, hidden, 3, 1, 20), 6)
    target.is_receiver.fill_(1)
    sent, gamma = torch.randn(batch, hidden).to(device), torch.randn(hidden).to(dtype).to(device)
    x, x_norm = nan(device, torch.float32, batch, hidden), nan(device, dtype, batch, hidden)
    squares = nan(device, torch.float32, batch, num_square_sums(hidden))
    push_residual(source, sent)
    receive_residual(target, x, gamma, x_norm, squares, TIMEOUT_NS)
    assert torch.equal(x, sent)
    _, expected, square_sum = reduce_norm_ref(torch.zeros_like(sent)[None], sent, gamma)
    check(x_norm, expected, dtype)
    check(squares.sum(1), square_sum, torch.float32)


def test_attention_writes_its_spec_output_into_the_paired_rank_if_its_gate_is_open(
    device: torch.device, check: Check
) -> None:
    shape, capacity, epoch, chunk = PairShape(2, 2, 1, 64, 4, 2, 16), 400, 6, 64
    ((source,), (target,)) = pairs(device, shape, epoch)
    state = draw_state(device, shape, capacity, torch.float32)
    seq_lens = torch.tensor([400, 331], dtype=torch.int32, device=device)
    q = torch.randn(2, 4, 16).to(device)
    sums, lse = nan(device, torch.float32, 2, num_sums(2, 4, 16), 2), nan(device, torch.float32, 2, 4)
    workspace = LeanWorkspace.allocate(2, 4, 2, 16, device, 5)
    speculation = pair_spec_output(source, 1, chunk, sums)

    def attend() -> None:
        lean_decode_attention(
            q, state.k, state.v, seq_lens, 0.25, workspace, state.attn_out, lse, speculation, gate=source.is_sender
        )

    mailbox = copy_of_fields(target.own)
    attend()
    assert all(torch.equal(now, then) for now, then in zip(copy_of_fields(target.own), mailbox, strict=True))
    assert state.attn_out.isnan().all()
    assert sums.isnan().all()
    source.is_sender.fill_(1)
    attend()
    spec_out, full_out, expected = speculative_decode_attention_ref(q, state.k, state.v, seq_lens, chunk, 0.25)
    check(state.attn_out, full_out, torch.float32)
    check(sums.sum(1), expected, torch.float32)
    target.is_receiver.fill_(1)
    push(source, 1, state, seq_lens)
    theirs = draw_state(device, shape, capacity, torch.float32)
    receive_handover(target, 1, theirs.x, KVLayer(theirs.k, theirs.v), seq_lens, theirs.attn_out, TIMEOUT_NS)
    check(theirs.attn_out, spec_out, torch.float32)


def test_the_fields_of_a_mailbox_are_disjoint_and_aligned(device: torch.device) -> None:
    shape = PairShape(3, 3, 2, 97, 9, 3, 20, 5)
    memory = torch.zeros(sum(shape.field_sizes()), dtype=torch.int64, device=device)
    mailbox = Mailbox.view(memory, shape)
    for number, field in enumerate(fields(mailbox)):
        part = getattr(mailbox, field.name)
        assert (part.data_ptr() - memory.data_ptr()) % 16 == 0
        assert not part.any(), f"{field.name} overlaps another part"
        part.fill_(number + 1)
    assert all(packets.data_ptr() % 16 == 0 for packets in mailbox.spec_out)
