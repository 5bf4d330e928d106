"""Map from kernel names in a trace to the operations of a decode step."""

from __future__ import annotations

from typing import Any

__all__ = [
    "BESIDE",
    "LIBRARY_PRODUCTS",
    "PRE_ATTENTION",
    "STEP_END",
    "Row",
    "operation_of",
    "work_us",
]

Row = dict[str, Any]

PRE_ATTENTION = "qkv_rope_append"
STEP_END = "finish_step"  # the last kernel of a step
# Part of a kernel's name -> its operation.
_OPERATIONS = {
    "embed_norm": "embed",
    "step_barrier": "embed",
    PRE_ATTENTION: "pre_attention",
    "norm_rope_append": "pre_attention",
    "_scale_kernel": "pre_attention",
    "update_roles": "handover",
    "choose_x": "handover",
    "await_ending": "handover",
    "replace_newest": "handover",
    "take_recall_lists": "embed",
    "choose_recall_lists": "lists",
    "note_arrival": "message",
    "Broadcast": "message",  # NCCL's kernels of the link
    "lean_": "full_attention",
    "quantised_decode": "full_attention",
    "quantised_combine": "full_attention",
    "decide_kernel": "verdict",
    "receive_": "handover",
    "push_partial": "post_attention",
    "_push_products": "post_attention",
    "reduce_norm": "post_attention",
    "gate_up_silu": "post_attention",
    "_silu_kernel": "post_attention",
    "kv_compact": "lm_head",
    "collect_logits": "lm_head",
    STEP_END: "lm_head",
}


BESIDE = ("lists", "message")  # operations on streams of their own: no other kernel of a step waits for their end
# The kernels that end a product of the library, which is in front of them (kernels/linear/gemm_products.py).
LIBRARY_PRODUCTS = ("_scale_kernel", "_silu_kernel", "_push_products")


def operation_of(kernel: str) -> str | None:
    """Operation of a kernel; None for a kernel of NCCL or PyTorch, which belongs to the operation beside it."""
    return next((operation for part, operation in _OPERATIONS.items() if part in kernel), None)


def work_us(row: Row) -> float:
    """Microseconds of work: from when the kernel was ready, or started if later, to its end."""
    return float(row["end_us"] - max(row["start_us"], row["ready_us"]))
