"""Lean (stream-K) decode attention, with the speculative output written first when it is asked for.

A *lean tile* is `block_n` tokens of one (request, KV head), or twice as many where runs of them are long, with all
query heads of that KV head in one product, so that K and V are read once. A fixed grid of programs takes equal
contiguous runs of tiles over ragged work; the schedule, and which length tiles have, is computed on the device from
`seq_lens`, in closed form. Every program writes a partial `(o, lse)` for each output that its run meets. A second
launch, whose programs mostly lie on the SMs before the first has ended, merges them in tile order. No program waits for
another, so nothing can deadlock, and the result has the same bits every time.

With `chunk_size` (S) given, each output's sink and window are the first work of one program, or of several, a part
each. The result is `A~`, which leaves at once, and it is also one more partial of the full output. The program's run of
other tiles is that much shorter. The words of the schedule (output, run, rest, leader, ...) are in tile_schedule.py. On
Hopper, tiles of one request come as mainloop_sm90.py says; otherwise the compiler arranges their loads.

Sources: Lean Attention (Sanovar et al., 2024), section 4; Attention-Level SpecOutput (Cai et al., 2025), Algorithm 3.
The merge by a dependent launch instead of a host block that waits, and the device-side schedule, are ours.
**(corrected)**: the program that owns a tile comes from the inverse of the run formula, counts are ceilings, and the
softmax scale is applied.

Shapes: B requests, Hq query heads, Hkv KV heads, D head_dim, N cache capacity, G programs. `lse` is base 2.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from alspec.kernels.attention.decode.combine import COMBINE_REGISTERS, combine_sizes, num_sums
from alspec.kernels.attention.decode.mainloop_sm80 import lean_combine_kernel, lean_decode_kernel
from alspec.kernels.attention.decode.mainloop_sm90 import lean_sm90_kernel
from alspec.kernels.attention.decode.tile_schedule import ALL, PREDICTOR, REST, more_tiles, spec_tile
from alspec.kernels.common.jit_launch import is_hopper, jit_launch, num_sms, set_l1_carveout

__all__ = [
    "PHASES",
    "LeanWorkspace",
    "Phase",
    "SpecOutput",
    "check_outputs",
    "check_spec_output",
    "spec_parts",
    "launch_combine",
    "lean_decode_attention",
]

Phase = Literal["all", "predictor", "rest"]
PHASES = {"all": ALL.value, "predictor": PREDICTOR.value, "rest": REST.value}

TILE_BYTES = 32768  # of K, and of V, in one tile
# With more tiles of so many tokens in each run, tiles are twice as long: runs differ by one, which then matters little.
LONG_RUN = {64: 3, 128: 16}
MAX_SPEC_PARTS = 5  # of each output
NUM_WARPS = 4  # one warp group: a product of 64 rows or more is one Hopper matrix instruction


@dataclass(frozen=True)
class LeanWorkspace:
    """Scratch memory of `lean_decode_attention`, allocated once, for the launches of one CUDA stream."""

    num_programs: int  # G
    # Partials: slots of runs, then of guesses, G + (1 + MAX_SPEC_PARTS) B Hkv in all; D rounded up to a power of two.
    o: Tensor  # [slots, Hq / Hkv, D] fp32
    lse: Tensor  # [slots, Hq / Hkv] fp32

    @classmethod
    def allocate(
        cls,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_programs: int,
    ) -> LeanWorkspace:
        """Room for any `seq_lens`. A grid smaller than the device holds leaves part of it to other work."""
        shape = cls.shape(batch_size, num_qo_heads, num_kv_heads, head_dim, num_programs)
        return cls(num_programs, torch.empty(shape, device=device), torch.empty(shape[:2], device=device))

    @staticmethod
    def shape(
        batch_size: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, num_programs: int
    ) -> tuple[int, int, int]:
        """Of `o`.

        A run leaves a partial of each output that it meets: in all, one for each program and one more for each output
        at most. Each output also has those of its guess.
        """
        slots = num_programs + (1 + MAX_SPEC_PARTS) * batch_size * num_kv_heads
        return slots, num_qo_heads // num_kv_heads, triton.next_power_of_2(head_dim)


@dataclass(frozen=True)
class SpecOutput:
    """Where the speculative output of a launch goes."""

    chunk_size: int  # S, a multiple of 64
    # [B, Hq, D], may be the paired rank's mailbox; with `epoch` int64: fp32 values as packets (ll_packets.py)
    spec_out: Tensor
    sums: Tensor  # [B, R, 2] fp32, R as of `num_sums`: dist2, norm2 of parts of heads; the verdict is about their sums
    epoch: Tensor | None = None  # [1] int32
    # [P, B, Hq] int64, then `spec_out` is [P, B, Hq, D]: `A~` comes as P partials, each with its lse, base 2, which the
    # receiver merges; those without tokens have an lse of -inf. For one request, with an epoch.
    spec_lse: Tensor | None = None

    @property
    def parts(self) -> int:
        """P: partials in which `A~` comes, 1 if whole."""
        return 1 if self.spec_lse is None else self.spec_lse.shape[0]


def lean_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
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
) -> None:
    """Attention of one new token for each request over its first `seq_lens` cached tokens.

        o = softmax(sm_scale q K^T) V,   lse = log2 sum_t 2^(sm_scale log2(e) q.k_t)

    With `speculation`, `A~` over sink and window is written first, and with `A` the sums of their distance.
    Oracles: `decode_attention_ref`, `speculative_decode_attention_ref`.

    Args:
        q: [B, Hq, D] bf16, fp16 or fp32, contiguous.  k_cache, v_cache: [B, Hkv, N, D] in q's dtype, contiguous.
        seq_lens: [B] int32 on the device, 1 .. N; read by the kernel, so a captured launch serves any lengths.
        workspace: of this shape.  out: [B, Hq, D].  lse: [B, Hq] fp32, base 2.
        phase: with speculation, `predictor` writes `A~` only; `rest`, launched next on the same workspace, `A`.
        gate: [1] int32; 0 skips everything.
        prefetch_before_wait: a promise that the kernel ahead, and others that have not ended as it lets this one
            start, write nothing that this one reads but q, the newest token of each request and the gate. Then lengths
            are read and, without speculation and gate, first tiles fetched, before the kernel ahead has ended.
    Raises:
        ValueError: shape, dtype or layout, naming the argument.
    Capture: graph-safe; allocates nothing. From compute capability 9.0 on its launches are, but for a `predictor` and
        the merge of a `rest`, programmatic dependent ones, which start while the kernel before them ends and wait for
        its results.
    """
    _check(q, k_cache, v_cache, seq_lens, speculation, phase)
    check_outputs(q, k_cache.shape[1], workspace, out, lse)
    (batch_size, num_qo_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[1]
    heads_per_kv = num_qo_heads // num_kv_heads
    heads_pad = triton.next_power_of_2(heads_per_kv)
    width = triton.next_power_of_2(head_dim)
    copies = _by_copies(q.device, batch_size, heads_per_kv, head_dim, q.dtype)
    block_n, long_run, num_stages, pdl = _settings(q.device, width * q.itemsize, copies)
    if long_run and heads_pad > 16:  # then the softmax of more than 128 tokens spills registers
        block_n, long_run = min(128, 2 * block_n), 0
    # A predictor may be the first launch after two streams have joined; a dependent launch waits for one kernel only.
    pdl = pdl and phase != "predictor"
    spec = speculation
    plan: dict[str, Any] = {
        "HKV": num_kv_heads,
        "HEADS_PER_KV": heads_per_kv,
        "D": width,
        "HEAD_DIM": head_dim,
        "PROGRAMS": workspace.num_programs,
        "B_PAD": _padded(batch_size),
        "BLOCK_N": block_n,
        "LONG": long_run,
        "SPEC": spec is not None,
        "SPEC_PARTS": spec.parts if spec else 1,
        "PHASE": PHASES[phase],
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }
    numbers = (batch_size, spec.chunk_size if spec else 0)
    if copies:
        kernel, caches = lean_sm90_kernel, _descriptors(k_cache, v_cache, width, block_n, long_run > 0)
    else:
        kernel, caches = lean_decode_kernel, (k_cache, v_cache, k_cache.shape[2])
    jit_launch(kernel, (workspace.num_programs,))(
        q, *caches, seq_lens, spec.spec_out if spec else None, spec.spec_lse if spec else None,
        spec.epoch if spec else None, workspace.o, workspace.lse, gate, *numbers, sm_scale * math.log2(math.e),
        ROWS=max(8 if copies else 16, heads_pad), STAGES=num_stages,
        EARLY=pdl and prefetch_before_wait, num_warps=NUM_WARPS, **plan,
    )  # fmt: skip
    if phase != "predictor":
        launch_combine(lean_combine_kernel, seq_lens, workspace, out, lse, spec, gate, numbers, head_dim, plan)


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, speculation: SpecOutput | None, phase: Phase
) -> None:
    """Raise ValueError where `lean_decode_attention` has no kernel for its arguments."""
    (batch_size, num_qo_heads, head_dim), (num_kv_heads, capacity) = q.shape, k_cache.shape[1:3]
    if not (q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("q, k_cache, v_cache: expected contiguous tensors")
    if seq_lens.dtype != torch.int32 or seq_lens.shape != (batch_size,):
        raise ValueError(f"seq_lens: expected [{batch_size}] int32, found {list(seq_lens.shape)} {seq_lens.dtype}")
    if speculation is None and phase != "all":
        raise ValueError(f"phase: {phase!r} needs speculation")
    if num_qo_heads % num_kv_heads:
        raise ValueError(f"q: {num_qo_heads} heads are no multiple of {num_kv_heads} KV heads")
    if capacity * head_dim >= 2**31:
        raise ValueError(f"k_cache: {capacity} tokens of one head overflow 32-bit offsets")
    expected = (batch_size, num_kv_heads, capacity, head_dim)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape != expected or cache.dtype != q.dtype:
            found = f"{list(cache.shape)} {cache.dtype}"
            raise ValueError(f"{name}: expected {list(expected)} {q.dtype}, as q has, found {found}")
    check_spec_output(speculation, q, phase, MAX_SPEC_PARTS)


def check_outputs(q: Tensor, num_kv_heads: int, workspace: LeanWorkspace, out: Tensor, lse: Tensor) -> None:
    """Raise ValueError if what attention of q [B, Hq, D] leaves, partials too, has no place."""
    batch_size, num_qo_heads, head_dim = q.shape
    if out.shape != q.shape or not out.is_contiguous():
        raise ValueError(f"out: expected {list(q.shape)}, contiguous, found {list(out.shape)}")
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError(f"lse: expected {list(q.shape[:2])} fp32, contiguous, found {list(lse.shape)} {lse.dtype}")
    expected = LeanWorkspace.shape(batch_size, num_qo_heads, num_kv_heads, head_dim, workspace.num_programs)
    if workspace.o.shape != expected:
        raise ValueError(f"workspace: expected partials {list(expected)}, found {list(workspace.o.shape)}")


def check_spec_output(speculation: SpecOutput | None, q: Tensor, phase: Phase, most_parts: int) -> None:
    """Raise ValueError if attention of q [B, Hq, D] cannot write all that it should where a speculation has place."""
    if speculation is None:
        return
    expected = (q.shape[0], num_sums(q.shape[1], q.shape[2]), 2)
    if speculation.sums.shape != expected:
        raise ValueError(f"sums: expected {list(expected)}, found {list(speculation.sums.shape)}")
    parts = speculation.parts
    if parts > 1:
        if q.shape[0] > 1 or phase != "all" or speculation.epoch is None or parts > most_parts:
            raise ValueError(f"spec_lse: expected {most_parts} parts at most, of one request, as words, in one launch")
        if speculation.spec_out.shape != (parts, *q.shape):
            raise ValueError(f"spec_out: expected {[parts, *q.shape]}, found {list(speculation.spec_out.shape)}")


def launch_combine(
    kernel: Any,
    seq_lens: Tensor,
    workspace: LeanWorkspace,
    out: Tensor,
    lse: Tensor,
    speculation: SpecOutput | None,
    gate: Tensor | None,
    numbers: tuple[int, ...],
    head_dim: int,
    plan: dict[str, Any],
) -> None:
    """The second launch of decode attention over any cache: `out`, `lse` and sums, of what the first has left.

    Args:
        kernel: of the cache.  numbers, plan: its further arguments, those that the first launch had too.
        Others as for `lean_decode_attention`.
    """
    if plan["PHASE"] == PHASES["rest"]:
        # Not early: programs that wait on SMs which attention left to collectives, their memory split for L1, would
        # keep those away until attention has ended (a step of 1 + 1 GPUs at 128K tokens took 8.3 ms instead of 5.5).
        plan = {name: value for name, value in plan.items() if name != "launch_pdl"} | {"PDL": False}
    outputs = lse.numel() // plan["HEADS_PER_KV"]
    chunk, chunks, together = combine_sizes(lse.shape[1], head_dim, workspace.num_programs // outputs)
    compiled = jit_launch(kernel, (lse.numel() * chunks,))(
        seq_lens,
        workspace.o,
        workspace.lse,
        out,
        lse,
        speculation.sums if speculation else None,
        gate,
        *numbers,
        SLICE=chunk,
        SLICES=chunks,
        ROUND=together,
        num_warps=1,
        maxnreg=COMBINE_REGISTERS,
        # Lanes that hold the same sum may each store it: no product may be fused into one of their additions.
        enable_fp_fusion=False,
        **plan,
    )
    set_l1_carveout(compiled)


def spec_parts(
    chunk_size: int,
    batch_size: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """In how many parts `A~` should leave: each has a tile less than `_settings` has in flight, but one at least.

    By copies, two tiles in a part, as many as are asked for at once, took longer than one. One part with a batch; not
    so many that few programs are left for the rest, or that merging them spills registers: 3 with more than 4 query
    heads to a KV head, 1 with more than 8. On Hopper only: elsewhere nothing has been measured.
    """
    heads_per_kv = num_qo_heads // num_kv_heads
    if batch_size > 1 or heads_per_kv > 8 or not is_hopper(device):
        return 1
    width = triton.next_power_of_2(head_dim)
    copies = _by_copies(device, batch_size, heads_per_kv, head_dim, dtype)
    block_n, long_run, num_stages, _ = _settings(device, width * dtype.itemsize, copies)
    tokens, programs = int(spec_tile(block_n, long_run)), num_sms(device)
    tiles = 2 * -(-chunk_size // tokens) + int(more_tiles(tokens))
    wanted = -(-tiles // max(1, num_stages - 1))
    return max(1, min(wanted, MAX_SPEC_PARTS if heads_per_kv <= 4 else 3, programs // (3 * num_kv_heads)))


def _padded(batch_size: int) -> int:
    """Requests that the kernel sums over: 1, or at least a warp's 32.

    A sum of integers over a whole warp is one instruction, and the compiler knows its result to be the same in every
    thread: loops bounded by it keep their addresses in uniform registers, a fifth fewer instructions a tile.
    """
    return 1 if batch_size == 1 else max(32, triton.next_power_of_2(batch_size))


def _by_copies(device: torch.device, batch_size: int, heads_per_kv: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether mainloop_sm90.py streams the tiles: on Hopper, of one request, in 16 bits, of up to 256 channels.

    Copies need rows of a multiple of 16 bytes; of fewer than 33 channels, no rows fill a line of their slots.
    """
    if not is_hopper(device):
        return False
    return batch_size == 1 and heads_per_kv <= 16 and dtype.itemsize == 2 and 32 < head_dim <= 256 and head_dim % 8 == 0


def _descriptors(
    k_cache: Tensor, v_cache: Tensor, width: int, block_n: int, has_long: bool
) -> tuple[TensorDescriptor, ...]:
    """TMA descriptors of K and V of one request, [Hkv, N, D]: short tiles and long ones."""
    _, heads, capacity, head_dim = k_cache.shape
    blocks = [[1, block_n, width], [1, 2 * block_n if has_long else block_n, width]]
    kind = gl.bfloat16 if k_cache.dtype == torch.bfloat16 else gl.float16
    return tuple(
        TensorDescriptor(
            cache, [heads, capacity, head_dim], [capacity * head_dim, head_dim, 1], block,
            gl.NVMMASharedLayout.get_default_for(block, kind),
        )
        for block in blocks for cache in (k_cache, v_cache)
    )  # fmt: skip


@functools.cache
def _settings(device: torch.device, row_bytes: int, copies: bool) -> tuple[int, int, int, bool]:
    """Tokens in a tile; with how many tiles in each run they have twice as many, 0 for never; tiles in flight; whether
    to start before the last kernel ends.

    By copies (mainloop_sm90.py), two tiles of 16 KB or 32 KB of K, and of V, are on their way to each SM: with more,
    short contexts take longer and long ones as long (H200). As loads, one program on an SM with all its shared memory
    was faster at every length than two with half of it each: it leaves half the partials. More than 128 tokens in a
    tile, or more than 64 of heads of 128, make short contexts uneven (all measured on H200; so heads of 128 have 64 on
    Hopper alone): twice as many are for long contexts only, and only if as many tiles of them fit in flight. On
    Blackwell, where nothing has been measured, more than 64 spill registers.
    """
    if copies:
        block_n = max(64, TILE_BYTES // 2 // row_bytes)
        return block_n, (0 if 2 * block_n * row_bytes > TILE_BYTES else LONG_RUN[block_n]), 2, True
    block_n = max(16, min(128, TILE_BYTES // row_bytes))
    num_stages, is_blackwell, pdl, halves = 1, False, False, device.type != "cuda"
    has_long = 2 * block_n * row_bytes <= TILE_BYTES
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        is_blackwell, pdl, halves = properties.major >= 10, properties.major >= 9, properties.major == 9
        if is_blackwell:
            block_n = max(16, block_n // 2)
        # Beside the tiles: q with each of them, and room for reductions and transposes.
        shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in the stub
        room = shared_memory - 16384
        while block_n > 16 and room < 2 * (2 * block_n + 16) * row_bytes:
            block_n //= 2
        num_stages = max(1, min(2 if is_blackwell else 3, room // ((2 * block_n + 16) * row_bytes)))
        has_long = has_long and not is_blackwell and room >= num_stages * (4 * block_n + 16) * row_bytes
    if block_n == 128 and not has_long and halves:
        block_n, has_long = 64, True
    return block_n, (LONG_RUN[128 if block_n == 128 else 64] if has_long else 0), num_stages, pdl
