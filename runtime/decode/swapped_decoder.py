"""The decode step of two paired groups that talk by collectives; kernels: `kernels/speculation/swap.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alspec.kernels.attention.decode.lean_decode import Phase
from alspec.kernels.speculation.swap import (
    Swap,
    apply_verdict,
    decide,
    pack_handover,
    pack_residual,
    unpack_handover,
    unpack_residual,
)
from alspec.runtime.decode.decoder import TIMEOUT_NS, Branch, Decoder
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.decode.paired_decoder import SpeculationState

__all__ = ["SPARE_SMS", "SwappedDecoder"]

# Left free by attention for the kernels of those beside it: it takes more than half of the shared memory of an SM that
# it runs on, for several requests nearly all. Over a quantised cache it takes nearly all registers instead, and its
# small programs spread over all SMs: there a collective waits for some of them to end.
SPARE_SMS = 4


@dataclass
class SwappedDecoder(Decoder):
    """A `Decoder` in branches: between a fork and a join, what a receiver does on one stream lies beside what a sender
    does on another, and its verdict travels on a third. Every rank launches all, and skips what is not its own.
    """

    pairing: SpeculationState
    swap: Swap

    first_timeout_ns: ClassVar[int] = TIMEOUT_NS  # of no use: over collectives no kernel of ours waits
    spare_sms: ClassVar[int] = SPARE_SMS

    @property
    def stream_priority(self) -> int:
        """Urgent where a group has several ranks: there the main branch's all-reduces run even where it is closed, and
        the launches between them must not wait for SMs beside the open branch. Of one rank, it ends before that.
        """
        return -1 if self.exchange.tp_size > 1 else 0

    def run_layers(self, operation: OperationHook) -> None:
        """As `Decoder`, with a layer's pre-attention in both branches of the layer before; then both groups agree."""
        with operation("pre_attention", 0):
            # Both groups begin a step with the right x, and the one that sends first goes on with it.
            is_sender = self.swap.gates(0).is_sender
            self.pre_attention(0, Branch(self.exchange, self.all_reduce, pre_attention_gate=is_sender))
        for layer in range(self.config.num_layers):
            self._run_layer(layer, operation)
        with operation("agree", self.config.num_layers):
            self.finish_layers()

    def _run_layer(self, layer: int, operation: OperationHook) -> None:
        """From attention to the next pre-attention. Source: Attention-Level SpecOutput, Algorithm 2."""
        at, cache, swap, pairing = self.buffers, self._cache, self.swap, self.pairing
        calls, gates = swap.calls, swap.gates(layer)
        with operation("predictor", layer):
            self.attention(layer, "predictor")
            pack_handover(swap, layer, at.x, *cache.newest(layer))
        with swap.fork("spec"):
            with operation("handover", layer):
                calls.swap_spec_branch(swap.boxes)
                unpack_handover(swap, layer, at.x, cache.layers[layer], at.seq_lens, at.attn_out)
            self._go_on(
                layer, Branch(swap.spec_branch, calls.all_reduce_spec_branch, *(gates.is_receiver,) * 3), operation
            )
        with operation("full_attention", layer):
            self.attention(layer, "rest")
        with operation("verdict", layer):
            calls.gather_sums(swap.sums)
            decide(swap, layer, pairing.live, pairing.threshold, pairing.forced)
        with swap.fork("verdict"), operation("verdict", layer):
            calls.gather_verdicts(swap.verdicts)
            apply_verdict(swap, layer, pairing.hits)
        self._go_on(layer, Branch(self.exchange, self.all_reduce, *(gates.recompute,) * 3), operation)
        swap.join()

    def attention(self, layer: int, phase: Phase = "all") -> None:
        """The sender's; its `predictor` phase leaves `A~` in the box."""
        at, swap = self.buffers, self.swap
        speculation = swap.spec_output(self.pairing.chunk_size)
        self._cache.attend(layer, at.q, at.attn_out, at.lse, speculation, phase, swap.gates(layer).is_sender)

    def _go_on(self, layer: int, branch: Branch, operation: OperationHook) -> None:
        with operation("post_attention", layer):
            self.post_attention(layer, branch)
        if layer + 1 < self.config.num_layers:
            with operation("pre_attention", layer + 1):
                self.pre_attention(layer + 1, branch)

    def finish_layers(self) -> None:
        """After the last layer: the right x in both groups."""
        at, swap = self.buffers, self.swap
        pack_residual(swap, at.x)
        swap.calls.swap_spec_branch(swap.residuals)
        unpack_residual(swap, at.x, self.weights.final_norm, at.x_norm, at.square_sums)
        swap.next_step()
