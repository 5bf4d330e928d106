"""Kernels of a pair over a link as the profiler exports them, from a simulation that knows what each side did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CLOSED_US", "LINK_US", "WORK_US", "LinkedJob"]

CLOSED_US, LINK_US = 0.5, 90.0
WORK_US = {
    "_embed_norm_kernel": 3.0, "_qkv_rope_append_kernel": 9.0, "lean_decode_kernel": 90.0, "lean_predictor_kernel": 8.0,
    "_decide_kernel": 3.0, "_receive_residual_kernel": 2.0, "_choose_x_kernel": 2.5, "_push_partial_kernel": 10.0,
    "_reduce_norm_kernel": 3.0, "_gate_up_silu_kernel": 34.0, "_collect_logits_kernel": 40.0,
    "_finish_step_kernel": 2.0, "_await_ending_kernel": 1.0,
}  # fmt: skip
POST = (
    "_push_partial_kernel", "_reduce_norm_kernel", "_gate_up_silu_kernel", "_push_partial_kernel", "_reduce_norm_kernel"
)  # fmt: skip


@dataclass
class Side:
    """One group; all of its ranks do the same at the same time."""

    now: float = 0.0
    layer: int = 0
    base: int = 0
    is_right: bool = True  # x is that of the verifier
    sent: list[tuple[float, int]] = field(default_factory=list)  # when each message arrives, and its header
    taken: list[bool] = field(default_factory=list)
    lost: list[bool] = field(default_factory=list)


class LinkedJob:
    """Steps of `tp_size` ranks a group; `rows` are those of `kernel_rows`, `steps` what happened in each step."""

    def __init__(self, tp_size: int, link_us: float = LINK_US, lead: int = 1000) -> None:
        self.rows: list[list[dict[str, Any]]] = [[] for _ in range(2 * tp_size)]
        self.steps: list[tuple[Side, Side]] = []
        self.step_us: list[float] = []
        self._tp_size, self._link_us, self._lead = tp_size, link_us, lead
        self._ended = [0.0, 0.0]  # when each side ended the last step

    def _row(self, group: int, name: str, start: float, end: float, stream: int = 7) -> None:
        for rank in range(group * self._tp_size, (group + 1) * self._tp_size):
            row = {"kernel": name, "stream": stream, "step": len(self.steps) + 1, "start_us": start, "end_us": end}
            self.rows[rank].append(row)

    def _launch(self, side: Side, group: int, name: str, is_open: bool = True, until: float = 0.0) -> None:
        end = max(side.now + (WORK_US[name] if is_open else CLOSED_US), until)
        self._row(group, name, side.now - 0.125, end)
        side.now = end

    def _send(self, side: Side, header: int) -> None:
        side.sent.append((side.now + self._link_us, header))

    def step(self, hits: list[int]) -> None:
        """One step with these verdicts."""
        verifier, speculator = map(Side, self._ended)
        for group, side in enumerate((verifier, speculator)):
            self._launch(side, group, "_embed_norm_kernel")
        rejected = -1
        while verifier.layer < len(hits) or speculator.layer < len(hits):
            waits = self._speculator_waits(speculator, verifier)
            if speculator.layer < len(hits) and not waits and speculator.now <= verifier.now:
                self._speculate(speculator, verifier, hits)
            elif verifier.layer < len(hits):
                rejected = self._verify(verifier, speculator, hits, rejected)
            else:
                self._speculate(speculator, verifier, hits)
        self._end(verifier, speculator, rejected)

    def _speculator_waits(self, own: Side, other: Side) -> bool:
        if len(other.sent) <= own.layer - self._lead:
            return True
        return own.layer > 0 and self._takes(own, other) and len(other.sent) <= own.layer

    def _chooses_at(self, own: Side, other: Side) -> float:
        """When it may begin the layer: message `layer - lead` has arrived."""
        due = own.layer - self._lead
        return own.now if due < 0 else max(own.now, other.sent[due][0])

    def _takes(self, own: Side, other: Side) -> bool:
        arrived = [header for at, header in other.sent if at <= self._chooses_at(own, other)]
        return bool(arrived) and arrived[-1] >= own.base

    def _verify(self, own: Side, other: Side, hits: list[int], rejected: int) -> int:
        layer, hit = own.layer, bool(hits[own.layer])
        self._launch(own, 0, "_qkv_rope_append_kernel")
        self._send(own, rejected)
        self._launch(own, 0, "lean_decode_kernel")
        has_arrived = len(other.sent) > layer and other.sent[layer][0] <= own.now
        takes = hit and has_arrived and other.sent[layer][1] > rejected
        if takes:
            assert not other.lost[layer], "a wrong x was taken"
        self._launch(own, 0, "_decide_kernel")
        self._launch(own, 0, "lean_predictor_kernel", hit and not takes)
        self._launch(own, 0, "_receive_residual_kernel", takes)
        for name in POST:
            self._launch(own, 0, name, not takes)
        own.taken.append(takes)
        own.layer += 1
        return rejected if hit else layer

    def _speculate(self, own: Side, other: Side, hits: list[int]) -> None:
        layer = own.layer
        if layer:
            takes = self._takes(own, other)
            until = max(self._chooses_at(own, other) + 0.25, other.sent[layer][0] if takes else 0.0)
            self._launch(own, 1, "_choose_x_kernel", until=until)
            self._launch(own, 1, "_receive_residual_kernel", takes)
            own.base, own.is_right = (layer, True) if takes else (own.base, own.is_right)
            own.taken.append(takes)
        else:
            own.taken.append(False)
        self._launch(own, 1, "_qkv_rope_append_kernel")
        self._launch(own, 1, "lean_predictor_kernel")
        for name in POST:
            self._launch(own, 1, name)
        own.is_right = own.is_right and bool(hits[layer])
        own.lost.append(not own.is_right)
        self._send(own, own.base)
        own.layer += 1

    def _end(self, verifier: Side, speculator: Side, rejected: int) -> None:
        self._send(verifier, rejected)
        self._launch(speculator, 1, "_choose_x_kernel", until=verifier.sent[-1][0])
        self._launch(speculator, 1, "_receive_residual_kernel")
        self._send(verifier, 0)  # verdicts and lists
        for group, side in enumerate((verifier, speculator)):
            self._launch(side, group, "_collect_logits_kernel")
            if group:
                self._launch(side, group, "_await_ending_kernel", until=verifier.sent[-1][0])
            self._launch(side, group, "_finish_step_kernel")
        for group, sent in ((0, speculator.sent), (1, verifier.sent)):
            before = self._ended[group]
            for at, _ in sent:  # NCCL's kernel waits for the message
                self._row(group, "ncclDevKernel_Broadcast_RING_LL", before, at, 20)
                self._row(group, "_note_arrival_kernel", at, at + 0.5, 20)
                before = at + 0.5
        self.step_us.append(verifier.now - self._ended[0])
        self._ended = [verifier.now, speculator.now]
        self.steps.append((verifier, speculator))
        for rows in self.rows:
            rows.sort(key=lambda row: (row["step"], row["start_us"]))
