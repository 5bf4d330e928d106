"""Map from kernel names in a trace to the operations of a decode step."""

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
MLP = "gate_up_silu"  # the first kernel of the MLP
STEP_END = "finish_step"  # the last kernel of a step
# Pairs over collectives. PACK: before the fork of each layer, and first after the last layer. UNPACK: the receiver's.
# DECIDE: the sender's verdict. APPLY_VERDICT: on all ranks.
PACK, UNPACK, DECIDE, APPLY_VERDICT = "pack_kernel", "unpack_handover", "decide_kernel", "apply_verdict_kernel"
# Part of a kernel's name -> its operation.
_OPERATIONS = {
    "embed_norm": "embed",
    "step_barrier": "embed",
    PRE_ATTENTION: "pre_attention",
    "norm_rope_append": "pre_attention",
    "update_roles": "handover",
    "unpack_": "handover",
    PACK: "predictor",
    "lean_": "full_attention",
    "quantised_decode": "full_attention",
    "quantised_combine": "full_attention",
    DECIDE: "verdict",
    APPLY_VERDICT: "verdict",
    "receive_": "handover",
    "push_partial": "post_attention",
    "reduce_norm": "post_attention",
    MLP: "post_attention",
    "kv_compact": "lm_head",
    "collect_logits": "lm_head",
    STEP_END: "lm_head",
}


def operation_of(kernel: str) -> str | None:
    """Operation of a kernel, or None for kernels of NCCL and PyTorch, which belong to the operation before them."""
    return next((operation for part, operation in _OPERATIONS.items() if part in kernel), None)


def work_us(row: Row) -> float:
    """Microseconds of work: from when the kernel was ready, or started if later, to its end."""
    return float(row["end_us"] - max(row["start_us"], row["ready_us"]))
