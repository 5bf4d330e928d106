"""Lean (stream-K) decode attention in one launch, with the speculative output written first when it is asked for.

A *lean tile* is `BLOCK_N` tokens of one (request, KV head), with all query heads of that KV head as the rows of one
product, so K and V are read once. A fixed grid of programs takes equal contiguous runs of tiles over ragged work; the
schedule is computed on the device from `seq_lens`. Every program writes a partial for each output it touched and takes
a ticket on it; the last one to arrive merges all partials, in tile order. Nobody waits, so nothing can deadlock, and
the result does not depend on who arrives last.

With `chunk_size` (S) given, the tiles of sink and window are handed out first, one to a program. The last arriver of
a head's speculative tiles writes `A~`; that partial then takes part in the full reduction like any other.

Sources: Lean Attention (Sanovar et al., 2024), section 4; Attention-Level Speculation (Cai et al., 2025), Algorithm 3.
The tickets instead of a host block that waits, and the device-side schedule, are ours. **(corrected)**: the program
that owns a tile comes from the inverse of the run formula, counts are ceilings, and the softmax scale is applied.

Shapes: B requests, Hq query heads, Hkv KV heads, D head_dim, N cache capacity, G programs. `lse` is base 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["LeanWorkspace", "Part", "Speculation", "lean_decode_attention"]

BLOCK_N = 64

Part = Literal["all", "predictor", "rest"]

# Which part of the work a launch does. In two launches, the first leaves `A~` and its partial for the second; a message
# to a paired rank whose memory cannot be addressed goes out between them.
ALL = tl.constexpr(0)
PREDICTOR = tl.constexpr(1)
REST = tl.constexpr(2)


@triton.jit
def _tile_range(seq_len, chunk_size, BLOCK_N: tl.constexpr, SPEC: tl.constexpr):
    """Tiles of one head: how many, sink tiles `[0, sink)`, first window tile; without speculation all are rest."""
    tiles = tl.cdiv(seq_len, BLOCK_N)
    if SPEC:
        sink = tl.minimum(chunk_size // BLOCK_N, tiles)
        window = tl.maximum(sink, tl.maximum(seq_len - chunk_size, 0) // BLOCK_N)
    else:
        sink = tl.zeros_like(tiles)
        window = tiles
    return tiles, sink, window


@triton.jit
def _attend_tiles(
    q,  # [ROWS, D]
    k_head_ptr,  # [N, D] of one (request, KV head)
    v_head_ptr,
    first_tile,
    last_tile,
    seq_len,
    head_dim,
    qk_scale,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over tiles `[first_tile, last_tile)`: unnormalised output, row maximum, row sum (base 2)."""
    channels = tl.arange(0, D)
    offsets = tl.arange(0, BLOCK_N)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
        tokens = tile * BLOCK_N + offsets
        at = tokens.to(tl.int64)[:, None] * head_dim + channels[None, :]
        inside = (tokens < seq_len)[:, None] & (channels < head_dim)[None, :]
        k = tl.load(k_head_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
        v = tl.load(v_head_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
        s = tl.where((tokens < seq_len)[None, :], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        p = tl.exp2(s - new_max[:, None])
        alpha = tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _store_partial(
    acc, row_max, row_sum, acc_ptr, ml_ptr, slot, ROWS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr
):
    """Write the `GROUP` real rows of a partial into its slot."""
    rows = tl.arange(0, ROWS)
    at = slot.to(tl.int64) * GROUP + rows
    real = rows < GROUP
    tl.store(acc_ptr + at[:, None] * D + tl.arange(0, D)[None, :], acc, mask=real[:, None])
    tl.store(ml_ptr + at * 2, row_max, mask=real)
    tl.store(ml_ptr + at * 2 + 1, row_sum, mask=real)


@triton.jit
def _arrive(counter_ptr, contributors):
    """Take a ticket; whether all contributors have come. The last one puts the counter back to 0."""
    # The ticket is taken by one thread: all threads' stores must come before it, and their loads after it.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == contributors - 1
    if is_last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return is_last


@triton.jit
def _merge_slots(
    acc_ptr,
    ml_ptr,
    first_slot,
    num_slots,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Merge slots `[first_slot, first_slot + num_slots)` in slot order; none gives (-inf, 0, 0).

        o = sum_s 2^(m_s - m) o_s,   l = sum_s 2^(m_s - m) l_s,   m = max_s m_s

    The loads of `MERGE` slots are issued together: their latency, not the arithmetic, is what this costs.

    Returns:
        m [GROUP_PAD], l [GROUP_PAD], o [GROUP_PAD, D] (not normalised).
    """
    rows = tl.arange(0, GROUP_PAD)
    at_row = first_slot.to(tl.int64) * GROUP + rows
    at_value = at_row[:, None] * D + tl.arange(0, D)[None, :]
    row_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D], tl.float32)
    for start in tl.range(0, num_slots, MERGE):
        maxima, sums, values = (), (), ()
        new_max = row_max
        for i in tl.static_range(MERGE):
            inside = (rows < GROUP) & (start + i < num_slots)
            at = (start + i) * GROUP
            # .cg: another SM wrote these, and L1 may hold older ones.
            m_s = tl.load(ml_ptr + (at_row + at) * 2, mask=inside, other=float("-inf"), cache_modifier=".cg")
            l_s = tl.load(ml_ptr + (at_row + at) * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
            o_s = tl.load(acc_ptr + at_value + at * D, mask=inside[:, None], other=0.0, cache_modifier=".cg")
            maxima, sums, values = maxima + (m_s,), sums + (l_s,), values + (o_s,)  # noqa: RUF005 (Triton has no *)
            new_max = tl.maximum(new_max, m_s)
        # Rows of padding stay at -inf; 0 avoids -inf - -inf there.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp2(row_max - base)
        row_sum = row_sum * alpha
        acc = acc * alpha[:, None]
        for i in tl.static_range(MERGE):
            weight = tl.exp2(maxima[i] - base)
            row_sum += weight * sums[i]
            acc += weight[:, None] * values[i]
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def _rest_start(program, programs, total_spec, total_rest, MIN_RUN: tl.constexpr):
    """First tile of a program's run over the rest; grows with `program`, from 0 to `total_rest`.

    Programs that took a speculative tile get as many fewer of the rest. With less than `MIN_RUN` tiles for each
    program, those without a speculative one take runs of about that many: one more partial costs as much as a tile.
    """
    total = total_spec + total_rest
    taken = (total_spec // programs) * program + tl.minimum(program, total_spec % programs)
    even = program * total // programs - taken
    plain = program * total_rest // programs
    active = tl.maximum(tl.cdiv(total_rest, MIN_RUN), 1)
    short = tl.minimum(tl.maximum(program - total_spec, 0), active) * total_rest // active
    is_short = total_spec + active <= programs
    start = tl.where(is_short, short, tl.where(total // programs >= tl.cdiv(total_spec, programs), even, plain))
    return tl.minimum(tl.maximum(start, 0), total_rest)


@triton.jit
def _locate(tile, tiles_end):
    """Request of a tile of the flattened work, and the tile's place in it; tiles_end: [B_PAD], cumulative."""
    before = tiles_end <= tile
    request = tl.sum(before.to(tl.int32), 0)
    return request, tile - tl.max(tl.where(before, tiles_end, 0), 0)


@triton.jit
def _store_output(
    row_max,  # [ROWS]
    row_sum,  # [ROWS]
    acc,  # [ROWS, D], not normalised
    output,
    out_ptr,
    lse_ptr,
    head_dim,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
):
    """Normalise and write the rows of one output; `lse` where it is asked for."""
    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, D)
    at = output * GROUP + rows
    mask = (rows < GROUP)[:, None] & (channels < head_dim)[None, :]
    o = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * head_dim + channels[None, :], o, mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + at, row_max + tl.log2(row_sum), mask=rows < GROUP)


@triton.jit
def _finish(
    acc_ptr,
    ml_ptr,
    first_slot,
    runs,
    spec_slot,
    output,
    request,
    out_ptr,
    lse_ptr,
    sums_ptr,
    head_sums_ptr,
    request_counters_ptr,
    head_dim,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    MERGE: tl.constexpr,
    SPEC: tl.constexpr,
):
    """The last arriver of an output: merge everything, write it, and with `A~` add the head to the verdict's sums."""
    row_max, row_sum, acc = _merge_slots(acc_ptr, ml_ptr, first_slot, runs, GROUP, GROUP_PAD, D, MERGE)
    if SPEC:
        spec_max, spec_sum, spec_acc = _merge_slots(acc_ptr, ml_ptr, spec_slot, 1, GROUP, GROUP_PAD, D, 1)
        new_max = tl.maximum(row_max, spec_max)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha, beta = tl.exp2(row_max - base), tl.exp2(spec_max - base)
        row_sum = row_sum * alpha + spec_sum * beta
        acc = acc * alpha[:, None] + spec_acc * beta[:, None]
        row_max = new_max
    _store_output(row_max, row_sum, acc, output, out_ptr, lse_ptr, head_dim, GROUP_PAD, GROUP, D)
    if SPEC:
        real = (tl.arange(0, GROUP_PAD) < GROUP)[:, None]
        full = tl.where(real, acc / row_sum[:, None], 0.0)
        # Without a rest A~ is A; a fused multiply-add in the difference would leave the rounding of a product.
        delta = tl.where(real & (runs > 0), spec_acc / spec_sum[:, None] - full, 0.0)
        tl.store(head_sums_ptr + output * 2, tl.sum(delta * delta))
        tl.store(head_sums_ptr + output * 2 + 1, tl.sum(full * full))
        if _arrive(request_counters_ptr + request, HKV):
            # In head order, whoever came last.
            dist2 = 0.0
            norm2 = 0.0
            for head in range(HKV):
                at = (request * HKV + head) * 2
                dist2 += tl.load(head_sums_ptr + at, cache_modifier=".cg")
                norm2 += tl.load(head_sums_ptr + at + 1, cache_modifier=".cg")
            tl.store(sums_ptr + request * 2, dist2)
            tl.store(sums_ptr + request * 2 + 1, norm2)


@triton.jit
def _lean_decode_kernel(
    q_ptr,  # [B, Hkv * GROUP, head_dim]
    k_ptr,  # [B, Hkv, capacity, head_dim]
    v_ptr,
    seq_lens_ptr,  # [B] int32
    out_ptr,  # [B, Hkv * GROUP, head_dim]
    lse_ptr,  # [B, Hkv * GROUP] fp32
    spec_out_ptr,  # [B, Hkv * GROUP, head_dim], may lie in the paired rank's memory
    spec_flag_ptr,  # [B, Hkv] int32 beside spec_out: the epoch, once that head's A~ is there
    epoch_ptr,  # [1] int32
    sums_ptr,  # [B, 2] fp32: dist2, norm2
    acc_ptr,  # [slots, GROUP, D] fp32 partials: of runs, then the merged A~ of each head
    ml_ptr,  # [slots, GROUP, 2] fp32
    spec_acc_ptr,  # [speculative tiles, GROUP, D] fp32
    spec_ml_ptr,
    head_sums_ptr,  # [B, Hkv, 2] fp32
    counters_ptr,  # [2 B Hkv + B] int32, all 0 between launches: outputs, speculative outputs, requests
    num_requests,
    capacity,
    head_dim,
    qk_scale,
    chunk_size,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    B_PAD: tl.constexpr,
    PROGRAMS_PAD: tl.constexpr,
    MIN_RUN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    MERGE: tl.constexpr,
    SPEC: tl.constexpr,
    PART: tl.constexpr,
    FLAG: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    requests = tl.arange(0, B_PAD)
    seq_lens = tl.load(seq_lens_ptr + requests, mask=requests < num_requests, other=0)
    tiles, sink, window = _tile_range(seq_lens, chunk_size, BLOCK_N, SPEC)
    rest_end = tl.cumsum((window - sink) * HKV, 0)
    total_rest = tl.sum((window - sink) * HKV, 0) if PART != PREDICTOR else 0
    spec_tiles = (tiles - window + sink) * HKV
    spec_end = tl.cumsum(spec_tiles, 0)
    total_spec = tl.sum(spec_tiles, 0) if PART != REST else 0
    num_outputs = num_requests * HKV
    # Where the runs begin that are not empty: run r is the one that holds tile t if r + 1 of them begin at or before t.
    all_programs = tl.arange(0, PROGRAMS_PAD)
    starts = _rest_start(all_programs, programs, total_spec, total_rest, MIN_RUN)
    ends = _rest_start(all_programs + 1, programs, total_spec, total_rest, MIN_RUN)
    starts = tl.where((all_programs < programs) & (ends > starts), starts, 0x7FFFFFFF)

    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, D)
    q_mask = (rows < GROUP)[:, None] & (channels < head_dim)[None, :]

    # First the speculative tiles, dealt out one by one, then this program's run of the rest.
    tile = _rest_start(program, programs, total_spec, total_rest, MIN_RUN)
    last = _rest_start(program + 1, programs, total_spec, total_rest, MIN_RUN)
    my_run = tl.sum((starts <= tile).to(tl.int32), 0) - 1
    spec_tile = program
    while (spec_tile < total_spec) | (tile < last):
        is_spec = spec_tile < total_spec
        request, place = _locate(tl.where(is_spec, spec_tile, tile), tl.where(is_spec, spec_end, rest_end))
        seq_len = tl.load(seq_lens_ptr + request)
        tiles_r, sink_r, window_r = _tile_range(seq_len, chunk_size, BLOCK_N, SPEC)
        spec_r = tiles_r - window_r + sink_r
        rest_r = window_r - sink_r
        per_head = tl.where(is_spec, spec_r, rest_r)
        head = place // per_head
        place = place % per_head
        output = request * HKV + head
        run = tl.where(is_spec, 1, tl.minimum(rest_r - place, last - tile))
        spec_from = tl.where(place < sink_r, place, window_r + place - sink_r)
        from_tile = tl.where(is_spec, spec_from, sink_r + place)

        q = tl.load(q_ptr + (output * GROUP + rows)[:, None] * head_dim + channels[None, :], mask=q_mask, other=0.0)
        cache = output.to(tl.int64) * capacity * head_dim
        acc, row_max, row_sum = _attend_tiles(
            q, k_ptr + cache, v_ptr + cache, from_tile, from_tile + run, seq_len, head_dim, qk_scale,
            ROWS, D, BLOCK_N, STAGES,
        )  # fmt: skip

        # An output's rest is one range of tiles; the runs that meet it use consecutive slots.
        head_tile = tl.max(tl.where(requests < request, rest_end, 0), 0) + head * rest_r
        first_run = tl.sum((starts <= head_tile).to(tl.int32), 0) - 1
        last_run = tl.sum((starts <= head_tile + rest_r - 1).to(tl.int32), 0) - 1
        runs = tl.where(rest_r > 0, last_run - first_run + 1, 0)
        spec_slot = programs + num_outputs + output
        done = False  # this program completes the output
        if SPEC and is_spec:
            _store_partial(acc, row_max, row_sum, spec_acc_ptr, spec_ml_ptr, spec_tile, ROWS, GROUP, D)
            if _arrive(counters_ptr + num_outputs + output, spec_r):
                first_slot = spec_tile - place
                spec_max, spec_sum, spec_acc = _merge_slots(
                    spec_acc_ptr, spec_ml_ptr, first_slot, spec_r, GROUP, GROUP_PAD, D, MERGE
                )
                _store_output(spec_max, spec_sum, spec_acc, output, spec_out_ptr, None, head_dim, GROUP_PAD, GROUP, D)
                if FLAG:
                    tl.debug_barrier()
                    tl.atomic_xchg(spec_flag_ptr + output, tl.load(epoch_ptr), sem="release", scope="sys")
                _store_partial(spec_acc, spec_max, spec_sum, acc_ptr, ml_ptr, spec_slot, GROUP_PAD, GROUP, D)
                if PART == PREDICTOR:  # noqa: SIM108 (one branch must not exist in the compiled kernel)
                    done = rest_r == 0
                else:
                    done = _arrive(counters_ptr + output, runs + 1)
        else:
            _store_partial(acc, row_max, row_sum, acc_ptr, ml_ptr, my_run + output, ROWS, GROUP, D)
            done = _arrive(counters_ptr + output, runs + (1 if SPEC and PART != REST else 0))
        if done:
            tl.debug_barrier()
            _finish(
                acc_ptr, ml_ptr, first_run + output, runs, spec_slot, output, request,
                out_ptr, lse_ptr, sums_ptr, head_sums_ptr, counters_ptr + 2 * num_outputs, head_dim,
                HKV, GROUP, GROUP_PAD, D, MERGE, SPEC,
            )  # fmt: skip
        tile += tl.where(is_spec, 0, run)
        spec_tile += programs


@dataclass(frozen=True)
class LeanWorkspace:
    """Scratch memory of `lean_decode_attention`, allocated once, for the launches of one stream.

    The counters are 0 between launches: the last arriver puts each back, so that no launch needs a memset.
    """

    num_programs: int
    acc: Tensor
    ml: Tensor
    spec_acc: Tensor
    spec_ml: Tensor
    head_sums: Tensor
    counters: Tensor

    @classmethod
    def allocate(
        cls,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_programs: int,
        chunk_size: int = 0,
    ) -> LeanWorkspace:
        """Room for any `seq_lens`. A grid smaller than the device holds leaves part of it to other work."""
        group, outputs = num_qo_heads // num_kv_heads, batch_size * num_kv_heads
        width = triton.next_power_of_2(head_dim)
        slots = num_programs + 2 * outputs
        # Sink and window of S tokens each, the window widened to whole tiles.
        spec_tiles = outputs * (2 * chunk_size // BLOCK_N + 1) if chunk_size else 1

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        return cls(
            num_programs=num_programs,
            acc=empty(slots, group, width),
            ml=empty(slots, group, 2),
            spec_acc=empty(spec_tiles, group, width),
            spec_ml=empty(spec_tiles, group, 2),
            head_sums=empty(outputs, 2),
            counters=torch.zeros(2 * outputs + batch_size, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Speculation:
    """Where the speculative output of a launch goes."""

    chunk_size: int  # S, a multiple of 64
    spec_out: Tensor  # [B, Hq, D]; may be the paired rank's memory
    sums: Tensor  # [B, 2] fp32: dist2, norm2
    flag: Tensor | None = None  # [B, Hkv] int32, released per head with the epoch's value
    epoch: Tensor | None = None  # [1] int32


def lean_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    workspace: LeanWorkspace,
    out: Tensor,
    lse: Tensor,
    speculation: Speculation | None = None,
    part: Part = "all",
    num_warps: int = 4,
    num_stages: int | None = None,
    min_run: int = 2,
    merge: int = 8,
) -> None:
    """Attention of one new token for each request over its first `seq_lens` cached tokens, in one launch.

        o = softmax(sm_scale q K^T) V,   lse = log2 sum_t 2^(sm_scale log2(e) q.k_t)

    With `speculation`, the same launch first writes `A~` over sink and window, then the sums of its distance from `A`.
    Oracles: `decode_attention_ref`, `speculative_decode_attention_ref`.

    Args:
        q: [B, Hq, D] bf16, fp16 or fp32, contiguous.  k_cache, v_cache: [B, Hkv, N, D] in q's dtype, contiguous.
        seq_lens: [B] int32 on the device, 1 .. N; read by the kernel, so a captured launch serves any lengths.
        workspace: of this shape.  out: [B, Hq, D].  lse: [B, Hq] fp32, base 2.
        part: with speculation, `predictor` writes `A~` only (and `A` where sink and window are everything), and `rest`,
            launched next on the same workspace, the others.
        num_stages: tiles of K and V in flight; None: as many as leave room for three programs on an SM.
    Raises:
        ValueError: shape, dtype or layout, naming the argument.
    Capture: graph-safe; allocates nothing.
    """
    batch_size, num_qo_heads, head_dim = q.shape
    num_kv_heads, capacity = k_cache.shape[1:3]
    if not (q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("q, k_cache, v_cache: expected contiguous tensors")
    if seq_lens.dtype != torch.int32 or seq_lens.shape != (batch_size,):
        raise ValueError(f"seq_lens: expected [{batch_size}] int32, found {list(seq_lens.shape)} {seq_lens.dtype}")
    if speculation is None and part != "all":
        raise ValueError(f"part: {part!r} needs speculation")
    tiles = batch_size * num_kv_heads * triton.cdiv(capacity, BLOCK_N)
    if tiles * workspace.num_programs >= 2**31:
        raise ValueError(f"k_cache: {tiles} tiles for {workspace.num_programs} programs overflow the 32-bit schedule")
    if num_qo_heads % num_kv_heads:
        raise ValueError(f"q: {num_qo_heads} heads are no multiple of {num_kv_heads} KV heads")
    group = num_qo_heads // num_kv_heads
    width = triton.next_power_of_2(head_dim)
    group_pad = triton.next_power_of_2(group)
    num_stages = num_stages or (3 if width * q.itemsize <= 256 else 2)
    spec = speculation
    _lean_decode_kernel[(workspace.num_programs,)](
        q,
        k_cache,
        v_cache,
        seq_lens,
        out,
        lse,
        spec.spec_out if spec else None,
        spec.flag if spec else None,
        spec.epoch if spec else None,
        spec.sums if spec else None,
        workspace.acc,
        workspace.ml,
        workspace.spec_acc,
        workspace.spec_ml,
        workspace.head_sums,
        workspace.counters,
        batch_size,
        capacity,
        head_dim,
        sm_scale * math.log2(math.e),
        spec.chunk_size if spec else 0,
        HKV=num_kv_heads,
        GROUP=group,
        GROUP_PAD=group_pad,
        ROWS=max(16, group_pad),
        D=width,
        B_PAD=triton.next_power_of_2(batch_size),
        PROGRAMS_PAD=triton.next_power_of_2(workspace.num_programs),
        BLOCK_N=BLOCK_N,
        STAGES=num_stages,
        MIN_RUN=min_run,
        MERGE=merge,
        SPEC=spec is not None,
        PART={"all": 0, "predictor": 1, "rest": 2}[part],
        FLAG=spec is not None and spec.flag is not None,
        num_warps=num_warps,
    )
