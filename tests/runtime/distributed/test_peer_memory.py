"""Peer memory: the self-test finds wrong packets, all ranks choose the same memory, and the user is told why."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from alspec.errors import DoesNotFitError, UserError, one_line
from alspec.kernels.comm.ll_packets import unpack_packets
from alspec.kernels.comm.pair_state import PairShape
from alspec.kernels.linear.push import lm_head, push_partial
from alspec.kernels.norm.residual import new_residual, reduce_norm
from alspec.kernels.sampling.next_token import collect_logits
from alspec.runtime.distributed import peer_memory as module
from alspec.runtime.distributed.host_memory import HostMemoryError
from alspec.runtime.distributed.placement import PeerMemory, Placement
from alspec.runtime.engine.engine import Engine

PEER_MEMORIES: tuple[PeerMemory, ...] = ("symm", "host")
ZERO, LAST_BIT = 0, 1
NEGATIVE_ZERO = torch.tensor(-0.0).view(torch.int32).item()

# The squares of the large numbers overflow; no test compares them.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


@pytest.fixture(autouse=True)
def _signed_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sums of the interpreter begin with -0.0. NumPy begins with +0.0, which turns a sum of -0.0 into 0.0."""

    def total(reduction: Any, values: Any) -> Any:
        data = values.handle.data
        first = -0.0 if data.dtype.kind == "f" else 0
        sums = np.sum(data, axis=reduction.axis, keepdims=reduction.keep_dims, initial=first)
        return reduction.to_tensor(sums, values.dtype)

    monkeypatch.setattr(interpreter.ReduceOps, "sum", total)


class Job:
    """The self-tests of all ranks in one process, one after the other, with shared memory and an all-reduce."""

    def __init__(self, world_size: int, device: torch.device, peer_memory: PeerMemory = "symm") -> None:
        self.world_size, self.device, self._peer_memory = world_size, device, peer_memory
        self.memories: list[Tensor] = []
        self.given: dict[int, Tensor] = {}  # what each rank has given to the all-reduce
        for rank in range(world_size):
            self.self_test(rank)  # fails: it sends its packets, but those of later ranks are missing

    def self_test(self, rank: int) -> str:
        def allocate(_way: PeerMemory, sizes: list[int], _buffer_ids: Any, _transport: Any) -> list[list[Tensor]]:
            if not self.memories:
                places = 1 if self._peer_memory == "host" else self.world_size
                each = [torch.zeros(sizes[0], dtype=torch.int64, device=self.device) for _ in range(places)]
                self.memories = each * (self.world_size // places)
            return [self.memories]

        def all_reduce(values: Tensor, group: Any) -> None:
            assert group == "peers"
            self.given[rank] = values.clone()
            values.copy_(self.sums())

        transport = SimpleNamespace(
            placement=Placement(rank=rank, world_size=self.world_size), device=self.device, synchronize=lambda: None,
            peer_group="peers",
        )  # fmt: skip
        with (
            mock.patch.object(module, "allocate_packets", allocate),
            mock.patch.object(module.dist, "all_reduce", all_reduce),
            mock.patch.object(module, "SELF_TEST_TIMEOUT_NS", 10**7),
        ):
            return module._self_test_problem(self._peer_memory, transport)

    def sums(self) -> Tensor:
        """The sum of what all ranks have given, in rank order. `torch.sum` would begin with +0.0."""
        first, *others = (values for _, values in sorted(self.given.items()))
        for values in others:
            first = first + values
        return first

    def packets(self, reader: int, writer: int) -> Tensor:
        """[channels, 2] int32, value and epoch: the packets that one rank has sent to another."""
        return self.memories[reader].view(self.world_size, -1)[writer].view(torch.int32).view(-1, 2)


@pytest.mark.parametrize("peer_memory", PEER_MEMORIES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_right_sums_pass_on_every_rank(device: torch.device, world_size: int, peer_memory: PeerMemory) -> None:
    job = Job(world_size, device, peer_memory)
    assert [job.self_test(rank) for rank in range(world_size)] == [""] * world_size
    sums = job.sums()
    is_zero = sums == 0
    assert (is_zero & sums.signbit()).any(), "the test must compare -0.0"
    assert ((sums.abs() < torch.finfo(torch.float32).tiny) & ~is_zero).any(), "the test must compare a subnormal number"
    assert {-3e38, 3e38} <= {round(value, -37) for value in sums.tolist()}


def channels_of(kind: str, values: Tensor) -> Tensor:
    """The channels in which a rank's own values are of this kind."""
    is_subnormal = (values.abs() < torch.finfo(torch.float32).tiny) & (values != 0)
    kinds = {
        "negative zero": (values == 0) & values.signbit(),
        "subnormal": is_subnormal,
        "large": values.abs() > 2e38,
        "integer": (values.abs() >= 1) & (values.abs() <= 1000),
    }
    return kinds[kind].nonzero().flatten()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "flipped"),
    [
        pytest.param("negative zero", NEGATIVE_ZERO, id="-0.0 became 0.0"),
        pytest.param("subnormal", None, id="subnormal flushed to 0.0"),
        pytest.param("large", LAST_BIT, id="large number off by its last bit"),
        pytest.param("integer", LAST_BIT << 23, id="integer off by a factor of two"),
    ],
)
def test_a_packet_with_one_wrong_bit_is_found_by_its_reader(
    device: torch.device, world_size: int, kind: str, flipped: int | None
) -> None:
    """Only the reader of the packet reports it. Bits are compared, not numbers."""
    for reader, writer in ((0, world_size - 1), (world_size - 1, 0)):
        job = Job(world_size, device)
        channel = int(channels_of(kind, job.given[writer])[-1])
        packet = job.packets(reader, writer)[channel]
        right = job.sums()[channel].item()
        packet[0] = ZERO if flipped is None else packet[0] ^ flipped
        values = [job.given[rank][channel].clone() for rank in range(world_size)]
        values[writer] = packet[0].view(torch.float32)
        wrong = sum(values[1:], values[0]).item()
        assert job.self_test(reader) == f"wrong sum: {wrong!r}, expected {right!r}", (reader, writer)
        assert not any(job.self_test(rank) for rank in range(world_size) if rank != reader), (reader, writer)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_wrong_packet_in_host_memory_is_found_by_all_other_ranks(device: torch.device, world_size: int) -> None:
    job, writer = Job(world_size, device, "host"), 1
    job.packets(0, writer)[int(channels_of("integer", job.given[writer])[0])][0] ^= LAST_BIT << 23
    found = [job.self_test(rank) for rank in range(world_size) if rank != writer]
    assert all(text.startswith("wrong sum") for text in found), found
    assert job.self_test(writer) == "", "the writer reads its own copy, and pushes the packet again"
    assert [job.self_test(rank) for rank in range(world_size)] == [""] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_packet_that_does_not_arrive_is_found(device: torch.device, world_size: int) -> None:
    job = Job(world_size, device)
    job.packets(0, 1)[200] = 0  # the value before any packet arrived
    found = [job.self_test(rank) for rank in range(world_size)]
    # The interpreter does not wait and records no fault: the missing value is NaN.
    assert found[0] == ("a packet did not arrive" if device.type == "cuda" else "wrong sum: nan, expected -0.0")
    assert found[1:] == [""] * (world_size - 1)


class Ranks:
    """The exchanges of all ranks of a job in one process; of two linked groups, on a host each, those of the first."""

    def __init__(
        self,
        device: torch.device,
        peer_memory: PeerMemory,
        tp_size: int,
        num_groups: int,
        is_linked: bool = False,
        **shape: int,
    ) -> None:
        world_size = tp_size * num_groups
        self._memories: list[Tensor] = []  # the shared memory, or one of each rank
        self._device, self._num_peers = device, tp_size if is_linked else world_size
        pair = PairShape(2, shape["batch_size"], tp_size, shape["hidden_size"], 2, 1, 16) if num_groups == 2 else None
        self.exchanges, self.logit_exchanges, self.handovers = [], [], []
        for rank in range(self._num_peers):
            placement = Placement(rank, world_size, rank, self._num_peers, num_groups, is_linked)
            transport: Any = SimpleNamespace(
                placement=placement, device=device, barrier=lambda: None, first_reason=lambda reason: reason,
                peer_group=mock.Mock(),
            )  # fmt: skip
            with (
                mock.patch.object(module, "share_host_memory", self._shared),
                mock.patch.object(module._SymmetricMemory, "empty_strided_p2p", partial(self._own, rank)),
                mock.patch.object(module.symm_mem, "rendezvous", self._rendezvous),
            ):
                found = module.build_exchanges(transport, peer_memory, 4, **shape, pair_shape=pair)
            self.exchanges.append(found[0])
            self.logit_exchanges.append(found[1])
            self.handovers.append(found[2])

    def _shared(self, num_words: int, _: Any) -> Tensor:
        if not self._memories:
            self._memories = [torch.zeros(num_words, dtype=torch.int64, device=self._device)]
        return self._memories[0]

    def _own(self, rank: int, size: tuple[int], *_: Any) -> Tensor:
        if not self._memories:
            self._memories = [torch.zeros(size, dtype=torch.int64, device=self._device) for _ in range(self._num_peers)]
        return self._memories[rank]

    def _rendezvous(self, *_: Any) -> SimpleNamespace:
        return SimpleNamespace(world_size=self._num_peers, get_buffer=lambda rank, *_: self._memories[rank])

    @property
    def num_words(self) -> int:
        """Words of the shared memory, or of the symmetric memory of all ranks."""
        return sum(memory.numel() for memory in self._memories)


@pytest.mark.parametrize("peer_memory", PEER_MEMORIES)
@pytest.mark.parametrize(
    ("tp_size", "num_groups", "is_linked"),
    [(2, 1, False), (3, 1, False), (4, 1, False), (1, 2, False), (2, 2, False), (3, 2, True)],
)
def test_packets_of_all_ranks_arrive(
    device: torch.device, tp_size: int, num_groups: int, is_linked: bool, peer_memory: PeerMemory
) -> None:
    """The partials of the ranks of a group and the logits of all peers, with odd sizes, over several steps."""
    batch, hidden, inputs, vocab, reduce_index = 2, 80, 32, 37, 1
    world_size = tp_size if is_linked else tp_size * num_groups
    sizes = {"batch_size": batch, "hidden_size": hidden, "vocab_size": vocab}
    ranks = Ranks(device, peer_memory, tp_size, num_groups, is_linked, **sizes)
    generator = torch.Generator().manual_seed(tp_size)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device)

    shards, weights = random(world_size, -(-vocab // world_size), inputs), random(world_size, hidden, inputs)
    gamma, ones = random(hidden), torch.ones(batch, 1, device=device) * inputs  # the inputs are normalised already
    for _ in range(2):
        x, begin = random(world_size, batch, inputs), random(batch, hidden)
        for rank in range(world_size):
            push_partial(x[rank], weights[rank], ranks.exchanges[rank], reduce_index)
            lm_head(x[0], ones, shards[rank], ranks.logit_exchanges[rank], 0.0, reduce_index)
        for exchange, logit_exchange in zip(ranks.exchanges, ranks.logit_exchanges, strict=True):
            first = exchange.rank - exchange.tp_rank
            out, x_norm, square_sums = new_residual(batch, hidden, torch.float32, device)
            out.copy_(begin)
            reduce_norm(exchange, reduce_index, 10**9, out, gamma, x_norm, square_sums)
            partials = [x[rank].double() @ weights[rank].double().T for rank in range(first, first + tp_size)]
            torch.testing.assert_close(out.double(), begin.double() + sum(partials), rtol=1e-5, atol=1e-5)
            assert logit_exchange.packets is not None
            logits = unpack_packets(logit_exchange.packets, int(exchange.epoch))
            expected = torch.einsum("bk,wrk->bwr", x[0].double(), shards.double())
            torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
        for exchange in ranks.exchanges:
            exchange.epoch.add_(1)


@pytest.mark.parametrize("peer_memory", PEER_MEMORIES)
def test_ranks_of_a_linked_group_agree_over_packets(device: torch.device, peer_memory: PeerMemory) -> None:
    """Each rank writes its packets of a layer where each rank of its group reads them. There are no mailboxes."""
    tp_size, batch = 3, 2
    sizes = {"batch_size": batch, "hidden_size": 80, "vocab_size": 37}
    ranks = Ranks(device, peer_memory, tp_size, 2, is_linked=True, **sizes)
    assert ranks.handovers == [None] * tp_size
    own = [exchange.agreed for exchange in ranks.exchanges]
    for packets, exchange, logits in zip(own, ranks.exchanges, ranks.logit_exchanges, strict=True):
        assert packets.shape == (2, tp_size, 1 + 2 * batch)
        assert exchange.agreed_peers.tolist() == [each.data_ptr() for each in own]
        assert (logits.world_size, logits.rank, logits.first_rank) == (tp_size, exchange.tp_rank, 0)
    assert len({packets.data_ptr() for packets in own}) == tp_size
    assert all(exchange.agreed is None for exchange in Ranks(device, peer_memory, tp_size, 2, **sizes).exchanges)


@pytest.mark.parametrize(("tp_size", "num_groups"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_host_memory_holds_shared_buffers_once(device: torch.device, tp_size: int, num_groups: int) -> None:
    """Partials are there once for each group and logits once. Each rank has its own inbox. No two buffers overlap."""
    shape = {"batch_size": 3, "hidden_size": 80, "vocab_size": 37}
    ranks, separate = (Ranks(device, memory, tp_size, num_groups, **shape) for memory in ("host", "symm"))
    world_size = tp_size * num_groups
    first = {exchange.rank - exchange.tp_rank: exchange.packets for exchange in ranks.exchanges}
    for exchange, logits in zip(ranks.exchanges, ranks.logit_exchanges, strict=True):
        assert logits.packets is not None
        assert logits.peers is not None
        assert logits.own_packets is not None
        assert logits.packets.data_ptr() == ranks.logit_exchanges[0].packets.data_ptr()
        assert logits.peers.tolist() == [logits.packets.data_ptr(), logits.own_packets.data_ptr()]
        if tp_size > 1:
            assert exchange.packets is not None
            assert exchange.peers is not None
            assert exchange.own_packets is not None
            assert exchange.packets.data_ptr() == first[exchange.rank - exchange.tp_rank].data_ptr()
            assert exchange.peers.tolist() == [exchange.packets.data_ptr(), exchange.own_packets.data_ptr()]
    inboxes = [pair.own.inbox for pair in ranks.handovers if pair is not None]
    assert len({inbox.data_ptr() for inbox in inboxes}) == len(inboxes) == (world_size if num_groups == 2 else 0)
    own = [pair for pair in ranks.handovers if pair is not None]
    fields = [logits.packets, *(packets for packets in first.values() if packets is not None)]
    fields += [each.own_packets for each in (*ranks.exchanges, *ranks.logit_exchanges) if each.own_packets is not None]
    fields += [each for pair in own for each in (*vars(pair.own).values(), pair.barrier)]
    ranges = sorted((field.data_ptr(), field.data_ptr() + 8 * field.numel()) for field in fields if field.numel())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
    assert ranks.num_words < separate.num_words


@pytest.mark.parametrize(("tp_size", "num_groups"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_a_rank_reads_its_own_packets_outside_host_memory(device: torch.device, tp_size: int, num_groups: int) -> None:
    """Its packets in host memory are zeroed; its sums do not change."""
    batch, hidden, vocab, reduce_index = 2, 80, 37, 3
    shape = {"batch_size": batch, "hidden_size": hidden, "vocab_size": vocab}
    ranks, world_size = Ranks(device, "host", tp_size, num_groups, **shape), tp_size * num_groups
    generator = torch.Generator().manual_seed(tp_size)
    rows = -(-vocab // world_size)
    partials = torch.randn(world_size, batch, hidden, generator=generator).to(device)
    shards = torch.randn(world_size, batch, rows, generator=generator).to(device)
    sums_weight, rows_weight = torch.eye(hidden, device=device), torch.eye(rows, device=device)
    ones = torch.full((batch, 1), float(rows), device=device)  # the inputs are normalised already
    for exchange, logits in zip(ranks.exchanges, ranks.logit_exchanges, strict=True):
        push_partial(partials[exchange.rank], sums_weight, exchange, reduce_index)
        lm_head(shards[exchange.rank], ones, rows_weight, logits, 0.0, reduce_index)
    for exchange, logits in zip(ranks.exchanges, ranks.logit_exchanges, strict=True):
        first = exchange.rank - exchange.tp_rank
        shared = [logits.packets[:, exchange.rank]]
        if tp_size > 1:
            shared.append(exchange.packets[:, :, exchange.tp_rank])
        before = [packets.clone() for packets in shared]
        for packets in shared:
            packets.zero_()
        x, *norm = new_residual(batch, hidden, torch.float32, device)
        reduce_norm(exchange, reduce_index, 10**7, x, torch.ones(hidden, device=device), *norm)
        torch.testing.assert_close(x, partials[first : first + tp_size].sum(0))
        found = torch.zeros(batch, vocab, device=device)
        best, best_token = torch.zeros(batch, 1, device=device), torch.zeros(batch, 1, dtype=torch.int32, device=device)
        collect_logits(logits, logits.shard, 10**7, reduce_index, found, best, best_token)
        torch.testing.assert_close(found, shards.transpose(0, 1).flatten(1)[:, :vocab])
        assert int(exchange.fault) == 0
        for packets, old in zip(shared, before, strict=True):
            packets.copy_(old)


@pytest.mark.parametrize(
    ("reach", "wrong", "expected"),
    [
        pytest.param(["", ""], ["", ""], "", id="no fault"),
        pytest.param(["no way to GPU 1", "no way to GPU 1"], None, "no way to GPU 1", id="out of reach"),
        pytest.param(["", "no way to GPU 0"], None, "rank 1: no way to GPU 0", id="out of reach of one rank"),
        pytest.param(["", ""], ["wrong sum", ""], "symmetric memory failed: wrong sum", id="wrong sum"),
        pytest.param(
            ["", ""], ["", "wrong sum"], "symmetric memory failed: rank 1: wrong sum", id="wrong sum on another rank"
        ),
        pytest.param(
            ["", ""],
            [RuntimeError("no fabric handle\nat line 3"), ""],
            "symmetric memory failed: no fabric handle",
            id="allocation fails",
        ),
        pytest.param(
            ["", ""],
            ["", RuntimeError()],
            "symmetric memory failed: rank 1: RuntimeError",
            id="error without a message",
        ),
    ],
)
def test_every_rank_reports_the_same_reason(
    reach: list[str], wrong: list[str | RuntimeError] | None, expected: str
) -> None:
    """All ranks get the reason of the first one that has one, after the same number of exchanges."""
    for rank in (0, 1):
        exchanges = [reach, [one_line(each) if isinstance(each, Exception) else each for each in wrong or ()]]

        def first_reason(own: str, exchanges: list[list[str]] = exchanges, rank: int = rank) -> str:
            reasons = exchanges.pop(0)
            assert own == reasons[rank]
            return next((f"rank {other}: {why}" if other else why for other, why in enumerate(reasons) if why), "")

        transport: Any = SimpleNamespace(placement=Placement(rank, 2, rank, 2), first_reason=first_reason)
        differs = mock.Mock(side_effect=[wrong[rank]] if wrong else None)
        with (
            mock.patch.object(module, "why_no_peers", return_value=reach[rank]),
            mock.patch.object(module, "_self_test_problem", differs),
        ):
            assert module._problem("symm", transport) == expected
        assert differs.called == (wrong is not None)
        assert not any(exchanges)


def test_peer_memory_needs_gpus_that_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """`symm` needs access between every two GPUs; `host` only needs one host."""
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    here = Placement(rank=1, world_size=4, local_rank=1, local_world_size=4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: {own, peer} != {2, 3})
    assert module._topology_problem("symm", here) == "GPU 2 cannot reach GPU 3"
    assert module._topology_problem("host", here) == ""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: own != peer)
    assert module._topology_problem("symm", here) == ""
    spread = Placement(rank=1, world_size=4, local_rank=1, local_world_size=2)
    for memory in PEER_MEMORIES:
        assert module._topology_problem(memory, spread) == "ranks on several hosts"
        for rank in range(4):  # each group has a host of its own
            linked = Placement(rank, 4, rank % 2, 2, num_groups=2, is_linked=True)
            assert module._topology_problem(memory, linked) == ""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: {own, peer} != {2, 3})
    reach = [
        module._topology_problem("symm", Placement(rank, 4, rank, 4, num_groups=2, is_linked=True)) for rank in range(4)
    ]
    assert reach == ["", "", *["GPU 2 cannot reach GPU 3"] * 2], "of one host, the second group has its last GPUs"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert module._topology_problem("symm", here) == "NCCL_P2P_DISABLE=1"
    assert module._topology_problem("host", here) == ""


def test_host_memory_that_does_not_fit_is_an_error(device: torch.device) -> None:
    transport: Any = SimpleNamespace(placement=Placement(0, 2, 0, 2), device=device)
    with (
        mock.patch.object(module, "share_host_memory", side_effect=HostMemoryError("rank 1: no room for 9.0 MB")),
        pytest.raises(DoesNotFitError, match=r"^transport: host: rank 1: no room for 9\.0 MB; use --transport nccl"),
    ):
        module.build_exchanges(transport, "host", 4, 1, 64, 100)


NOTICE = "transport: %s, because symm does not work here"
FAR, PINNED = "GPU 0 cannot reach GPU 1", "the host's memory failed: no room for 1.0 MB"


@pytest.mark.parametrize(
    ("asked", "faults", "peer_memory", "notices"),
    [
        ("auto", {"symm": "", "host": ""}, "symm", []),
        ("auto", {"symm": FAR, "host": ""}, "host", [f"{NOTICE % 'host'} ({FAR})"]),
        ("auto", {"symm": FAR, "host": PINNED}, None, [f"{NOTICE % 'gloo'} ({FAR}; {PINNED})"]),
        ("auto", {"symm": FAR, "host": FAR}, None, [f"{NOTICE % 'gloo'} ({FAR})"]),
        ("host", {"host": ""}, "host", []),
    ],
)
def test_a_job_takes_the_first_peer_memory_that_works_and_says_so_once(
    asked: str, faults: dict[PeerMemory, str], peer_memory: PeerMemory | None, notices: list[str]
) -> None:
    engine = engine_that_tries(asked, tuple(faults))
    with mock.patch.object(module, "_problem", lambda memory, _: faults[memory]):
        engine.load(1, 16)
        engine.load(1, 32)
    assert (engine._peer_memory, engine.notices) == (peer_memory, notices)
    engine.close()


@pytest.mark.parametrize("asked", ["symm", "host"])
def test_a_requested_peer_memory_that_does_not_work_is_an_error(asked: PeerMemory) -> None:
    engine = engine_that_tries(asked, (asked,))
    with (
        mock.patch.object(module, "_problem", return_value=FAR),
        pytest.raises(UserError, match=f"transport: {asked} does not work here: {FAR}; use auto or nccl"),
    ):
        engine.load(1, 16)


def engine_that_tries(asked: str, candidates: tuple[PeerMemory, ...]) -> Engine:
    """An engine on the CPU that tries `candidates`. test_placement.py checks which ones an engine on GPUs tries."""
    engine = Engine.from_pretrained(transport="gloo")
    engine._choices = replace(engine._choices, candidates=candidates)
    engine.config = engine.config.model_copy(update={"transport": asked})
    return engine
