"""Lean (stream-K) decode attention; with speculation it writes `A~` early and the sums for the verdict.

1. A *lean tile* is `block_n` tokens of one (request, KV head), or 2 `block_n` where runs are long. All query heads of
   that KV head are in one product, so K and V are read once.
2. A fixed grid of programs takes equal contiguous runs of tiles of the ragged batch. The device computes the schedule
   and the tile length in closed form from `seq_lens`.
3. Each program writes a partial `(o, lse)` for each output in its run.
4. A second launch combines the partials in tile order. Most of its programs are resident before the first launch ends.
   No program waits for another, so there is no deadlock, and the result is bitwise reproducible.

With `chunk_size` (S), the attention over sink and window of each output is computed first, by one program or by several
(one part each). The result is `A~`. It is sent at once, and it is also a partial of the full output. In return, the run
of such a program is shorter. tile_schedule.py defines the vocabulary of the schedule (output, run, rest, leader, ...).
On Hopper, tiles are loaded as mainloop_sm90.py describes. Otherwise the compiler pipelines the loads
(mainloop_sm80.py).

Sources: Lean Attention (Sanovar et al., 2024), section 4; Attention-Level Speculation (Cai et al., 2025), Algorithm 3.
Own additions: a dependent launch combines, where the paper has a host block that waits; the schedule is on the device.
**(corrected)**: the inverse of the run formula gives the program that owns a tile, counts are ceilings, and the softmax
scale is applied.

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

from alspec.kernels.attention.decode.combine import COMBINE_REGISTERS, combine_sizes, num_sums, slices_per_program
from alspec.kernels.attention.decode.mainloop_sm80 import lean_combine_kernel, lean_decode_kernel
from alspec.kernels.attention.decode.mainloop_sm90 import lean_sm90_kernel
from alspec.kernels.attention.decode.tile_schedule import ALL, PREDICTOR, REST, extra_window_tiles, spec_block_n
from alspec.kernels.common.jit_launch import is_hopper, jit_launch, num_sms, set_l1_carveout
from alspec.kernels.common.limits import MAX_COLUMNS
from alspec.predictor import MAX_RECALL_BLOCKS

__all__ = [
    "MAX_RECALL_PARTS",
    "PHASES",
    "LeanWorkspace",
    "Phase",
    "RecallBuffers",
    "SpecOutput",
    "check_outputs",
    "check_row_lens",
    "check_spec_output",
    "lean_recall_parts",
    "num_recall_blocks",
    "recall_options",
    "recall_pointers",
    "spec_parts",
    "launch_combine",
    "lean_decode_attention",
]

Phase = Literal["all", "predictor", "rest"]
PHASES = {"all": ALL.value, "predictor": PREDICTOR.value, "rest": REST.value}

TILE_BYTES = 32768  # bytes of K, and of V, in one tile
# {block_n: tiles}: with more tiles than this in an average run, tiles are twice as long. Runs differ by one tile, which
# matters little if they are long.
LONG_RUN = {64: 3, 128: 16}
MAX_SPEC_PARTS = 5  # parts of `A~` over sink and window of an output
MAX_RECALL_PARTS = 8  # parts over its recalled blocks, of at most 32 blocks each
NUM_WARPS = 4  # one warp group: a product of at least 64 rows is then a Hopper matrix instruction


@dataclass(frozen=True)
class LeanWorkspace:
    """Scratch memory of `lean_decode_attention`: allocated once, used by the launches of one CUDA stream."""

    num_programs: int  # G
    # P = G + (1 + MAX_SPEC_PARTS + MAX_RECALL_PARTS) B Hkv partials: those of runs, then those of `A~`. D is rounded up
    # to a power of two. For several rows, B counts bundles and Hq the heads of all rows of one.
    o: Tensor  # [P, Hq / Hkv, D] fp32
    lse: Tensor  # [P, Hq / Hkv] fp32

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
        """Allocate the workspace for any `seq_lens`. A smaller `num_programs` leaves SMs free for other work."""
        shape = cls.shape(batch_size, num_qo_heads, num_kv_heads, head_dim, num_programs)
        return cls(num_programs, torch.empty(shape, device=device), torch.empty(shape[:2], device=device))

    @staticmethod
    def shape(
        batch_size: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, num_programs: int
    ) -> tuple[int, int, int]:
        """Shape of `o`.

        A run writes one partial for each output in it. All runs together write at most one partial per program and one
        per output. Each output also has the partials of `A~`.
        """
        num_partials = num_programs + (1 + MAX_SPEC_PARTS + MAX_RECALL_PARTS) * batch_size * num_kv_heads
        return num_partials, num_qo_heads // num_kv_heads, triton.next_power_of_2(head_dim)


@dataclass(frozen=True)
class RecallBuffers:
    """Recalled blocks of one layer, and what attention leaves to choose the next ones from."""

    lists: Tensor  # [B, Hkv, M] int32: blocks of 64 tokens between sink and window, ascending, then -1
    # [B, Hkv, NB, 4, Hq / Hkv] fp32, written for the blocks between sink and window: log2 of the weights of every 16
    # tokens, or of the whole block and three times -inf
    block_lse: Tensor
    parts: int  # partials over the blocks of a list, 1 .. MAX_RECALL_PARTS


@dataclass(frozen=True)
class SpecOutput:
    """Destination of the speculative output of a launch."""

    chunk_size: int  # S, a multiple of 64
    # [B, Hq, D]; may be the paired rank's mailbox. With `epoch` int64: fp32 values as LL packets (ll_packets.py).
    spec_out: Tensor
    sums: Tensor  # [B, R, 2] fp32, R = `num_sums`: dist2, norm2 of slices of heads; the verdict adds them up
    epoch: Tensor | None = None  # [1] int32
    # [P, B, Hq] int64 LL packets, or None. If given, `spec_out` is [P, B, Hq, D]: `A~` is P partials, each with its lse
    # (base 2), which the receiver combines. A partial without tokens has lse = -inf. With an epoch.
    spec_lse: Tensor | None = None
    recall: RecallBuffers | None = None  # `A~` also reads these blocks

    @property
    def recall_parts(self) -> int:
        """Number of partials over recalled blocks: the last ones of P."""
        return 0 if self.recall is None else self.recall.parts

    @property
    def parts(self) -> int:
        """Number of partials of `A~` over sink and window; 1 if `A~` is not sent in parts."""
        return 1 if self.spec_lse is None else self.spec_lse.shape[0] - self.recall_parts


def lean_recall_parts(recall_blocks: int) -> int:
    """Number of partials over so many recalled blocks: two tiles are in flight, so up to 16 blocks take one round."""
    return min(-(-recall_blocks // 2), MAX_RECALL_PARTS)


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
    after_join: bool = False,
    row_lens: Tensor | None = None,
    block_lse: Tensor | None = None,
    sliding_window: int | None = None,
) -> None:
    """Compute attention of one new token per request over its first `seq_lens` cached tokens; or of several rows.

        o = softmax(sm_scale q K^T) V,   lse = log2 sum_t 2^(sm_scale log2(e) q.k_t)

    With `speculation`, `A~` over sink, window and recalled blocks is written first, then `A` and the sums of their
    distance.
    Oracles: `decode_attention_ref`, `speculative_decode_attention_ref`.

    Args:
        q: [B, Hq, D] bf16, fp16 or fp32, contiguous.  k_cache, v_cache: [B, Hkv, N, D] in q's dtype, contiguous.
        seq_lens: [B] int32 on the device, 1 .. N; the kernel reads it, so a captured launch serves any lengths.
        workspace: allocated for these shapes.  out: [B, Hq, D], contiguous.  lse: [B, Hq] fp32, base 2, contiguous.
        phase: with speculation, `predictor` writes only `A~`; `rest`, launched next on the same workspace, writes `A`.
            With recalled blocks, `A~` is written by a combine launch, which overwrites `lse`.
        gate: [1] int32; 0 skips everything.
        prefetch_before_wait: True if the previous kernel, and any other kernel still running when this one starts,
            writes only these inputs of this launch: q, the newest token of each request, and the gate. The kernel then
            reads the lengths before it waits for the previous kernel. Without speculation and gate it also fetches its
            first tiles.
        after_join: this launch may be the first one after two streams joined. Neither it nor its combine is a dependent
            launch then: a dependent launch waits for one kernel only.
        row_lens: [B, R] int32, without speculation: q, out and lse are [B R, ...], and row r of a request sees its
            first `row_lens[r]` tokens, 1 .. `seq_lens`. K and V are read once for all rows; R Hq / Hkv is at most
            MAX_COLUMNS.
        block_lse: [B, Hkv, NB, 4, R Hq / Hkv] fp32, without speculation: written as `RecallBuffers.block_lse`, for all
            blocks but the newest two; rows first, then query heads.
        sliding_window: W, a token attends to the newest W tokens up to itself; None: to all. Of what lies in front of
            them only a part of a tile is read, and masked: its values are finite. From each row to the next, lengths
            then grow by at most 1.
    Raises:
        ValueError: shape, dtype or layout, naming the argument.
    Capture: graph-safe; allocates nothing. From compute capability 9.0 on, the launches are programmatic dependent
        launches: they start while the previous kernel ends and wait for its results. Exceptions are launches
        `after_join` and the combine of a `rest`.
    """
    rows = 1 if row_lens is None else row_lens.shape[1]
    _check(q, k_cache, v_cache, seq_lens, speculation, phase, row_lens)
    check_outputs(q, k_cache.shape[1], workspace, out, lse, block_lse, rows, rows)
    (num_rows, num_qo_heads, head_dim), num_kv_heads = q.shape, k_cache.shape[1]
    batch_size, columns = num_rows // rows, rows * num_qo_heads // num_kv_heads
    heads_pad = triton.next_power_of_2(columns)
    width = triton.next_power_of_2(head_dim)
    use_tma = _uses_tma(q.device, columns, head_dim, q.dtype, rows)
    block_n, long_run, num_stages, pdl = _settings(q.device, width * q.itemsize, use_tma)
    block_n, long_run = _tile_of(block_n, long_run, heads_pad, rows == 1 or (use_tma and heads_pad == 32))
    pdl = pdl and not after_join
    spec = speculation
    options: dict[str, Any] = {
        "HKV": num_kv_heads,
        "HEADS_PER_KV": columns,
        "D": width,
        "HEAD_DIM": head_dim,
        "ROWS": rows,
        "PROGRAMS": workspace.num_programs,
        "B_PAD": _pad_batch(batch_size),
        "BLOCK_N": block_n,
        "LONG": long_run,
        "SPEC": spec is not None,
        "SPEC_PARTS": spec.parts if spec else 1,
        **recall_options(spec),
        "PHASE": PHASES[phase],
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }
    scalars = (sliding_window, batch_size, spec.chunk_size if spec else 0)
    # A program that computes an output of a batch alone writes the result itself.
    results = (out, lse) if use_tma and batch_size > 1 and spec is None else (None, None)
    if use_tma:
        kernel = lean_sm90_kernel
        inputs = (*_tma_descriptors(k_cache, v_cache, width, block_n, long_run > 0), seq_lens, *results)
    else:
        kernel, inputs = lean_decode_kernel, (k_cache, v_cache, k_cache.shape[2], seq_lens)
    lists, weights = recall_pointers(spec, phase) if block_lse is None else (None, block_lse)
    jit_launch(kernel, (workspace.num_programs,))(
        q, *inputs, spec.spec_out if spec else None, spec.spec_lse if spec else None,
        spec.epoch if spec else None, workspace.o, workspace.lse, gate, lists, weights, row_lens, *scalars,
        num_recall_blocks(spec) if block_lse is None else block_lse.shape[2], sm_scale * math.log2(math.e),
        HEADS_PAD=max(8 if use_tma else 16, heads_pad), STAGES=num_stages,
        READ_LENGTHS_EARLY=pdl and prefetch_before_wait, num_warps=NUM_WARPS, **options,
    )  # fmt: skip
    if phase != "predictor" or options["RECALL"]:
        options |= {
            "WHOLE": results[0] is not None,
            "SLICES_PER_PROGRAM": slices_per_program(num_rows, num_qo_heads, head_dim),
        }
        launch_combine(
            lean_combine_kernel, seq_lens, workspace, out, lse, spec, gate, scalars, head_dim, lse.numel(), options
        )  # fmt: skip


def recall_options(speculation: SpecOutput | None) -> dict[str, int]:
    """Launch options of recalled blocks, for the attention and the combine kernel of any codec."""
    if speculation is None or speculation.recall is None:
        return {"RECALL": 0, "RECALL_PARTS": 0}
    return {"RECALL": speculation.recall.lists.shape[-1], "RECALL_PARTS": speculation.recall_parts}


def recall_pointers(speculation: SpecOutput | None, phase: Phase) -> tuple[Tensor | None, Tensor | None]:
    """What an attention kernel of any codec reads and writes of recalled blocks: lists, and block_lse with a rest."""
    if speculation is None or speculation.recall is None:
        return None, None
    return speculation.recall.lists, None if phase == "predictor" else speculation.recall.block_lse


def num_recall_blocks(speculation: SpecOutput | None) -> int:
    """NB of `block_lse`; 0 without recalled blocks."""
    return 0 if speculation is None or speculation.recall is None else speculation.recall.block_lse.shape[2]


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    speculation: SpecOutput | None,
    phase: Phase,
    row_lens: Tensor | None,
) -> None:
    """Raise ValueError if `lean_decode_attention` has no kernel for these arguments."""
    (_, num_qo_heads, head_dim), (batch_size, num_kv_heads, capacity) = q.shape, k_cache.shape[:3]
    rows = 1 if row_lens is None else row_lens.shape[1]
    if row_lens is not None:
        check_row_lens(row_lens, batch_size, num_qo_heads // num_kv_heads, speculation)
    if q.shape[0] != batch_size * rows:
        raise ValueError(f"q: expected {batch_size * rows} rows, found {q.shape[0]}")
    if not (q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("q, k_cache, v_cache: expected contiguous tensors")
    if seq_lens.dtype != torch.int32 or seq_lens.shape != (batch_size,):
        raise ValueError(f"seq_lens: expected [{batch_size}] int32, found {list(seq_lens.shape)} {seq_lens.dtype}")
    if speculation is None and phase != "all":
        raise ValueError(f"phase: {phase!r} needs speculation")
    if num_qo_heads % num_kv_heads:
        raise ValueError(f"q: {num_qo_heads} heads are not a multiple of {num_kv_heads} KV heads")
    if capacity * head_dim >= 2**31:
        raise ValueError(f"k_cache: {capacity} tokens of one head overflow 32-bit offsets")
    expected = (batch_size, num_kv_heads, capacity, head_dim)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape != expected or cache.dtype != q.dtype:
            found = f"{list(cache.shape)} {cache.dtype}"
            raise ValueError(f"{name}: expected {list(expected)} {q.dtype}, as q has, found {found}")
    check_spec_output(speculation, q, num_kv_heads, phase, MAX_SPEC_PARTS)


def check_row_lens(row_lens: Tensor, batch_size: int, heads_per_kv: int, speculation: SpecOutput | None) -> None:
    """Raise ValueError if `row_lens` does not fit a batch, or if rows come with speculation."""
    if row_lens.dtype != torch.int32 or row_lens.shape[0] != batch_size or not row_lens.is_contiguous():
        raise ValueError(f"row_lens: expected [{batch_size}, R] int32, found {list(row_lens.shape)} {row_lens.dtype}")
    if row_lens.shape[1] * heads_per_kv > MAX_COLUMNS:
        raise ValueError(f"row_lens: expected at most {MAX_COLUMNS // heads_per_kv} rows, found {row_lens.shape[1]}")
    if speculation is not None:
        raise ValueError("row_lens: expected no speculation")


def check_outputs(
    q: Tensor,
    num_kv_heads: int,
    workspace: LeanWorkspace,
    out: Tensor,
    lse: Tensor,
    block_lse: Tensor | None,
    rows: int,
    together: int,
) -> None:
    """Raise ValueError if `out`, `lse`, `block_lse` or the workspace does not fit the attention of q [B rows, Hq, D].

    together: rows of a request that make an output, at most.
    """
    num_rows, num_qo_heads, head_dim = q.shape
    if out.shape != q.shape or not out.is_contiguous():
        raise ValueError(f"out: expected {list(q.shape)}, contiguous, found {list(out.shape)}")
    if lse.shape != q.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous():
        raise ValueError(f"lse: expected {list(q.shape[:2])} fp32, contiguous, found {list(lse.shape)} {lse.dtype}")
    bundles = num_rows // rows * -(-rows // together)
    expected = LeanWorkspace.shape(bundles, together * num_qo_heads, num_kv_heads, head_dim, workspace.num_programs)
    if workspace.o.shape != expected:
        raise ValueError(f"workspace: expected partials {list(expected)}, found {list(workspace.o.shape)}")
    if block_lse is not None:
        fits = [bundles, num_kv_heads, block_lse.shape[2], 4, together * num_qo_heads // num_kv_heads]
        if list(block_lse.shape) != fits or not block_lse.is_contiguous():
            raise ValueError(f"block_lse: expected {fits}, contiguous, found {list(block_lse.shape)}")


def check_spec_output(
    speculation: SpecOutput | None, q: Tensor, num_kv_heads: int, phase: Phase, max_parts: int
) -> None:
    """Raise ValueError if the buffers of `speculation` do not fit the attention of q [B, Hq, D]; None is valid.

    max_parts: parts over sink and window.
    """
    if speculation is None:
        return
    batch_size, num_qo_heads, _ = q.shape
    expected = (batch_size, num_sums(*q.shape), 2)
    if speculation.sums.shape != expected:
        raise ValueError(f"sums: expected {list(expected)}, found {list(speculation.sums.shape)}")
    recall, parts = speculation.recall, speculation.parts
    if recall is not None:
        count, blocks = recall.lists.shape[-1], recall.block_lse.shape[-3]
        if not 1 <= count <= MAX_RECALL_BLOCKS or recall.lists.shape != (batch_size, num_kv_heads, count):
            raise ValueError(
                f"lists: expected [{batch_size}, {num_kv_heads}, 1 .. {MAX_RECALL_BLOCKS}], "
                f"found {list(recall.lists.shape)}"
            )
        if recall.block_lse.shape != (batch_size, num_kv_heads, blocks, 4, num_qo_heads // num_kv_heads):
            raise ValueError(f"block_lse: expected B, Hkv, NB, 4, Hq / Hkv, found {list(recall.block_lse.shape)}")
        if not 1 <= recall.parts <= min(count, MAX_RECALL_PARTS) or recall.parts * 32 < count:
            raise ValueError(
                f"recall: expected 1 to {MAX_RECALL_PARTS} parts of 32 blocks at most, found {recall.parts}"
            )
    in_parts = speculation.spec_lse is not None
    if (parts > 1 and batch_size > 1) or not 1 <= parts <= max_parts:
        raise ValueError(f"spec_lse: expected {max_parts} parts at most, and one for several requests, found {parts}")
    if in_parts and (phase != "all" or speculation.epoch is None):
        raise ValueError("spec_lse: expected an epoch and phase 'all'")
    if recall is not None and phase == "all" and not in_parts:
        raise ValueError("spec_lse: expected with recalled blocks in phase 'all', found None")
    total = parts + speculation.recall_parts
    if in_parts and total > 1 and speculation.spec_out.shape != (total, *q.shape):
        raise ValueError(f"spec_out: expected {[total, *q.shape]}, found {list(speculation.spec_out.shape)}")


def launch_combine(
    kernel: Any,
    seq_lens: Tensor,
    workspace: LeanWorkspace,
    out: Tensor,
    lse: Tensor,
    speculation: SpecOutput | None,
    gate: Tensor | None,
    scalars: tuple[int | None, ...],
    head_dim: int,
    num_columns: int,
    options: dict[str, Any],
) -> None:
    """Launch the combine after the attention launch, for any codec: writes `out`, `lse` and the sums from the partials.

    In phase `predictor` it writes `spec_out` instead of `out`.

    Args:
        kernel: the combine kernel of the codec.
        num_columns: columns of all outputs: query heads of all rows, and of rows that repeat the last one of a request.
        scalars, options: further arguments and launch options of the combine kernel, as in the attention launch. With
            an option SLICES_PER_PROGRAM a program combines as many slices, one after another; otherwise one.
        Others as for `lean_decode_attention`.
    """
    if options["PHASE"] == PHASES["predictor"]:
        assert speculation is not None
        out = speculation.spec_out
    if options["PHASE"] == PHASES["rest"]:
        # Not a dependent launch. Its programs would wait on the SMs that are left free for messages, and would set
        # these SMs to a large L1. Then the messages could not start before attention has ended.
        options = {name: value for name, value in options.items() if name != "launch_pdl"} | {"PDL": False}
    batch_size, num_qo_heads = lse.shape
    programs_per_head = workspace.num_programs * options["HEADS_PER_KV"] // num_columns
    slice_width, num_slices, round_size = combine_sizes(batch_size, num_qo_heads, head_dim, programs_per_head)
    num_programs = triton.cdiv(num_columns * num_slices, options.get("SLICES_PER_PROGRAM", 1))
    compiled = jit_launch(kernel, (num_programs,))(
        seq_lens,
        workspace.o,
        workspace.lse,
        out,
        lse,
        speculation.sums if speculation else None,
        gate,
        *scalars,
        SLICE=slice_width,
        SLICES=num_slices,
        ROUND=round_size,
        num_warps=1,
        maxnreg=COMBINE_REGISTERS,
        # Several lanes may store the same sum, so its bits must agree: do not fuse products into additions.
        enable_fp_fusion=False,
        **options,
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
    """Number of parts in which `A~` is sent; 1 except for one request on Hopper.

    A part has one tile less than `num_stages` of `_settings`, but at least one. The number is limited so that enough
    programs remain for the rest, and so that combining the parts does not spill registers: at most 3 with more than 4
    query heads per KV head, 1 with more than 8. Other GPUs are not measured.
    """
    heads_per_kv = num_qo_heads // num_kv_heads
    if batch_size > 1 or heads_per_kv > 8 or not is_hopper(device):
        return 1
    width = triton.next_power_of_2(head_dim)
    use_tma = _uses_tma(device, heads_per_kv, head_dim, dtype)
    block_n, long_run, num_stages, _ = _settings(device, width * dtype.itemsize, use_tma)
    tokens, programs = int(spec_block_n(block_n, long_run)), num_sms(device)
    tiles = 2 * -(-chunk_size // tokens) + int(extra_window_tiles(tokens))
    wanted = -(-tiles // max(1, num_stages - 1))
    return max(1, min(wanted, MAX_SPEC_PARTS if heads_per_kv <= 4 else 3, programs // (3 * num_kv_heads)))


def _tile_of(block_n: int, long_run: int, heads_pad: int, is_wide: bool) -> tuple[int, int]:
    """Return block_n and long_run for so many columns: with larger tiles the softmax would spill registers.

    is_wide: tiles of more than 16 columns may have 128 tokens.
    """
    if heads_pad <= 16 or (is_wide and not long_run):
        return block_n, long_run
    return (min(128, 2 * block_n) if is_wide else min(64, block_n)), 0


def _pad_batch(batch_size: int) -> int:
    """Batch size padded for the kernel's sums over requests: 1, or a power of two of at least 32 (a warp).

    An integer sum over a whole warp is one instruction, and the compiler knows that its result is uniform. Addresses in
    loops bounded by it then stay in uniform registers, which saves a fifth of the instructions of a tile.
    """
    return 1 if batch_size == 1 else max(32, triton.next_power_of_2(batch_size))


def _uses_tma(device: torch.device, columns: int, head_dim: int, dtype: torch.dtype, rows: int = 1) -> bool:
    """True if mainloop_sm90.py serves the launch: Hopper, 16-bit elements, head_dim 33 to 256, <= 16 heads per KV head.

    With several rows, 64 columns are served up to head_dim 128.

    TMA needs rows of a multiple of 16 bytes. Rows of 32 channels or fewer do not fill a 128-byte line of shared memory.
    """
    if not is_hopper(device):
        return False
    most = 16 if rows == 1 or head_dim > 128 else MAX_COLUMNS
    return columns <= most and dtype.itemsize == 2 and 32 < head_dim <= 256 and head_dim % 8 == 0


def _tma_descriptors(
    k_cache: Tensor, v_cache: Tensor, width: int, block_n: int, has_long: bool
) -> tuple[TensorDescriptor, ...]:
    """TMA descriptors of K and V, [B Hkv, N, D]: (K, V) in short tiles, then (K, V) in long tiles."""
    batch_size, num_kv_heads, capacity, head_dim = k_cache.shape
    blocks = [[1, block_n, width], [1, 2 * block_n if has_long else block_n, width]]
    element_type = gl.bfloat16 if k_cache.dtype == torch.bfloat16 else gl.float16
    return tuple(
        TensorDescriptor(
            cache, [batch_size * num_kv_heads, capacity, head_dim], [capacity * head_dim, head_dim, 1], block,
            gl.NVMMASharedLayout.get_default_for(block, element_type),
        )
        for block in blocks for cache in (k_cache, v_cache)
    )  # fmt: skip


@functools.cache
def _settings(device: torch.device, row_bytes: int, use_tma: bool) -> tuple[int, int, int, bool]:
    """Return (block_n, long_run, num_stages, pdl) for a GPU and rows of `row_bytes`.

    - With TMA (mainloop_sm90.py), two tiles of 16 KB or 32 KB of K, and of V, are in flight on each SM. More tiles in
      flight only delay short contexts.
    - Without TMA, one program uses all shared memory of an SM. Two programs would write twice as many partials.
    - Tiles of more than 128 tokens, or of more than 64 with head_dim 128, divide short contexts unevenly. So tiles of
      twice the length are only for long contexts, and only if as many of them fit in flight.
    - So with head_dim 128, `block_n` is 64 on Hopper, and on the CPU as there.
    - On Blackwell more than 64 tokens spill registers. The settings for Blackwell are not measured.

    Returns:
        block_n: tokens in a tile.  num_stages: tiles in flight.
        long_run: with more tiles than this in an average run, tiles have 2 block_n tokens; 0: never.
        pdl: the launch is a dependent launch.
    """
    if use_tma:
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
        # Each stage holds K, V and q. The remainder is for reductions and transposes.
        shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in the stub
        room = shared_memory - 16384
        while block_n > 16 and room < 2 * (2 * block_n + 16) * row_bytes:
            block_n //= 2
        num_stages = max(1, min(2 if is_blackwell else 3, room // ((2 * block_n + 16) * row_bytes)))
        has_long = has_long and not is_blackwell and room >= num_stages * (4 * block_n + 16) * row_bytes
    if block_n == 128 and not has_long and halves:
        block_n, has_long = 64, True
    return block_n, (LONG_RUN[128 if block_n == 128 else 64] if has_long else 0), num_stages, pdl
