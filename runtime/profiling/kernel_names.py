"""What the kernels of a decode step belong to, by their names in a trace."""

from __future__ import annotations

from typing import Any

__all__ = [
    "DECIDE",
    "MLP",
    "PACK",
    "PRE_ATTENTION",
    "SETTLE",
    "STEP_END",
    "UNPACK",
    "Row",
    "operation_of",
    "work_us",
]

Row = dict[str, Any]

PRE_ATTENTION = "qkv_rope_append"
MLP = "gate_up_silu"  # its first kernel
STEP_END = "finish_step"  # a step's last kernel
# Over collectives: ahead of a layer's fork, and the first one after the last layer; of a receiver; the sender's
# verdict, and what all ranks make of it.
PACK, UNPACK, DECIDE, SETTLE = "pack_kernel", "unpack_handover", "decide_kernel", "settle_kernel"
# Part of a kernel's name -> the operation that it belongs to.
_OPERATIONS = {
    "embed_norm": "embed",
    "meet_kernel": "embed",
    PRE_ATTENTION: "pre_attention",
    "take_turn": "handover",
    "unpack_": "handover",
    PACK: "predictor",
    "lean_": "full_attention",
    "turbo_decode": "full_attention",
    "turbo_merge": "full_attention",
    DECIDE: "verdict",
    SETTLE: "verdict",
    "receive_": "handover",
    "push_partial": "post_attention",
    "reduce_norm": "post_attention",
    MLP: "post_attention",
    "turbo_compact": "lm_head",
    "collect_logits": "lm_head",
    STEP_END: "lm_head",
}


def operation_of(kernel: str) -> str | None:
    """None for kernels that are not of this project (NCCL's, PyTorch's): they belong to the one before them."""
    return next((operation for part, operation in _OPERATIONS.items() if part in kernel), None)


def work_us(row: Row) -> float:
    """From a kernel's readiness to its end."""
    return float(row["end_us"] - max(row["start_us"], row["ready_us"]))
