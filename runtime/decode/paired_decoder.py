"""The decode step of two paired groups whose ranks send each other words.

All ranks launch the same list; words on the devices decide what each skips
(`kernels/speculation/roles.py`), and carry what the groups hand over (`kernels/speculation/handover.py`).

Shapes: B requests, L layers, R pairs of sums of a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from alspec.kernels.comm.pair_state import GATE_MLP, GATE_O, GATE_PRE_ATTENTION, PairState
from alspec.kernels.speculation.handover import pair_spec_output, receive_handover, receive_residual
from alspec.kernels.speculation.roles import decide, step_barrier, update_roles
from alspec.runtime.decode.decoder import STEP_TIMEOUT_NS, TIMEOUT_NS, Branch, Decoder
from alspec.runtime.decode.hooks import OperationHook

__all__ = ["PairedDecoder", "SpeculationState"]


@dataclass
class SpeculationState:
    """What is guessed and how guesses are judged, however the groups reach each other.

    Launches take `threshold` and `forced` as they are: when these change, a step is captured again.
    """

    threshold: float
    chunk_size: int
    hits: Tensor  # [L, B] int32: this step's verdicts, on every rank
    live: Tensor  # [B] int32: 1 while a request is generating
    forced: Tensor | None = None  # [L] int32: verdicts that do not look at the sums, for profiling


@dataclass
class PairedDecoder(Decoder):
    """A `Decoder` with attention for a sender and a receiver, and gates for what is around it."""

    pairing: SpeculationState
    pair: PairState
    sums: Tensor  # [B, R, 2] fp32: what the sender's attention leaves for the verdict
    # Whether a receiver stops within a layer whose guess is rejected: every program of `reduce_norm` looks for the
    # verdict. In the host's memory, programs that ask for one line wait for each other, a microsecond each.
    stops_early: bool

    first_timeout_ns: ClassVar[int] = TIMEOUT_NS  # `meet` has waited

    def begin(self, token_ids: list[int], seq_lens: list[int]) -> None:
        """Set the state, roles included: on every rank at the same place behind the steps in flight."""
        super().begin(token_ids, seq_lens)
        self.pair.reset_roles()

    def embed(self) -> None:
        """Token embeddings into the residual stream; then all ranks meet."""
        super().embed()
        step_barrier(self.pair, STEP_TIMEOUT_NS)

    def run_layers(self, operation: OperationHook) -> None:
        """As `Decoder`, and the end on which both groups agree."""
        super().run_layers(operation)
        with operation("agree", self.config.num_layers):
            self.finish_layers()

    def _branch(self, layer: int) -> Branch:
        gate, inbox = self.pair.gate, self.pair.inbox
        verdict = self.pair.verdict(layer) if self.stops_early else None
        return Branch(
            self.exchange, self.all_reduce, gate(GATE_O), gate(GATE_MLP), gate(GATE_PRE_ATTENTION), verdict,
            inbox(layer), inbox(layer + 1),
        )  # fmt: skip

    def attention(self, layer: int) -> None:
        """The sender attends, hands over its guess and decides; the receiver takes it and what was pushed before.

        Source: Attention-Level SpecOutput, Algorithm 2.
        """
        at, cache, pair, pairing = self.buffers, self._cache, self.pair, self.pairing
        # Both: this layer's roles, from the verdict on the layer before.
        update_roles(pair, layer, pairing.hits, TIMEOUT_NS)
        # The sender: attention, which sends `A~` to its pair on its way to `A`; the verdict.
        speculation = pair_spec_output(pair, layer, pairing.chunk_size, self.sums)
        cache.attend(layer, at.q, at.attn_out, at.lse, speculation, gate=pair.is_sender, prefetch_before_wait=True)
        decide(
            pair, layer, self.sums, pairing.live, pairing.threshold, pairing.hits, TIMEOUT_NS, pairing.forced
        )  # fmt: skip
        # The receiver: waits for all of that but the verdict.
        receive_handover(pair, layer, at.x, cache.layers[layer], at.seq_lens, at.attn_out, TIMEOUT_NS)

    def finish_layers(self) -> None:
        """After the last layer: the right x in both groups."""
        at, pair = self.buffers, self.pair
        update_roles(pair, self.config.num_layers, self.pairing.hits, TIMEOUT_NS)
        receive_residual(pair, at.x, self.weights.final_norm, at.x_norm, at.square_sums, TIMEOUT_NS)
