"""The seam of the four projections of a decode step: fused kernels, or the library for many rows."""

from __future__ import annotations

from alspec.kernels.linear import projections, push
from alspec.kernels.linear.gemm_products import GemmProducts

__all__ = ["FusedProducts", "Products"]


class FusedProducts:
    """The four projections of a step over up to `MAX_FUSED_ROWS` rows, each with what follows it in one launch."""

    qkv_rope_append = staticmethod(projections.qkv_rope_append)
    gate_up_silu = staticmethod(projections.gate_up_silu)
    push_partial = staticmethod(push.push_partial)
    lm_head = staticmethod(push.lm_head)


Products = FusedProducts | GemmProducts
