"""Decode steps of two paired groups over a link that kernels cannot reach across: kernels/speculation/linked_pair.py.

    verifier                                               speculator
    pre_attention   k, v; message of the layer leaves      choose_x, take_x   own x, or the verifier's; from layer 1 on
    attend          A, dist2, norm2                        pre_attention
    decide          verdict; has the speculator's x come?  _predict           A~ alone
    _predict        [accepted, x has not come] A~ again,   post_attention     x; message of the layer leaves
                    by the speculator's launch: its bits
    take_x          [accepted, x has come]
    post_attention  [x was not taken] on A~ or A

Source: ALSpec; there, groups change roles after each hit, and each layer waits for one message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from alspec.interrupts import interrupts_wait
from alspec.kernels.attention.decode.lean_decode import SpecOutput
from alspec.kernels.attention.dispatch import attend
from alspec.kernels.attention.recall import choose_recall_lists
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
from alspec.runtime.decode.decoder import STEP_TIMEOUT_NS, TIMEOUT_NS, Decoder, LaunchContext, SpeculationState
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.distributed.pair_link import LINK_SMS, Expected, PairLink

__all__ = ["LinkedDecoder", "Speculator", "Verifier"]


@dataclass
class LinkedDecoder(Decoder):
    """What both groups of a pair have in common."""

    speculation: SpeculationState
    pair: LinkedPair
    link: PairLink

    spare_sms: ClassVar[int] = LINK_SMS

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lead = self.config.num_layers
        self._no_sums = torch.zeros_like(self.pair.own_sums)  # a launch for A~ alone does not write them

    def set_lead(self, lead: int) -> None:
        """From the next step on, the speculator is at most so many layers ahead of the newest message."""
        if lead != self._lead:
            self._lead = lead
            self.pair.lead.fill_(lead)

    def begin(self, token_ids: list[int], seq_lens: list[int]) -> None:
        """As `Decoder`; no block is recalled yet."""
        super().begin(token_ids, seq_lens)
        if self.speculation.recall is not None:
            self.speculation.recall.lists.fill_(-1)

    def next_lists(self) -> torch.Tensor | None:
        """See `Decoder.next_lists`."""
        return None if self.speculation.recall is None else self.speculation.recall.lists.clone()

    @contextmanager
    def launching(self, epoch: int) -> Iterator[None]:
        """Receive this step's messages while it runs: on a CPU receives begin before it, on a GPU after its launch."""
        with interrupts_wait():  # the messages of a step are sent and received all, or none
            self.link.order_receives()
            if self.link.is_host_driven:
                self.link.receive_step(self._messages(epoch))
            yield
            if not self.link.is_host_driven:
                self.link.receive_step(self._messages(epoch))

    def release(self) -> None:
        """On a CPU: wait for the messages of all steps. On a GPU, that is to synchronise."""
        self.link.release()

    def _messages(self, epoch: int) -> list[Expected]:
        messages = [*self.pair.inbox] + ([] if self.pair.verifies else [self.pair.ending])
        return [(message, partial(note_arrival, self.pair, slot, epoch)) for slot, message in enumerate(messages)]

    def _agree(self) -> None:
        """Let the ranks of a group see the same messages. Over packets, the next kernel does it."""
        self.link.poll()
        if self._gathers:
            snapshot(self.pair)
            self._gather_group(self.pair.counts)

    @property
    def _gathers(self) -> bool:
        """Collectives gather what the ranks of the group agree on."""
        return self.exchange.tp_size > 1 and self.exchange.agreed is None

    def _predict(self, layer: int, gate: Tensor | None = None) -> None:
        """`A~` in place of `A`: the same bits in both groups."""
        buffers, cache, speculation = self.buffers, self.cache, self.speculation
        output = SpecOutput(
            speculation.chunk_size, buffers.attn_out, self._no_sums, recall=speculation.recall_buffers(layer)
        )
        attend(
            buffers.q, cache.layers[layer], cache.lengths(layer), cache.sm_scale, cache.workspace(layer),
            buffers.attn_out, buffers.lse, output, "predictor", gate, after_join=True,
        )  # fmt: skip

    def _gather_group(self, rows: Tensor) -> None:
        """Fill rows [T, ...] with those of the group's ranks, in place."""
        rows.copy_(self.all_gather(rows[self.exchange.tp_rank]))


@dataclass
class Verifier(LinkedDecoder):
    """Group 0: its x and cache decide the text. None of its layers waits for a message."""

    def run_layers(self, operation: OperationHook) -> None:
        """As `Decoder`; at the end x leaves in a message of its own."""
        super().run_layers(operation)
        self.link.send(self.pair.outbox[-1])

    def pre_attention(self, layer: int) -> None:
        """As `Decoder`; then the layer's message is complete and leaves."""
        super().pre_attention(layer)
        self.link.send(self.pair.outbox[layer])

    def _launch_context(self, layer: int) -> LaunchContext:
        pair, gate = self.pair, self.pair.computes(layer)
        return LaunchContext(
            self.exchange, self.all_reduce, gate, gate, inbox=pair.written(layer), next_inbox=pair.written(layer + 1)
        )

    def attention(self, layer: int) -> None:
        """Full attention with `A~`, the verdict, and then what post-attention reads, or the speculator's x."""
        buffers, cache, speculation = self.buffers, self.cache, self.speculation
        attend(
            buffers.q, cache.layers[layer], cache.lengths(layer), cache.sm_scale, cache.workspace(layer),
            buffers.attn_out, speculation.lse_out(layer, buffers.lse),
            self.pair.spec_output(speculation.chunk_size, speculation.recall_buffers(layer)),
            prefetch_before_wait=not cache.is_ring(layer),
        )  # fmt: skip
        self._decide(layer)

    def _decide(self, layer: int) -> None:
        buffers, pair, speculation = self.buffers, self.pair, self.speculation
        self._agree()
        if self._gathers:
            self._gather_group(pair.sums)
        timeout_ns = STEP_TIMEOUT_NS if layer == 0 else TIMEOUT_NS  # the first exchange of the group in a step
        decide(pair, layer, speculation.live, speculation.threshold, speculation.hits, timeout_ns, speculation.forced)
        self._predict(layer, pair.predicts(layer))
        take_x(
            pair, layer, buffers.x, self._gammas[layer][1], buffers.x_norm, buffers.square_sums, STEP_TIMEOUT_NS
        )  # fmt: skip

    def logits(self) -> None:
        """As `Decoder`; beside it, send verdicts and the recall lists of the next step."""
        pair, recall, speculation = self.pair, self.speculation.recall, self.speculation
        if recall is not None:
            with self.link.fork():
                choose_recall_lists(recall, self.buffers.seq_lens, speculation.chunk_size, lists=recall.lists)
                pair.lists.copy_(recall.lists)
        self.link.send(pair.ending)
        super().logits()
        self.link.join()


@dataclass
class Speculator(LinkedDecoder):
    """The group that computes on `A~` alone, ahead of the verifier."""

    timeout_ns: ClassVar[int] = STEP_TIMEOUT_NS  # of all waits: a peer may wait for a message first

    def run_layers(self, operation: OperationHook) -> None:
        """As `Decoder`; then x is the verifier's."""
        super().run_layers(operation)
        with operation("agree", self.config.num_layers):
            self._choose(self.config.num_layers)

    def pre_attention(self, layer: int) -> None:
        """As `Decoder`, on its own x or the verifier's; both begin with the embedding."""
        if layer > 0:
            self._choose(layer)
        super().pre_attention(layer)

    def post_attention(self, layer: int) -> None:
        """As `Decoder`; then the layer's message is complete and leaves."""
        super().post_attention(layer)
        self.link.send(self.pair.outbox[layer])

    def _launch_context(self, layer: int) -> LaunchContext:
        return LaunchContext(self.exchange, self.all_reduce, next_inbox=self.pair.written(layer), like_gated=True)

    def attention(self, layer: int) -> None:
        """`A~` in place of attention."""
        self._predict(layer)

    def _choose(self, layer: int) -> None:
        """Take the verifier's x in front of a layer where its own may be wrong."""
        buffers, pair, last = self.buffers, self.pair, layer == self.config.num_layers
        gamma = self.weights.final_norm if last else self.weights.layers[layer].input_norm
        if self.link.is_host_driven and not last and layer >= self._lead:
            self.link.await_message(layer - self._lead)
        self._agree()
        choose_x(pair, layer, STEP_TIMEOUT_NS)
        if self.link.is_host_driven and bool(pair.takes(layer)):
            self.link.await_message(layer)
        take_x(pair, layer, buffers.x, gamma, buffers.x_norm, buffers.square_sums, STEP_TIMEOUT_NS)

    def logits(self) -> None:
        """Logits as the verifier has them. Beside them, its k and v, verdicts and recall lists are stored."""
        pair, recall = self.pair, self.speculation.recall
        with self.link.fork():
            for layer, cache in enumerate(self.cache.layers):
                replace_newest(pair, layer, cache, self.buffers.seq_lens)
        self._project_logits()
        self.link.await_message(len(pair.inbox))
        await_ending(pair, STEP_TIMEOUT_NS)
        self.link.join()
        if recall is not None:
            recall.lists.copy_(pair.lists)  # not in place: the next lists may arrive while these are read
        self.cache.compact()
