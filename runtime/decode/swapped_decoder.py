"""The decode step of two paired groups that only collectives connect; its kernels: kernels/speculation/swap.py.

A collective cannot be skipped on one rank, so both ranks of a pair always exchange a handover, and a layer has three
branches: the receiver's work on `A~`, the sender's own work, and the way of the verdict to all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alspec.kernels.attention.decode.lean_decode import Phase
from alspec.kernels.attention.dispatch import attend
from alspec.kernels.speculation.swap import (
    Swap,
    apply_verdict,
    decide,
    pack_handover,
    pack_residual,
    unpack_handover,
    unpack_residual,
)
from alspec.runtime.decode.decoder import TIMEOUT_NS, Branch, Decoder, SpeculationState
from alspec.runtime.decode.hooks import OperationHook

__all__ = ["SPARE_SMS", "SwappedDecoder"]

# SMs that attention leaves to the branches beside it, because it takes most of the shared memory of the SMs it runs on.
# Over a quantised cache its small programs take all registers of every SM: there a collective waits for some to end.
SPARE_SMS = 4


@dataclass
class SwappedDecoder(Decoder):
    """A `Decoder` in three branches between a fork and a join, each on a stream of its own: the receiver's work, the
    sender's, and the verdict. Every rank launches all of them and skips what is not its own.
    """

    speculation: SpeculationState
    swap: Swap

    first_timeout_ns: ClassVar[int] = TIMEOUT_NS  # unused: over collectives no kernel of ours waits
    spare_sms: ClassVar[int] = SPARE_SMS

    @property
    def stream_priority(self) -> int:
        """Urgent if a group has several ranks: then the main branch runs its all-reduces even where it is closed, and
        the launches between them must not wait for SMs that the open branch holds.
        """
        return -1 if self.exchange.tp_size > 1 else 0

    def run_layers(self, operation: OperationHook) -> None:
        """As `Decoder`, but a layer's pre-attention runs in the branches of the layer before; then x goes to both."""
        with operation("pre_attention", 0):
            # Both groups begin a step with the right x; only the first sender needs q, k and v.
            is_sender = self.swap.gates(0).is_sender
            self.pre_attention(0, Branch(self.exchange, self.all_reduce, pre_attention_gate=is_sender))
        for layer in range(self.config.num_layers):
            self._run_layer(layer, operation)
        with operation("agree", self.config.num_layers):
            self.finish_layers()

    def _run_layer(self, layer: int, operation: OperationHook) -> None:
        """From attention to the next pre-attention. Source: Attention-Level Speculation, Algorithm 2."""
        buffers, cache, swap, speculation = self.buffers, self.cache, self.swap, self.speculation
        calls, gates = swap.calls, swap.gates(layer)
        with operation("predictor", layer):
            self.attention(layer, "predictor")
            pack_handover(swap, layer, buffers.x, *cache.newest(layer))
        with swap.fork("spec"):
            with operation("handover", layer):
                calls.swap_spec_branch(swap.handover_buffers)
                unpack_handover(swap, layer, buffers.x, cache.layers[layer], buffers.seq_lens, buffers.attn_out)
            self._post_and_next_pre_attention(
                layer, Branch(swap.spec_branch, calls.all_reduce_spec_branch, *(gates.is_receiver,) * 3), operation
            )
        with operation("full_attention", layer):
            self.attention(layer, "rest")
        with operation("verdict", layer):
            calls.gather_sums(swap.sums)
            decide(swap, layer, speculation.live, speculation.threshold, speculation.forced)
        with swap.fork("verdict"), operation("verdict", layer):
            calls.gather_verdicts(swap.verdicts)
            apply_verdict(swap, layer, speculation.hits)
        self._post_and_next_pre_attention(
            layer, Branch(self.exchange, self.all_reduce, *(gates.recompute,) * 3), operation
        )
        swap.join()

    def attention(self, layer: int, phase: Phase = "all") -> None:
        """The sender's attention; its `predictor` phase leaves `A~` in the handover."""
        buffers, cache, swap = self.buffers, self.cache, self.swap
        attend(
            buffers.q, cache.layers[layer], buffers.seq_lens, cache.sm_scale, cache.workspace, buffers.attn_out,
            buffers.lse, swap.spec_output(self.speculation.chunk_size), phase, swap.gates(layer).is_sender,
        )  # fmt: skip

    def _post_and_next_pre_attention(self, layer: int, branch: Branch, operation: OperationHook) -> None:
        with operation("post_attention", layer):
            self.post_attention(layer, branch)
        if layer + 1 < self.config.num_layers:
            with operation("pre_attention", layer + 1):
                self.pre_attention(layer + 1, branch)

    def finish_layers(self) -> None:
        """After the last layer: the right x in both groups."""
        buffers, swap = self.buffers, self.swap
        pack_residual(swap, buffers.x)
        swap.calls.swap_spec_branch(swap.residuals)
        unpack_residual(swap, buffers.x, self.weights.final_norm, buffers.x_norm, buffers.square_sums)
        swap.next_step()
