"""Lean (stream-K) decode attention over the quantised cache, with the speculative output written first.

The method is that of lean_decode.py: a fixed grid takes runs of ragged work by a schedule computed on the device,
partials are merged by a second launch, and the guess over sink and window comes first. What differs:

- The unit of work is a *step*: as many blocks of 64 tokens of one (request, KV head) as a program has warps. Each warp
  has an online softmax of its own; they are merged when the program leaves the head.
- A step counts the same whether its records have 4 or 2 bits: measured, both take about as long, because with 2 bits
  the work on codes takes the time. A head's tail counts as one to three steps; with a guess it belongs to the guess.
- A guess may come in two parts, tail and blocks, for `flashq_spec_parts` places: where runs are short enough to keep
  them apart, they are the work of two programs.
- A program is four warps, two on an SM: one partial for all four, merged through shared memory.

Arithmetic: block_attention.py. Layout of the cache: layout.py. Sources: TurboAttention (Kang et al., 2024), sections
3 and 4; those of lean_decode.py. Ours are the order of records, and q `s_int` and P in two bytes.
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
    PHASES,
    LeanWorkspace,
    Phase,
    SpecOutput,
    check_outputs,
    check_spec_output,
    launch_combine,
)
from alspec.kernels.attention.decode_flashq.flashq_mainloop import flashq_combine_kernel, flashq_decode_kernel
from alspec.kernels.common.jit_launch import jit_launch, raise_smem_limit, set_l1_carveout
from alspec.kernels.kv_codec.flashq.layout import BLOCK, HEAD_DIMS, FlashQLayer

__all__ = ["MAX_HEADS_PER_KV", "FlashQSettings", "flashq_decode_attention", "flashq_spec_parts", "flashq_settings"]

# Of a thread, for two programs on an SM. Without a limit the assembler takes 168, as for three, and spills.
REGISTERS = 248
MAX_HEADS_PER_KV = 8  # query heads of a KV head: the columns of one product
MAX_PARTS = 2  # of a guess: the tail and the blocks


@dataclass(frozen=True)
class FlashQSettings:
    """How the kernel is launched."""

    per_sm: int  # programs of one SM: the workspace says how many there are in all
    num_warps: int  # of a program: 1, 2 or 4
    sm90: bool  # compute capability 9.0 or later: dependent launches, records by bulk copies


raise_smem_limit(flashq_decode_kernel)

GPU_SETTINGS = FlashQSettings(per_sm=2, num_warps=4, sm90=True)


@functools.cache
def flashq_settings(device: torch.device) -> FlashQSettings:
    """Settings for a device."""
    if device.type != "cuda":
        return FlashQSettings(per_sm=4, num_warps=1, sm90=False)
    return replace(GPU_SETTINGS, sm90=torch.cuda.get_device_capability(device) >= (9, 0))


def flashq_spec_parts(batch_size: int, heads_per_kv: int, device: torch.device) -> int:
    """In how many parts `A~` should leave: with one request two, so that blocks do not wait for the tail.

    Where runs are long, the device makes it one: then both would lie in one program. With more than 4 query heads to a
    KV head two spill registers.
    """
    return MAX_PARTS if batch_size == 1 and heads_per_kv <= 4 and device.type == "cuda" else 1


def schedule_sizes(batch_size: int, num_kv_heads: int, num_programs: int) -> dict[str, int]:
    """Constants of the schedule's device code, by name.

    Heads of one request are alike: each gets programs of its own, and a plan that is of one head.
    """
    outputs = batch_size * num_kv_heads
    apart = batch_size == 1 and num_programs >= outputs
    return {
        "HKV": num_kv_heads,
        "OUTPUTS": outputs,
        "SCHEDULES": outputs if apart else 1,
        "OUTPUTS_PAD": 1 if apart else max(32, triton.next_power_of_2(outputs)),
        "PROGRAMS": num_programs,
    }


def flashq_decode_attention(
    q: Tensor,
    layer: FlashQLayer,
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
    settings: FlashQSettings | None = None,
) -> None:
    """Attention of one new token for each request over its first `seq_lens` tokens in a quantised cache.

        o = softmax(sm_scale q K^T) V,   lse = log2 sum_t 2^(sm_scale log2(e) q.k_t),   K, V as dequantised

    With `speculation`, `A~` over sink and window is written first, and with `A` the sums of their distance.
    Oracles: `decode_attention_ref`, `speculative_decode_attention_ref`, on the dequantised cache.

    With softmax "sas" of the layer, the weights of tokens, relative to the maximum that a warp has seen so far, are
    those of `alspec/sas.py`; o and `lse` are of the same weights. The device computes each request's cutoff from its
    length at every launch: it drops at most `DROPPED_MASS` of a row, of `A~`'s too, which has fewer tokens.

    Args:
        q: [B, Hq, D] bf16, fp16 or fp32, contiguous, from a multiple of 16 bytes on, values below 2^100; D 64 or 128,
            at most 8 heads to a KV head.
        layer: the cache; read only. `bits` and `offset` are read before the wait for the kernel ahead, in every form of
            a launch: no kernel that may still be running may write them. Only a prompt does.
        seq_lens: [B] int32 on the device, 1 .. 64 NB + 63; read by the kernel, so a captured launch serves any.
        workspace: of this shape.  out: [B, Hq, D].  lse: [B, Hq] fp32, base 2.
        phase, gate: as for `lean_decode_attention`.
        prefetch_before_wait: as there; the newest token lies in the tail.
        settings: other than `flashq_settings(device)`.
    Raises:
        ValueError: shape, dtype or layout, naming the argument.
    Capture: graph-safe; allocates nothing. From compute capability 9.0 on programmatic dependent launches, but for a
        `predictor` and the merge of a `rest`.
    """
    batch_size, num_qo_heads, head_dim = q.shape
    num_kv_heads = layer.num_kv_heads
    _check(q, layer, seq_lens, speculation, phase)
    check_outputs(q, num_kv_heads, workspace, out, lse)
    heads_per_kv = num_qo_heads // num_kv_heads
    settings = settings or flashq_settings(q.device)
    warps, spec = settings.num_warps, speculation
    if warps not in (1, 2, 4):
        raise ValueError(f"settings: expected 1, 2 or 4 warps, found {warps}")
    # A predictor may be the first launch after two streams have joined; a dependent launch waits for one kernel only.
    pdl = settings.sm90 and phase != "predictor"
    num_programs = workspace.num_programs
    plan: dict[str, Any] = {
        "HEADS_PER_KV": heads_per_kv,
        "D": head_dim,
        **schedule_sizes(batch_size, num_kv_heads, num_programs),
        "WARPS": warps,
        "SPEC": spec is not None,
        "SPEC_PARTS": spec.parts if spec else 1,
        "PHASE": PHASES[phase],
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }
    chunk_blocks = spec.chunk_size // BLOCK if spec else 0
    compiled = jit_launch(flashq_decode_kernel, (num_programs,))(
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
        layer.num_blocks,
        sm_scale * math.log2(math.e),
        chunk_blocks,
        PER_SM=settings.per_sm if num_programs % settings.per_sm == 0 else 1,
        SAS=layer.softmax == "sas",
        EARLY=pdl and prefetch_before_wait,
        BULK=settings.sm90,
        num_warps=warps,
        maxnreg=REGISTERS,
        **plan,
    )
    set_l1_carveout(compiled, settings.per_sm)
    if phase == "predictor":
        return
    launch_combine(flashq_combine_kernel, seq_lens, workspace, out, lse, spec, gate, (chunk_blocks,), head_dim, plan)


def _check(q: Tensor, layer: FlashQLayer, seq_lens: Tensor, speculation: SpecOutput | None, phase: Phase) -> None:
    batch_size, num_qo_heads, head_dim = q.shape
    if head_dim not in HEAD_DIMS or head_dim != layer.head_dim:
        raise ValueError(f"head_dim: the quantised cache takes {HEAD_DIMS}, found {head_dim} and {layer.head_dim}")
    if num_qo_heads % layer.num_kv_heads or num_qo_heads > MAX_HEADS_PER_KV * layer.num_kv_heads:
        raise ValueError(
            f"q: {num_qo_heads} heads, expected 1 to {MAX_HEADS_PER_KV} for each of {layer.num_kv_heads} KV heads"
        )
    if batch_size != layer.batch_size or not q.is_contiguous():
        raise ValueError(f"q: expected {layer.batch_size} contiguous requests, found {batch_size}")
    for name, tensor in (("q", q), ("words", layer.words)):
        if tensor.data_ptr() % 16:
            beyond = tensor.data_ptr() % 16
            raise ValueError(f"{name}: expected to begin at a multiple of 16 bytes, found {beyond} beyond one")
    if seq_lens.dtype != torch.int32 or seq_lens.shape != (batch_size,):
        raise ValueError(f"seq_lens: expected [{batch_size}] int32, found {list(seq_lens.shape)} {seq_lens.dtype}")
    if speculation is None and phase != "all":
        raise ValueError(f"phase: {phase!r} needs speculation")
    if speculation is not None and speculation.chunk_size % BLOCK:
        raise ValueError(f"chunk_size: expected a multiple of {BLOCK}, found {speculation.chunk_size}")
    check_spec_output(speculation, q, phase, MAX_PARTS)
