"""The decode step of two paired groups whose ranks write LL packets into each other's memory.

One layer l; every rank launches all of it; [g] = skipped where gate g is 0 (ALSpec, Algorithm 2; docs/protocol.md):

    1 qkv_rope_append            [pre_attention]   q; appends k, v; pushes k, v to the paired rank
    2 update_roles                                 roles, priorities and gates of layer l from the verdict on l - 1
    3 speculative attention      [is_sender]       A~ -> paired rank, early; A, dist2, norm2
    4 decide                     [is_sender]       verdict -> paired rank; own priority 0 (accept) or 2 (reject)
    5 receive_handover           [is_receiver]     waits for x, k, v and A~
    6 o_proj, all-reduce, norm   [o]               sender: only after a reject; receiver: on A~, stops early on a reject
    7 MLP, all-reduce, norm      [mlp]             pushes x of layer l + 1 to the paired rank

Shapes: B requests, L layers, R (dist2, norm2) pairs per request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from alspec.kernels.attention.dispatch import attend
from alspec.kernels.attention.recall import choose_recall_lists, take_recall_lists
from alspec.kernels.comm.pair_state import GATE_MLP, GATE_O, GATE_PRE_ATTENTION, PairState
from alspec.kernels.common.side_stream import SideStream
from alspec.kernels.speculation.handover import pair_spec_output, receive_handover, receive_residual
from alspec.kernels.speculation.roles import decide, step_barrier, update_roles
from alspec.runtime.decode.decoder import STEP_TIMEOUT_NS, TIMEOUT_NS, Decoder, LaunchContext, SpeculationState
from alspec.runtime.decode.hooks import OperationHook

__all__ = ["PairedDecoder"]


@dataclass
class PairedDecoder(Decoder):
    """A `Decoder` whose attention has a sender and a receiver, with gates around it."""

    speculation: SpeculationState
    pair: PairState
    sums: Tensor  # [B, R, 2] fp32: dist2 and norm2 of parts of heads, from the sender's attention
    # A receiver stops within a layer whose A~ is rejected, because each program of `reduce_norm` reads the verdict.
    # Off in host memory, because programs that read the same line there wait for each other.
    stops_early: bool

    first_timeout_ns: ClassVar[int] = TIMEOUT_NS  # `step_barrier` has waited for a late host

    def __post_init__(self) -> None:
        super().__post_init__()
        seq_lens = self.buffers.seq_lens
        self._side_stream = SideStream(seq_lens.device)
        # For the choice of the next lists, see `take_recall_lists`.
        self._next_half, self._kept_lens = seq_lens.new_zeros(1), torch.zeros_like(seq_lens)

    def begin(self, token_ids: list[int], seq_lens: list[int]) -> None:
        """Set tokens, lengths and roles, with empty recall lists. All ranks must have launched equally many steps."""
        super().begin(token_ids, seq_lens)
        self.pair.reset_roles()
        if self.speculation.recall is not None:
            self.speculation.recall.lists.fill_(-1)
            self.publish_lists()

    def next_lists(self) -> Tensor | None:
        """See `Decoder.next_lists`."""
        if self.speculation.recall is None:
            return None
        return self.pair.own.lists[int(self.exchange.epoch) % 2].clone()

    def publish_lists(self) -> None:
        """Put the recall lists where the next step takes them from."""
        if self.speculation.recall is not None:
            self.pair.own.lists.copy_(self.speculation.recall.lists)

    def embed(self) -> None:
        """Token embeddings into the residual stream, then a barrier of all ranks."""
        super().embed()
        step_barrier(self.pair, STEP_TIMEOUT_NS)
        if self.speculation.recall is not None:
            take_recall_lists(
                self.pair.own.lists, self.exchange.epoch, self.buffers.seq_lens, self.speculation.recall.lists,
                self._next_half, self._kept_lens,
            )  # fmt: skip

    def run_layers(self, operation: OperationHook) -> None:
        """Launch all layers as `Decoder` does, then give the right x to both groups."""
        super().run_layers(operation)
        with operation("agree", self.config.num_layers):
            self.finish_layers()

    def _launch_context(self, layer: int) -> LaunchContext:
        gate, inbox = self.pair.gate, self.pair.peer_inbox
        verdict = self.pair.own_verdict(layer) if self.stops_early else None
        return LaunchContext(
            self.exchange, self.all_reduce, gate(GATE_O), gate(GATE_MLP), gate(GATE_PRE_ATTENTION), verdict,
            inbox(layer), inbox(layer + 1),
        )  # fmt: skip

    def attention(self, layer: int) -> None:
        """Launch the roles, the attention, its verdict and the handover: lines 2 to 5 of the module's docstring."""
        buffers, cache, pair, speculation = self.buffers, self.cache, self.pair, self.speculation
        update_roles(pair, layer, speculation.hits, TIMEOUT_NS)
        spec_output = pair_spec_output(
            pair, layer, speculation.chunk_size, self.sums, speculation.recall_buffers(layer)
        )
        attend(
            buffers.q, cache.layers[layer], buffers.seq_lens, cache.sm_scale, cache.workspace(layer), buffers.attn_out,
            speculation.lse_out(layer, buffers.lse), spec_output, gate=pair.is_sender, prefetch_before_wait=True,
        )  # fmt: skip
        decide(
            pair, layer, self.sums, speculation.live, speculation.threshold, speculation.hits, TIMEOUT_NS,
            speculation.forced,
        )  # fmt: skip
        receive_handover(pair, layer, buffers.x, cache.layers[layer], buffers.seq_lens, buffers.attn_out, TIMEOUT_NS)

    def finish_layers(self) -> None:
        """Give the right x to both groups after the last layer."""
        buffers, pair = self.buffers, self.pair
        update_roles(pair, self.config.num_layers, self.speculation.hits, TIMEOUT_NS)
        receive_residual(pair, buffers.x, self.weights.final_norm, buffers.x_norm, buffers.square_sums, TIMEOUT_NS)

    def logits(self) -> None:
        """As `Decoder`; beside it, choose the recall lists of the next step for both ranks of the pair."""
        pair, recall = self.pair, self.speculation.recall
        if recall is not None:
            with self._side_stream.fork():
                choose_recall_lists(
                    recall, self._kept_lens, self.speculation.chunk_size, lists=pair.own.lists,
                    peer_lists=pair.paired.lists, senders=pair.senders, half=self._next_half,
                )  # fmt: skip
        super().logits()

    def end_step(self) -> None:
        """Let the next step follow the choice of its lists. It begins with an ordinary launch."""
        self._side_stream.join()
