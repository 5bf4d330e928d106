"""What the kernels of a decode step belong to, by their names in a trace."""

from __future__ import annotations

from typing import Any

__all__ = [
    "DECIDE",
    "MLP",
    "PACK",
    "PRE_ATTENTION",
    "APPLY_VERDICT",
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
PACK, UNPACK, DECIDE, APPLY_VERDICT = "pack_kernel", "unpack_handover", "decide_kernel", "apply_verdict_kernel"
# Part of a kernel's name -> the operation that it belongs to.
_OPERATIONS = {
    "embed_norm": "embed",
    "step_barrier": "embed",
    PRE_ATTENTION: "pre_attention",
    "update_roles": "handover",
    "unpack_": "handover",
    PACK: "predictor",
    "lean_": "full_attention",
    "flashq_decode": "full_attention",
    "flashq_combine": "full_attention",
    DECIDE: "verdict",
    APPLY_VERDICT: "verdict",
    "receive_": "handover",
    "push_partial": "post_attention",
    "reduce_norm": "post_attention",
    MLP: "post_attention",
    "flashq_compact": "lm_head",
    "collect_logits": "lm_head",
    STEP_END: "lm_head",
}


def operation_of(kernel: str) -> str | None:
    """None for kernels that are not of this project (NCCL's, PyTorch's): they belong to the one before them."""
    return next((operation for part, operation in _OPERATIONS.items() if part in kernel), None)


def work_us(row: Row) -> float:
    """From a kernel's readiness to its end."""
    return float(row["end_us"] - max(row["start_us"], row["ready_us"]))
