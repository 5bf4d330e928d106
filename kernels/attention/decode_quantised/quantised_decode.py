"""Launcher of lean (stream-K) decode attention over a quantised cache, with an optional speculative output A~.

As in lean_decode.py, a fixed grid takes equal runs of ragged work, a schedule is computed on the device, a second
launch combines the partials, and A~ over sink and window is computed and sent first. The differences:

- The unit of work is a *tile*: WARPS blocks of 64 tokens of one (request, KV head), one block for each warp. Each warp
  has its own online softmax. The warps are combined once, when the program leaves the head.
- A tile has the same cost with 4-bit and with 2-bit records of FlashQ, because both take about the same time: with 2
  bits the arithmetic on codes is the limit. The tail costs as much as one to three tiles. With speculation it is part
  of A~.
- A~ may come in two parts, the tail and the blocks (`quantised_spec_parts`). Where runs are short, two programs compute
  them in parallel. Recalled blocks are further parts.
- A program has four warps, and two programs share an SM. The four warps write one partial; they combine it through
  shared memory.
- Rows of a request, which a round verifies, read the same records. A *bundle* of them, up to the eight columns of an
  MMA, is one output (`quantised_rows_together`); further bundles read the records again, from the L2.

Files: block_schedule.py (schedule), quantised_mainloop.py (kernels), block_attention.py (a block), sides.py (what the
codecs of K and V add), tail_attention.py (the tail), kv_codec/formats.py (codecs and sizes).

Source: TurboAttention (Kang et al., 2024), sections 3 and 4, and the sources of lean_decode.py. The order of the
records, and q s_int and P as two bytes each, are ours.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from alspec.kernels.attention.decode.lean_decode import (
    MAX_RECALL_PARTS,
    PHASES,
    LeanWorkspace,
    Phase,
    SpecOutput,
    check_outputs,
    check_spec_output,
    launch_combine,
    num_recall_blocks,
    recall_options,
    recall_pointers,
)
from alspec.kernels.attention.decode_quantised.quantised_mainloop import (
    quantised_combine_kernel,
    quantised_decode_kernel,
)
from alspec.kernels.common.jit_launch import jit_launch, raise_smem_limit, set_l1_carveout
from alspec.kernels.common.limits import MAX_HEADS_PER_KV
from alspec.kernels.kv_codec.quantised_layer import BLOCK, HEAD_DIMS, QuantisedLayer
from alspec.sas import Softmax

__all__ = [
    "QuantisedSettings",
    "programs_of_rows",
    "quantised_decode_attention",
    "quantised_recall_parts",
    "quantised_rows_together",
    "quantised_settings",
    "quantised_spec_parts",
]

# Registers of a thread, for two programs on an SM. Without this limit ptxas takes only 168 and spills.
REGISTERS = 248
MAX_PARTS = 2  # parts of A~ over sink and window: the tail and the blocks


@dataclass(frozen=True)
class QuantisedSettings:
    """Launch settings of the attention kernel."""

    per_sm: int  # programs of one SM; the number of all programs is in the workspace
    num_warps: int  # warps of a program: 1, 2 or 4
    sm90: bool  # compute capability 9.0 or later: dependent launches, records loaded by bulk copies


raise_smem_limit(quantised_decode_kernel)

GPU_SETTINGS = QuantisedSettings(per_sm=2, num_warps=4, sm90=True)


@functools.cache
def quantised_settings(device: torch.device) -> QuantisedSettings:
    """Launch settings for a device."""
    if device.type != "cuda":
        return QuantisedSettings(per_sm=4, num_warps=1, sm90=False)
    return replace(GPU_SETTINGS, sm90=torch.cuda.get_device_capability(device) >= (9, 0))


def quantised_spec_parts(batch_size: int, heads_per_kv: int, device: torch.device) -> int:
    """Return the number of parts in which `A~` is sent: 1 or 2.

    With one request there are 2, so that the blocks do not wait for the tail. If runs are so long that one program
    would compute both parts, the device makes them one part. With more than 4 query heads per KV head, 2 parts would
    spill registers.
    """
    return MAX_PARTS if batch_size == 1 and heads_per_kv <= 4 and device.type == "cuda" else 1


def quantised_recall_parts(recall_blocks: int) -> int:
    """Number of partials over so many recalled blocks: two for each of the four warps of a program."""
    return min(-(-recall_blocks // 8), MAX_RECALL_PARTS)


def quantised_rows_together(
    heads_per_kv: int, rows: int, softmax: Softmax = "exact", sliding_window: int | None = None
) -> int:
    """Return how many rows of a request are computed together, so that a record is read and decoded once for them.

    An MMA has columns for so many. With a sliding window or SAS it is one: each row has its own window or cutoff.
    """
    if sliding_window is not None or softmax == "sas":
        return 1
    return max(1, min(rows, MAX_HEADS_PER_KV // heads_per_kv))


def programs_of_rows(num_programs: int, outputs: int) -> int:
    """Return how many of `num_programs` programs compute several rows of each request.

    The bundles of rows of a request read the same records. With as many programs for each output, a bundle and a KV
    head, all read a record at about the same time, so that one read from memory serves them; uneven runs drift apart.
    Where that would leave more than a fifth of the programs out, runs are uneven.
    """
    left_out = num_programs % outputs
    return num_programs - left_out if 5 * left_out <= num_programs else num_programs


def schedule_sizes(batch_size: int, num_kv_heads: int, num_programs: int) -> dict[str, int]:
    """Return the constexpr arguments of the schedule's device code, by name.

    The heads of one request have equal work. So with one request, each head has its own programs and its own schedule.

    batch_size: requests, or bundles of rows.
    """
    outputs = batch_size * num_kv_heads
    per_head = batch_size == 1 and num_programs >= outputs
    return {
        "HKV": num_kv_heads,
        "OUTPUTS": outputs,
        "SCHEDULES": outputs if per_head else 1,
        "OUTPUTS_PAD": 1 if per_head else max(32, triton.next_power_of_2(outputs)),
        "PROGRAMS": num_programs,
    }


def quantised_decode_attention(
    q: Tensor,
    layer: QuantisedLayer,
    seq_lens: Tensor,
    sm_scale: float,
    workspace: LeanWorkspace,
    out: Tensor,
    lse: Tensor,
    speculation: SpecOutput | None = None,
    phase: Phase = "all",
    gate: Tensor | None = None,
    *,
    prefetch_before_wait: bool = False,
    after_join: bool = False,
    rows: int = 1,
    block_lse: Tensor | None = None,
    settings: QuantisedSettings | None = None,
) -> None:
    """Compute attention of one new token per request over its first `seq_lens` tokens in a quantised cache.

        o = softmax(sm_scale q K^T) V,   lse = log2 sum_t 2^(sm_scale log2(e) q.k_t),   K, V dequantised

    With `speculation`, `A~` over sink and window is written first; `dist2` and `norm2` are written with `A`.
    Oracles: `decode_attention_ref`, `speculative_decode_attention_ref`, on the dequantised cache. If values are stored
    rotated, so are o and `A~`.

    With `layer.softmax == "sas"`, weights follow `alspec/sas.py`, relative to the largest score that the warp has seen
    so far; o and `lse` use the same weights. The kernel computes each request's cutoff from its length at every launch.
    At most `DROPPED_MASS` of a row is dropped; this also holds for `A~`, which has fewer tokens.

    Args:
        q: [B, Hq, D] bf16, fp16 or fp32, contiguous, 16-byte aligned, absolute values below 2^100; D 64 or 128, at most
            8 query heads per KV head.
        layer: the cache; read only. Tokens in front of its sliding window are not read. `bits` and `offset` are read
            before the wait for the previous kernel, in every kind of launch: no kernel that may still run may write
            them. Only the prompt writes them.
        seq_lens: [B] int32 on the device, 1 .. 64 NB + 63; read by the kernel, so a captured launch serves any lengths.
        sm_scale: softmax scale.
        workspace: of this shape.
        out: [B, Hq, D].
        lse: [B, Hq] fp32, base 2.
        speculation: where `A~` and its sums go; None: no speculation.
        phase, gate: as for `lean_decode_attention`.
        prefetch_before_wait, after_join: as for `lean_decode_attention`; the newest token is in the tail.
        rows: R rows of each request, without speculation: the cache has B / R requests, whose rows are neighbours in
            q and seq_lens, in the same block of 64 tokens. `quantised_rows_together` of them make a bundle, at most.
        block_lse: without speculation [B / R bundles, Hkv, NB, 4, rows of a bundle Hq / Hkv] fp32: written as
            `RecallBuffers.block_lse`, the heads of one row of a bundle after another.
        settings: replaces `quantised_settings(device)`.
    Raises:
        ValueError: shape, dtype or layout, naming the argument.
    Capture: graph-safe; allocates nothing. From compute capability 9.0 on, both launches are programmatic dependent
        launches, except those `after_join` and the combine of a `rest`.
    """
    batch_size, num_qo_heads, head_dim = q.shape
    num_kv_heads = layer.num_kv_heads
    _check(q, layer, seq_lens, speculation, phase, rows)
    together = quantised_rows_together(num_qo_heads // num_kv_heads, rows, layer.softmax, layer.sliding_window)
    check_outputs(q, num_kv_heads, workspace, out, lse, block_lse, rows, together)
    num_bundles = batch_size // rows * -(-rows // together)
    settings = settings or quantised_settings(q.device)
    warps, spec = settings.num_warps, speculation
    if warps not in (1, 2, 4):
        raise ValueError(f"settings: expected 1, 2 or 4 warps, found {warps}")
    pdl = settings.sm90 and not after_join
    num_programs = workspace.num_programs
    options: dict[str, Any] = {
        "HEADS_PER_KV": together * num_qo_heads // num_kv_heads,
        "D": head_dim,
        "ROWS": rows,
        "TOGETHER": together,
        **schedule_sizes(num_bundles, num_kv_heads, num_programs),
        "WARPS": warps,
        "SPEC": spec is not None,
        "SPEC_PARTS": spec.parts if spec else 1,
        **recall_options(spec),
        "PHASE": PHASES[phase],
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }
    chunk_blocks = spec.chunk_size // BLOCK if spec else 0
    lists, weights = recall_pointers(spec, phase) if block_lse is None else (None, block_lse)
    compiled = jit_launch(quantised_decode_kernel, (num_programs,))(
        q,
        layer.words,
        layer.offset,
        layer.bits,
        layer.scales,
        layer.tail.view(torch.int32),
        layer.tail_scale,
        seq_lens,
        spec.spec_out if spec else None,
        spec.spec_lse if spec else None,
        spec.epoch if spec else None,
        workspace.o,
        workspace.lse,
        gate,
        lists,
        weights,
        layer.sliding_window,
        layer.num_blocks,
        num_recall_blocks(spec) if block_lse is None else block_lse.shape[2],
        sm_scale * math.log2(math.e),
        chunk_blocks,
        PER_SM=settings.per_sm if num_programs % settings.per_sm == 0 else 1,
        FORMAT=layer.format,
        SAS=layer.softmax == "sas",
        READ_LENGTHS_EARLY=pdl and prefetch_before_wait,
        BULK=settings.sm90,
        num_warps=warps,
        maxnreg=REGISTERS,
        **options,
    )
    set_l1_carveout(compiled, settings.per_sm)
    if phase == "predictor" and not options["RECALL"]:
        return
    scalars = (layer.sliding_window, chunk_blocks)
    num_columns = num_bundles * together * num_qo_heads
    launch_combine(
        quantised_combine_kernel, seq_lens, workspace, out, lse, spec, gate, scalars, head_dim, num_columns, options
    )


def _check(
    q: Tensor, layer: QuantisedLayer, seq_lens: Tensor, speculation: SpecOutput | None, phase: Phase, rows: int
) -> None:
    batch_size, num_qo_heads, head_dim = q.shape
    if head_dim not in HEAD_DIMS or head_dim != layer.head_dim:
        raise ValueError(
            f"head_dim: the quantised cache takes {HEAD_DIMS}, found {head_dim} and {layer.head_dim} (q and cache)"
        )
    if num_qo_heads % layer.num_kv_heads or num_qo_heads > MAX_HEADS_PER_KV * layer.num_kv_heads:
        raise ValueError(
            f"q: {num_qo_heads} heads, expected 1 to {MAX_HEADS_PER_KV} for each of {layer.num_kv_heads} KV heads"
        )
    if batch_size != layer.batch_size * rows or not q.is_contiguous():
        raise ValueError(f"q: expected {layer.batch_size * rows} contiguous requests, found {batch_size}")
    for name, tensor in (("q", q), ("words", layer.words)):
        if tensor.data_ptr() % 16:
            excess = tensor.data_ptr() % 16
            raise ValueError(f"{name}: expected to begin at a multiple of 16 bytes, found {excess} bytes after one")
    if seq_lens.dtype != torch.int32 or seq_lens.shape != (batch_size,):
        raise ValueError(f"seq_lens: expected [{batch_size}] int32, found {list(seq_lens.shape)} {seq_lens.dtype}")
    if speculation is not None and rows > 1:
        raise ValueError(f"rows: expected 1 with speculation, found {rows}")
    if speculation is None and phase != "all":
        raise ValueError(f"phase: {phase!r} needs speculation")
    if speculation is not None and speculation.chunk_size % BLOCK:
        raise ValueError(f"chunk_size: expected a multiple of {BLOCK}, found {speculation.chunk_size}")
    check_spec_output(speculation, q, layer.num_kv_heads, phase, MAX_PARTS)
