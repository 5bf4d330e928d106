"""The decode step of two paired groups over collectives; its kernels: kernels/speculation/collective_handover.py.

A collective cannot be skipped on one rank, so both ranks of a pair always exchange a handover, and a layer has three
branches: the receiver's work on `A~`, the sender's work on `A`, and the gather of the verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from alspec.kernels.attention.decode.lean_decode import Phase
from alspec.kernels.attention.dispatch import attend
from alspec.kernels.attention.recall import RecallState, choose_recall_lists
from alspec.kernels.speculation.collective_handover import (
    CollectiveHandover,
    apply_verdict,
    decide,
    pack_handover,
    pack_residual,
    unpack_handover,
    unpack_residual,
)
from alspec.runtime.decode.decoder import TIMEOUT_NS, Decoder, LaunchContext, SpeculationState
from alspec.runtime.decode.hooks import OperationHook

__all__ = ["SPARE_SMS", "CollectiveDecoder"]

# SMs that attention leaves free for the other branches, because it takes most of the shared memory of its SMs. Over a
# quantised cache attention has small programs on every SM, and a collective waits until some of them have ended.
SPARE_SMS = 4


@dataclass
class CollectiveDecoder(Decoder):
    """A `Decoder` with three branches between a fork and a join, each on its own stream.

    The branches are the receiver's work, the sender's work, and the verdict. Every rank launches all branches and skips
    the work of the other role.
    """

    speculation: SpeculationState
    handover: CollectiveHandover

    first_timeout_ns: ClassVar[int] = TIMEOUT_NS  # unused: over collectives, none of these kernels waits
    spare_sms: ClassVar[int] = SPARE_SMS

    def begin(self, token_ids: list[int], seq_lens: list[int]) -> None:
        """As `Decoder`; no block is recalled yet."""
        super().begin(token_ids, seq_lens)
        if self.speculation.recall is not None:
            self.speculation.recall.lists.fill_(-1)

    @property
    def stream_priority(self) -> int:
        """Priority -1 (urgent) if a group has several ranks, else 0.

        With several ranks, the main branch runs its all-reduces even if its gates are closed. The launches between them
        must not wait for SMs that the spec branch holds.
        """
        return -1 if self.exchange.tp_size > 1 else 0

    def run_layers(self, operation: OperationHook) -> None:
        """As `Decoder`, but the previous layer's branches run pre-attention. At the end both groups get the right x."""
        with operation("pre_attention", 0):
            # Both groups begin a step with the right x; only the first sender needs q, k and v.
            is_sender = self.handover.gates(0).is_sender
            self.pre_attention(0, LaunchContext(self.exchange, self.all_reduce, pre_attention_gate=is_sender))
        for layer in range(self.config.num_layers):
            self._run_layer(layer, operation)
        with operation("agree", self.config.num_layers):
            self.finish_layers()

    def _run_layer(self, layer: int, operation: OperationHook) -> None:
        """Launch one layer, from attention to the next pre-attention. Source: ALSpec, Algorithm 2."""
        buffers, cache, handover, speculation = self.buffers, self.cache, self.handover, self.speculation
        calls, gates = handover.calls, handover.gates(layer)
        with operation("predictor", layer):
            self.attention(layer, "predictor")
            pack_handover(handover, layer, buffers.x, *cache.newest(layer))
        with handover.fork("spec"):
            with operation("handover", layer):
                calls.exchange_spec_branch(handover.handover_buffers)
                unpack_handover(handover, layer, buffers.x, cache.layers[layer], buffers.seq_lens, buffers.attn_out)
            self._post_and_next_pre_attention(
                layer,
                LaunchContext(handover.spec_branch, calls.all_reduce_spec_branch, *(gates.is_receiver,) * 3),
                operation,
            )
        with operation("full_attention", layer):
            self.attention(layer, "rest")
        with operation("verdict", layer):
            calls.gather_sums(handover.sums)
            decide(handover, layer, speculation.live, speculation.threshold, speculation.forced)
        with handover.fork("verdict"), operation("verdict", layer):
            calls.gather_verdicts(handover.verdicts)
            apply_verdict(handover, layer, speculation.hits)
        self._post_and_next_pre_attention(
            layer, LaunchContext(self.exchange, self.all_reduce, *(gates.recompute,) * 3), operation
        )
        handover.join()

    def attention(self, layer: int, phase: Phase = "all") -> None:
        """Launch the sender's attention. Its `predictor` phase writes `A~` into the handover buffer."""
        buffers, cache, handover, speculation = self.buffers, self.cache, self.handover, self.speculation
        attend(
            buffers.q, cache.layers[layer], buffers.seq_lens, cache.sm_scale, cache.workspace(layer), buffers.attn_out,
            speculation.lse_out(layer, buffers.lse),
            handover.spec_output(speculation.chunk_size, speculation.recall_buffers(layer)), phase,
            handover.gates(layer).is_sender,
        )  # fmt: skip

    def _post_and_next_pre_attention(self, layer: int, branch: LaunchContext, operation: OperationHook) -> None:
        with operation("post_attention", layer):
            self.post_attention(layer, branch)
        if layer + 1 < self.config.num_layers:
            with operation("pre_attention", layer + 1):
                self.pre_attention(layer + 1, branch)

    def finish_layers(self) -> None:
        """Give the right x to both groups after the last layer."""
        buffers, handover = self.buffers, self.handover
        if self.speculation.recall is not None:
            self._exchange_lists(self.speculation.recall)
        pack_residual(handover, buffers.x)
        handover.calls.exchange_spec_branch(handover.residuals)
        unpack_residual(handover, buffers.x, self.weights.final_norm, buffers.x_norm, buffers.square_sums)
        handover.next_step()

    def _exchange_lists(self, recall: RecallState) -> None:
        """Choose the recall lists of the next step; those of a layer come from the group that was its sender."""
        handover = self.handover
        choose_recall_lists(
            recall, self.buffers.seq_lens, self.speculation.chunk_size, lists=handover.lists[handover.group]
        )
        handover.calls.exchange_spec_branch(handover.lists)
        is_sender = handover.layer_senders()[:, None, None, None] != 0
        own, other = handover.lists[handover.group], handover.lists[1 - handover.group]
        torch.where(is_sender, own, other, out=recall.lists)
