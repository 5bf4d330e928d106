"""RMSNorm of each query and key head, then RoPE and cache append: the second half of a QKV projection with such norms.

A norm needs a whole head, and the projection divides a head over many programs. So the projection stores its products
in fp32, and this kernel has a program for each head. Without norms it follows a product of the library.

Shapes: B requests, K hidden size, Hq and Hkv this rank's query and KV heads, D head_dim, N cache capacity.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from alspec.kernels.common.jit_launch import jit_launch, pdl_options, set_l1_carveout
from alspec.kernels.kv_codec.quantised_layer import PER_HEAD, QuantisedLayer
from alspec.kernels.linear.gemv_tile import rstd
from alspec.kernels.linear.projections import load_tail_scale, rows_of_requests, store_qkv

__all__ = ["norm_rope_append"]


@triton.jit(do_not_specialize_on_alignment=[*PER_HEAD, "inbox_ptr"])
def _norm_rope_append_kernel(
    raw_ptr,  # [B, (Hq + 2 Hkv) D] fp32
    q_norm_ptr,  # [D], or None: heads are not normalised
    k_norm_ptr,  # [D]
    rope_ptr,  # [B, 2, D / 2] fp32: cosine, sine at the new token's position
    seq_lens_ptr,  # [B] int32, with the new token
    q_ptr,  # [B, Hq, D]
    k_ptr,  # [B, Hkv, N, D]
    v_ptr,
    tail_ptr,  # [B, Hkv, 2, 64, D] int8, or None; with a tail N is 1
    tail_scale_ptr,  # [B, Hkv, 2] fp32
    gate_ptr,  # [1] int32 or None
    inbox_ptr,  # [B, K + 2 Hkv D] int64, the paired rank's, or None
    epoch_ptr,  # [1] int32
    capacity,
    eps,
    K: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HALF_PAD: tl.constexpr,
    RING: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one request: of q, k or v. Grid [Hq + 2 Hkv, B]."""
    HALF: tl.constexpr = D // 2
    head, request = tl.program_id(0), tl.program_id(1)
    channels = tl.arange(0, HALF_PAD)
    mask = channels < HALF
    if q_norm_ptr is not None:
        norm_ptrs = tl.where(head < HQ, q_norm_ptr, k_norm_ptr) + channels  # unused for v
        norm_first = tl.load(norm_ptrs, mask=mask, other=0.0).to(tl.float32)
        norm_second = tl.load(norm_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        # Not before the wait, as in the projection: attention reads lengths and older tokens as soon as it starts.
        gdc_launch_dependents()
    if gate_ptr is not None:
        if tl.load(gate_ptr, volatile=True) == 0:
            return
    row = request + tl.zeros_like(channels)
    ptrs = raw_ptr + (row * (HQ + 2 * HKV) + head) * D + channels
    first, second = tl.load(ptrs, mask=mask, other=0.0), tl.load(ptrs + HALF, mask=mask, other=0.0)
    if q_norm_ptr is not None:
        if head < HQ + HKV:
            scale = rstd(tl.sum(first * first + second * second, 0) / D, eps)
            first *= scale * norm_first
            second *= scale * norm_second
    tail_scale = load_tail_scale(tail_scale_ptr, row, head, HQ, HKV, 1, ROWS, mask)
    store_qkv(
        first, second, row, head, channels, rope_ptr, seq_lens_ptr, q_ptr, k_ptr, v_ptr, tail_ptr, tail_scale,
        inbox_ptr, epoch_ptr, capacity, K, HQ, HKV, D, HALF, RING, ROWS, mask,
    )  # fmt: skip


def norm_rope_append(
    raw: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    rope: Tensor,
    seq_lens: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    hidden_size: int,
    eps: float,
    gate: Tensor | None = None,
    layer: QuantisedLayer | None = None,
    inbox: Tensor | None = None,
    epoch: Tensor | None = None,
    is_ring: bool = False,
) -> None:
    """RMSNorm of each query and key head, RoPE, and append of k and v to the cache. Oracle: `qkv_rope_append_ref`.

        q_h, k_h = y_h / sqrt(mean(y_h^2) + eps) * norm, rotated;  cache[seq_len - 1] = k, v

    Args:
        raw: [B, (Hq + 2 Hkv) D] fp32, of `qkv_rope_append`.
        q_norm, k_norm: [D], both or none.
        hidden_size: K, packets of an inbox before the new keys.
        Others as `qkv_rope_append`.
    Capture: graph-safe; allocates nothing.
    """
    (batch_size, num_qo_heads, head_dim), (num_kv_heads, capacity) = q.shape, k_cache.shape[1:3]
    compiled = jit_launch(_norm_rope_append_kernel, (num_qo_heads + 2 * num_kv_heads, batch_size))(
        raw, q_norm, k_norm, rope, seq_lens, q, k_cache, v_cache, None if layer is None else layer.tail,
        None if layer is None else layer.tail_scale, gate, inbox, None if inbox is None else epoch, capacity, eps,
        K=hidden_size, HQ=num_qo_heads, HKV=num_kv_heads, D=head_dim, HALF_PAD=triton.next_power_of_2(head_dim // 2),
        RING=is_ring, ROWS=rows_of_requests(batch_size, k_cache, layer), num_warps=1, **pdl_options(q.device),
    )  # fmt: skip
    set_l1_carveout(compiled)
