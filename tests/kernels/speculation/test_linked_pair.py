"""The kernels of a pair over a link. One process runs all ranks; a random schedule runs them and delivers messages."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import pytest
import torch
from paired_ranks import nan
from torch import Tensor

from alspec.kernels.attention.dispatch import KVLayer
from alspec.kernels.comm.exchange import Exchange
from alspec.kernels.comm.ll_packets import LATE_PACKET, fault_code, unpack_packets
from alspec.kernels.comm.pair_state import PairShape
from alspec.kernels.norm.residual import num_square_sums
from alspec.kernels.speculation.linked_pair import (
    LinkedPair,
    await_ending,
    choose_x,
    decide,
    note_arrival,
    replace_newest,
    snapshot,
    take_x,
)

TIMEOUT_NS = 10**8
CAPACITY, POSITION = 6, 4  # of the caches; of the newest token


def linked_pairs(device: torch.device, shape: PairShape, has_packets: bool = False) -> list[list[LinkedPair]]:
    """[group][tp_rank]. has_packets: the ranks of a group agree over packets."""
    found = [
        [
            LinkedPair.allocate(
                shape,
                Exchange(
                    partial=nan(device, torch.float32, shape.batch_size, shape.hidden_size),
                    epoch=torch.ones(1, dtype=torch.int32, device=device),
                    fault=torch.zeros(1, dtype=torch.int32, device=device),
                    tp_rank=tp_rank,
                    tp_size=shape.tp_size,
                    rank=group * shape.tp_size + tp_rank,
                ),
                group,
                (1 - group) * shape.tp_size + tp_rank,
            )
            for tp_rank in range(shape.tp_size)
        ]
        for group in range(2)
    ]
    return [with_packets(group) for group in found] if has_packets else found


def with_packets(group: list[LinkedPair]) -> list[LinkedPair]:
    """The same ranks, which agree over packets."""
    shape, device = group[0].shape, group[0].arrived.device
    agreed = torch.zeros(
        shape.tp_size, shape.num_layers, shape.tp_size, shape.agreed_packets, dtype=torch.int64, device=device
    )
    peers = torch.tensor([each.data_ptr() for each in agreed], device=device)
    exchanges = [
        replace(pair.exchange, agreed=own, agreed_peers=peers) for pair, own in zip(group, agreed, strict=True)
    ]
    return [replace(pair, exchange=exchange) for pair, exchange in zip(group, exchanges, strict=True)]


def store(packets: Tensor, values: Tensor, epoch: int) -> None:
    """What `reduce_norm` and `qkv_rope_append` do with a message."""
    bits = values.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    packets.copy_(bits | (epoch << 32))


def post_attention(x: Tensor, layer: int, accepted: bool) -> Tensor:
    """A stand-in: `A~` and `A` give different x."""
    return x * 0.5 + (layer + 1) * (1.25 if accepted else -0.75)


def new_keys(x: Tensor, layer: int, size: int) -> Tensor:
    """A stand-in for k and v of a layer: [B, size], they follow from x."""
    return x.sum(1, keepdim=True) + layer + torch.arange(size, device=x.device) / 8


@dataclass
class Rank:
    pair: LinkedPair
    x: Tensor
    caches: list[KVLayer]
    link: deque[tuple[int, Tensor, int]] = field(default_factory=deque)  # slots, messages, epochs
    taken: int = 0

    def __post_init__(self) -> None:
        shape, device = self.pair.shape, self.x.device
        self.x_norm = nan(device, torch.float32, *self.x.shape)
        self.squares = nan(device, torch.float32, shape.batch_size, num_square_sums(shape.hidden_size))
        self.gamma = torch.rand(shape.hidden_size, device=device) + 0.5
        self.seq_lens = torch.full((shape.batch_size,), POSITION + 1, dtype=torch.int32, device=device)

    @property
    def epoch(self) -> int:
        return int(self.pair.exchange.epoch)

    def take(self, layer: int) -> bool:
        is_taken = bool(self.pair.takes(layer))
        take_x(self.pair, layer, self.x, self.gamma, self.x_norm, self.squares, TIMEOUT_NS)
        if is_taken:
            self.taken += layer < self.pair.shape.num_layers
            torch.testing.assert_close(self.x_norm, self.x * self.gamma)
            torch.testing.assert_close(self.squares.sum(1), self.x.square().sum(1))
        return is_taken

    def append(self, layer: int) -> Tensor:
        """k and v of this rank's x into its cache."""
        shape = self.pair.shape
        kv = new_keys(self.x, layer, 2 * shape.num_kv_heads * shape.head_dim)
        k, v = kv.view(shape.batch_size, 2, shape.num_kv_heads, shape.head_dim).unbind(1)
        self.caches[layer].k[:, :, POSITION], self.caches[layer].v[:, :, POSITION] = k, v
        return kv


class Pair:
    """All ranks of two groups, and the links between them."""

    def __init__(self, device: torch.device, shape: PairShape, seed: int, has_packets: bool) -> None:
        self.rng, self.shape, self.device = random.Random(seed), shape, device
        self.groups = [[self._rank(pair) for pair in pairs] for pairs in linked_pairs(device, shape, has_packets)]

    def _rank(self, pair: LinkedPair) -> Rank:
        size = self.shape.batch_size, self.shape.num_kv_heads, CAPACITY, self.shape.head_dim
        caches = [KVLayer(*torch.zeros(2, *size, device=self.device)) for _ in range(self.shape.num_layers)]
        return Rank(pair, torch.zeros(self.shape.batch_size, self.shape.hidden_size, device=self.device), caches)

    def send(self, rank: Rank, slot: int, message: Tensor) -> None:
        other = self.groups[1 - rank.pair.group][rank.pair.exchange.tp_rank]
        other.link.append((slot, message.clone(), rank.epoch))

    def deliver(self, rank: Rank) -> None:
        slot, message, epoch = rank.link.popleft()
        (rank.pair.inbox[slot] if slot < len(rank.pair.inbox) else rank.pair.ending).copy_(message)
        note_arrival(rank.pair, slot, epoch)

    def agree(self, group: list[Rank], launch: Callable[[Rank], None]) -> None:
        """Launch what needs the ranks of the group to see the same messages, on all of them."""
        if group[0].pair.exchange.agreed is not None:
            for rank in group:
                # A fault ends all waits: in one process the first ranks would wait in vain for the later ones.
                rank.pair.exchange.fault.fill_(fault_code(LATE_PACKET, 0, 0))
                before = rank.pair.progress.clone()
                launch(rank)
                rank.pair.progress.copy_(before)
                rank.pair.exchange.fault.zero_()
        elif len(group) > 1:
            for rank in group:
                snapshot(rank.pair)
            for rank in group:
                rank.pair.counts.copy_(torch.cat([each.pair.counts[i : i + 1] for i, each in enumerate(group)]))
        for rank in group:
            launch(rank)

    def verifier(self, verdicts: list[bool], expected: list[Tensor]) -> Iterator[bool]:
        """One step; yields whether it can go on."""
        group, shape = self.groups[0], self.shape
        live = torch.ones(shape.batch_size, dtype=torch.int32, device=self.device)
        forced = torch.tensor(verdicts, dtype=torch.int32, device=self.device)
        for layer in range(shape.num_layers):
            for rank in group:
                assert torch.equal(rank.x, expected[layer])
                store(rank.pair.written(layer)[:, shape.hidden_size :], rank.append(layer), rank.epoch)
                self.send(rank, layer, rank.pair.outbox[layer])
            yield True
            for rank in group:
                rank.pair.sums.fill_(1.0)
            self.agree(
                group,
                lambda rank, layer=layer: decide(rank.pair, layer, live, 0.5, rank.pair.hits, TIMEOUT_NS, forced),
            )
            for rank in group:
                hits = rank.pair.hits
                assert hits[layer].tolist() == [int(verdicts[layer])] * shape.batch_size
                takes, computes = bool(rank.pair.takes(layer)), bool(rank.pair.computes(layer))
                assert computes is not takes
                assert bool(rank.pair.predicts(layer)) is (verdicts[layer] and not takes)
                if not rank.take(layer):
                    rank.x = post_attention(rank.x, layer, verdicts[layer])
                    store(rank.pair.written(layer + 1)[:, : shape.hidden_size], rank.x, rank.epoch)
            for rank in group:
                sent = rank.pair.written(layer + 1)[:, : shape.hidden_size]
                assert torch.equal(unpack_packets(sent, rank.epoch), expected[layer + 1])
            assert len({bool(rank.pair.takes(layer)) for rank in group}) == 1
            yield True
        for rank in group:
            assert torch.equal(rank.x, expected[-1])
            self.send(rank, shape.num_layers, rank.pair.outbox[-1])
            self.send(rank, shape.num_layers + 1, rank.pair.ending)

    def speculator(self, expected: list[Tensor]) -> Iterator[bool]:
        group, shape = self.groups[1], self.shape

        def has_arrived(slot: int) -> bool:
            return all(int(rank.pair.arrived[slot]) >> 32 == rank.epoch for rank in group)

        base = 0

        def must_take(layer: int) -> bool:
            """The last layer rejected, as far as all ranks know, is not in front of the base; or it is the last x."""
            count = sum(map(has_arrived, range(shape.num_layers + 1)))
            headers = group[0].pair.inbox[:, 0].tolist()
            return layer == shape.num_layers or (count > 0 and headers[count - 1] >= base)

        for layer in range(shape.num_layers + 1):
            if layer:
                while must_take(layer) and not has_arrived(layer):
                    yield False  # on a GPU the kernel waits, and nobody would deliver
                self.agree(group, lambda rank, layer=layer: choose_x(rank.pair, layer, TIMEOUT_NS))
                for rank in group:
                    assert bool(rank.pair.takes(layer)) is must_take(layer)
                base = layer if must_take(layer) else base
                for rank in group:
                    rank.take(layer)
            if layer == shape.num_layers:
                break
            yield True
            for rank in group:
                rank.append(layer)
                rank.x = post_attention(rank.x, layer, True)
                store(rank.pair.written(layer), rank.x, rank.epoch)
                self.send(rank, layer, rank.pair.outbox[layer])
            yield True
        while not has_arrived(shape.num_layers + 1):
            yield False
        for rank in group:
            assert torch.equal(rank.x, expected[-1])
            for layer, cache in enumerate(rank.caches):
                replace_newest(rank.pair, layer, cache, rank.seq_lens)
            await_ending(rank.pair, TIMEOUT_NS)
            for cache, right in zip(rank.caches, self.groups[0][0].caches, strict=True):
                assert torch.equal(cache.k, right.k)
                assert torch.equal(cache.v, right.v)
            assert torch.equal(rank.pair.hits, self.groups[0][0].pair.hits)

    def step(self, verdicts: list[bool], haste: tuple[float, float]) -> None:
        """Run one step. haste: how soon messages to the verifier and to the speculator are delivered."""
        x = torch.randn(self.shape.batch_size, self.shape.hidden_size, device=self.device)
        expected = [x]
        for layer, accepted in enumerate(verdicts):
            expected.append(post_attention(expected[-1], layer, accepted))
        for rank in chain(*self.groups):
            rank.x = x.clone()
        running = [self.verifier(verdicts, expected), self.speculator(expected)]
        alive = [True, True]
        while any(alive):
            index = self.rng.randrange(2)
            if alive[index]:
                alive[index] = next(running[index], None) is not None
            for group, share in zip(self.groups, haste, strict=True):
                for rank in group:
                    # What nobody waits for may also arrive in the next step.
                    if rank.link and (self.rng.random() < share or alive == [False, True]):
                        self.deliver(rank)
        for rank in chain(*self.groups):
            assert not int(rank.pair.exchange.fault)
            rank.pair.exchange.epoch.add_(1)


SHAPES = [
    pytest.param(PairShape(4, 1, 1, 40, 4, 2, 8), False, id="one rank"),
    pytest.param(PairShape(3, 2, 2, 33, 4, 1, 12), False, id="two ranks"),
    pytest.param(PairShape(3, 2, 3, 33, 4, 1, 12), True, id="three ranks over packets"),
]


@pytest.mark.parametrize("num_steps", [12, pytest.param(400, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "haste",
    [(0.9, 0.9), (0.02, 0.5), *(pytest.param(haste, marks=pytest.mark.full) for haste in ((0.1, 0.9), (0.5, 0.1)))],
    ids=str,
)
@pytest.mark.parametrize(("shape", "has_packets"), SHAPES)
def test_the_right_x_whenever_messages_arrive(
    device: torch.device, shape: PairShape, has_packets: bool, haste: tuple[float, float], num_steps: int
) -> None:
    """The verifier's x, the speculator's last x, caches and verdicts are right; both ways of getting x are used."""
    pair = Pair(device, shape, 7, has_packets)
    for step in range(num_steps):
        hit_rate = (0.0, 0.5, 0.8, 1.0)[step % 4]
        pair.step([pair.rng.random() < hit_rate for _ in range(shape.num_layers)], haste)
    taken = [group[0].taken for group in pair.groups]
    assert taken[1] > 0
    if haste[0] >= 0.5:
        assert taken[0] > 0
    assert taken[0] < num_steps * shape.num_layers


@pytest.mark.parametrize("has_packets", [False, True], ids=["collectives", "packets"])
@pytest.mark.parametrize(("batch", "tp_size"), [(1, 2), (3, 3), (8, 4)])
def test_verdicts_over_the_sums_of_all_ranks(device: torch.device, batch: int, tp_size: int, has_packets: bool) -> None:
    """Every rank decides as one rank with all heads would, in fp64, and over both ways by the same bits."""
    shape, layer = PairShape(2, batch, tp_size, 32, 4, 2, 16), 1
    pair = Pair(device, shape, 3, has_packets)
    generator = torch.Generator().manual_seed(batch)
    group = pair.groups[0]
    live = torch.ones(batch, dtype=torch.int32, device=device)
    verdicts = set()
    for _ in range(12):
        sums = torch.rand(group[0].pair.sums.shape, generator=generator)
        for rank in group:
            rank.pair.sums.fill_(torch.nan)
            if has_packets:
                rank.pair.own_sums.copy_(sums[rank.pair.exchange.tp_rank])
            else:
                rank.pair.sums.copy_(sums)
        pair.agree(group, lambda rank: decide(rank.pair, layer, live, 1.0, rank.pair.hits, TIMEOUT_NS))
        dist2, norm2 = sums.double().sum((0, 2)).unbind(1)
        for rank in group:
            assert rank.pair.hits[layer].tolist() == (dist2 < norm2).int().tolist()
            assert not int(rank.pair.exchange.fault)
            rank.pair.exchange.epoch.add_(1)
        verdicts.update(rank.pair.hits[layer].tolist())
    assert verdicts == {0, 1}


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_a_message_counts_when_all_ranks_of_the_group_have_it(device: torch.device, behind: int) -> None:
    """The last of three ranks has fewer messages. What the others have got beyond them is not used."""
    shape, layer = PairShape(4, 1, 3, 32, 4, 2, 16), 2
    pair = Pair(device, shape, 0, has_packets=True)
    live, forced = (torch.ones(size, dtype=torch.int32, device=device) for size in (1, 4))
    for group, (verifies, header) in zip(pair.groups, [(True, 0), (False, -1)], strict=True):
        for rank in group:
            late = behind if rank is group[-1] else 0
            for slot in range(layer + 1 - late):
                rank.pair.inbox[slot, 0] = header if verifies or slot < layer else layer
                note_arrival(rank.pair, slot, rank.epoch)
            rank.pair.sums.fill_(1.0)
            rank.pair.progress.fill_(-1 if verifies else 0)
        if verifies:  # takes x if it is there
            pair.agree(group, lambda rank: decide(rank.pair, layer, live, 0.5, rank.pair.hits, TIMEOUT_NS, forced))
        else:  # takes x if it knows of the reject, whose message is the last one
            pair.agree(group, lambda rank: choose_x(rank.pair, layer, TIMEOUT_NS))
        assert {bool(rank.pair.takes(layer)) for rank in group} == {behind == 0}
        assert not any(int(rank.pair.exchange.fault) for rank in group)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_rank_whose_packets_never_come_is_a_fault() -> None:
    for (first, _, third), verifies in zip(
        linked_pairs(torch.device("cuda"), PairShape(2, 1, 3, 32, 2, 1, 16), has_packets=True),
        (True, False),
        strict=True,
    ):
        live = torch.ones(1, dtype=torch.int32, device="cuda")
        for pair in (first, third):
            if verifies:
                decide(pair, 1, live, 0.5, pair.hits, 10**6)
            else:
                choose_x(pair, 1, 10**6)
        assert int(third.exchange.fault) == fault_code(LATE_PACKET, 2, first.exchange.rank + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_message_that_never_comes_is_a_fault() -> None:
    _, (speculator,) = linked_pairs(torch.device("cuda"), PairShape(2, 1, 1, 32, 2, 1, 16))
    await_ending(speculator, 10**6)
    assert int(speculator.exchange.fault) == speculator.late_fault


def test_buffers_of_both_groups_fit() -> None:
    shape = PairShape(3, 2, 1, 24, 4, 2, 8, spec_parts=3, recall_blocks=5)
    (verifier,), (speculator,) = linked_pairs(torch.device("cpu"), shape)
    assert verifier.outbox.shape == speculator.inbox.shape
    assert verifier.inbox.shape == speculator.outbox.shape
    assert verifier.lists.shape == (3, 2, 2, 5)
    assert verifier.hits.shape == (3, 2)
    assert verifier.written(3).shape == (2, 24 + 2 * 2 * 8)
    assert speculator.written(2).shape == (2, 24)
    assert unpack_packets(verifier.written(0), 1).isnan().all()
    assert (verifier.outbox[0, 0], speculator.outbox[0, 0]) == (-1, 0)
    assert verifier.spec_output(64).spec_lse is verifier.spec_lse
