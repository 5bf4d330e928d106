"""Run compiled kernels on the CPU, instruction by instruction, against the fp64 oracles.

Started by test_compiled.py in a process of its own, because the tests import the kernels for the interpreter. Runs the
cases of one group, `python tests/tools/ptx/compiled_cases.py --group fast`, or those whose names contain an argument:
`python tests/tools/ptx/compiled_cases.py flashq`; else all. Prints a line for each case: relative RMS error,
instructions, conflicts. Exits with 1 if a case fails.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import compiled_lean_cases
import compiled_sampler_cases
import flashq_launch
from comparison import check
from emulated import CPU, Emulated, Found, S, broken, counts_of, error_of, sound
from paired_ranks import pairs
from step_tensors import EPS, nan, normal, stream

from alspec.kernels.attention.decode_quantised import quantised_decode
from alspec.kernels.attention.dispatch import KVLayer
from alspec.kernels.attention.oracles import gate_up_silu_ref, push_partial_ref, reduce_norm_ref
from alspec.kernels.comm.exchange import Exchange, LogitExchange
from alspec.kernels.comm.ll_packets import LATE_PACKET, fault_code, split_fault
from alspec.kernels.comm.pair_state import PairShape
from alspec.kernels.kv_codec.formats import FORMATS
from alspec.kernels.linear import projections, push
from alspec.kernels.linear.decode_weight import pack_weight
from alspec.kernels.norm import residual
from alspec.kernels.norm.residual import num_square_sums, reduce_norm
from alspec.kernels.sampling import next_token
from alspec.kernels.speculation import handover, roles


def flashq(
    lengths: tuple[int, ...],
    heads_per_kv: int,
    num_kv_heads: int,
    head_dim: int,
    num_programs: int,
    chunk_size: int = 0,
    softmax: str = "exact",
    capability: int = 90,
    dtype: torch.dtype = torch.float32,
    num_warps: int = 4,
    parts: int = 1,
    codec: str = "turbo-mixed",
    window: int | None = None,
    **how: Any,
) -> Found:
    """Attention over a quantised cache as launched on Hopper; by default half of the heads have 2 bits."""
    kernels = {
        "quantised_decode_kernel": Emulated(quantised_decode.quantised_decode_kernel, capability, **how),
        "quantised_combine_kernel": Emulated(quantised_decode.quantised_combine_kernel, capability),
    }
    launch = flashq_launch.draw(
        lengths, heads_per_kv, num_kv_heads, head_dim, CPU, num_programs, chunk_size, codec, dtype=dtype, parts=parts
    )
    launch.settings = replace(quantised_decode.GPU_SETTINGS, sm90=capability >= 90, num_warps=num_warps)
    launch.softmax = softmax
    if window is not None:
        launch.slide(window)
    with mock.patch.multiple(quantised_decode, **kernels):
        launch.run()
    launch.compare()
    return error_of(launch) | counts_of(kernels)


def update_roles(stale: bool, **how: Any) -> Found:
    """A receiver reads that its `A~` was accepted, in a packet of this step or of the previous one."""
    shape, epoch = PairShape(2, 1, 1, 64, 4, 2, 16), 6
    (_, (target,)) = pairs(CPU, shape, epoch)
    target.own.verdicts.copy_(pack(torch.ones_like(target.own.verdicts, dtype=torch.float32), epoch - stale))
    target.priority.copy_(torch.tensor([1, 2]))
    hits = torch.full((2, 1), -1, dtype=torch.int32)
    kernel = Emulated(roles._update_roles_kernel, 90, **how)
    with mock.patch.object(roles, "_update_roles_kernel", kernel):
        roles.update_roles(target, 1, hits, 0)
    assert hits[0].tolist() == [1 - stale]
    assert target.is_sender.tolist() == [1 - stale]
    return {"error": 0.0} | kernel.counts


def all_reduce(late: bool, verdict: float | None = None, own: bool = False, **how: Any) -> Found:
    """Packets of two ranks are summed into the residual; `late`: packets of the previous step.

    Args:
        verdict: the verdict of the layer; a rejection ends the wait for packets, which then count as 0.
        own: the second rank reads its own packets from a buffer of its own; in the shared buffer they are stale.
    """
    hidden, epoch = 96, 6
    partials, start, gamma = torch.randn(2, 1, hidden), torch.randn(1, hidden), torch.randn(hidden)
    packets = pack(partials, epoch - late)
    gate, next_gate, zero = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    packets = packets.transpose(0, 1)[None].contiguous()
    own_packets = packets.clone() if own else None
    if own_packets is not None:
        packets[:, :, 1] -= 1 << 32
        own_packets[:, :, 0] = 0
    exchange = Exchange(
        torch.zeros(1, hidden), torch.tensor([epoch], dtype=torch.int32), zero.int(), tp_rank=1, tp_size=2, rank=1,
        packets=packets, own_packets=own_packets,
    )  # fmt: skip
    gates = ()
    if verdict is not None:
        gates = (gate, next_gate, pack(torch.tensor([verdict]), epoch))
    x, x_norm, square_sums = start.clone(), torch.zeros(1, hidden), torch.zeros(1, num_square_sums(hidden))
    kernel = Emulated(residual._reduce_norm_kernel, 90, **how)
    with mock.patch.object(residual, "_reduce_norm_kernel", kernel):
        reduce_norm(exchange, 0, 0, x, gamma, x_norm, square_sums, *gates)
    if late and verdict is None:
        assert x.isnan().all()
        return {"error": 0.0} | kernel.counts
    expected, expected_norm, square_sum = reduce_norm_ref(partials * (not late), start, gamma)
    check(x, expected, torch.float32)
    check(x_norm, expected_norm, torch.float32)
    check(square_sums.sum(1), square_sum, torch.float32)
    assert int(next_gate) == (verdict == 1.0)
    return {"error": float((x - expected).norm() / expected.norm())} | kernel.counts


def logits_of_all(late: bool, own: bool = False, **how: Any) -> Found:
    """Packets of two vocabulary shards become logits and candidates; `late`: those of rank 1 are of the previous step.

    Args:
        own: as for `all_reduce`, but of the first rank.
    """
    rows, epoch = 750, 6
    shards = torch.randn(1, 2, rows)
    packets = torch.stack([pack(shards[:, 0], epoch), pack(shards[:, 1], epoch - late)], 1)
    before = fault_code(LATE_PACKET, 1, 1) if late else 0  # ends all waits
    fault = torch.tensor([before], dtype=torch.int32)
    own_packets = packets.clone() if own else None
    if own_packets is not None:
        packets[:, 0] -= 1 << 32
        own_packets[:, 1] = 0
    exchange = LogitExchange(shards[0, :1], torch.tensor([epoch], dtype=torch.int32), fault, 0, 2, packets, own_packets)
    logits, best, best_token = torch.zeros(1, 2 * rows), torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int32)
    kernel = Emulated(next_token._collect_logits_kernel, 90, **how)
    with mock.patch.object(next_token, "_collect_logits_kernel", kernel):
        next_token.collect_logits(exchange, shards, 0, 3, logits, best, best_token)
    assert int(fault) == before
    if late:
        assert torch.equal(logits[:, :rows], shards[:, 0])
        assert logits[:, rows:].isnan().all()
        return {"error": 0.0} | kernel.counts
    assert torch.equal(logits, shards.flatten(1))
    for index, block in enumerate(logits[0].split(next_token.BLOCK)):
        assert best[0, index] == block.max()
        assert best_token[0, index] == index * next_token.BLOCK + int(block.argmax())
    return {"error": 0.0} | kernel.counts


def logits_past_a_deadline(missing: int, edit: Callable[[str], str] = str) -> Found:
    """One of two ranks never sends a packet: after the timeout, the fault word names this rank."""
    rows, epoch, reduce_index = 750, 6, 3
    shards = torch.randn(1, 2, rows)
    packets = pack(shards, epoch)
    packets[0, missing, 500] -= 1 << 32
    fault = torch.zeros(1, dtype=torch.int32)
    exchange = LogitExchange(shards[0, :1], torch.tensor([epoch], dtype=torch.int32), fault, 0, 2, packets)
    logits, best, best_token = torch.zeros(1, 2 * rows), torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int32)
    # The emulator's timer stands still between barriers; its clock advances with every read.
    ticking = Emulated(
        next_token._collect_logits_kernel, 90, edit=lambda ptx: edit(ptx).replace("%globaltimer", "%clock64")
    )
    with mock.patch.object(next_token, "_collect_logits_kernel", ticking):
        next_token.collect_logits(exchange, shards, 1000, reduce_index, logits, best, best_token)
    assert split_fault(int(fault)) == (LATE_PACKET, reduce_index, missing)
    assert logits.isnan().nonzero().tolist() == [[0, missing * rows + 500]]
    # Conflicts are left out: another program may read the fault word early, which is no fault.
    return {"error": 0.0, "instructions": ticking.counts["instructions"]}


def project(batch: int, hidden: int, rows: int, dtype: torch.dtype, gated: bool, **how: Any) -> Found:
    """Projections, of several requests on tensor cores: gate and up, and partial sums.

    Args:
        rows: rows of the gate projection and of the partial sums.  gated: few programs, with several tiles each.
    """
    gate = torch.ones(1, dtype=torch.int32) if gated else None
    x, squares = stream(CPU, dtype, batch, hidden)
    weight = normal(CPU, dtype, 2 * rows, hidden)
    kernel = Emulated(projections._gate_up_silu_kernel, 90, **how)
    out = nan(CPU, dtype, batch, rows)
    with mock.patch.object(projections, "_gate_up_silu_kernel", kernel):
        projections.gate_up_silu(x, squares, weight, out, EPS, gate)
    check(out, gate_up_silu_ref(x, squares, weight, EPS), torch.bfloat16)

    sums = Emulated(push._push_partial_kernel, 90, **how)
    exchange = Exchange(
        nan(CPU, torch.float32, batch, 2 * rows), torch.tensor([6], dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    with mock.patch.object(push, "_push_partial_kernel", sums):
        push.push_partial(x, weight, exchange, 0, gate)
    expected = push_partial_ref(x, weight)
    check(exchange.partial, expected, torch.float32)
    assert int(exchange.fault) == 0
    counts = {name: kernel.counts[name] + sums.counts[name] for name in kernel.counts}
    return {"error": float((exchange.partial - expected).norm() / expected.norm())} | counts


def project_quantised(batch: int, hidden: int, rows: int, kind: str, group_size: int, gate: int, **how: Any) -> Found:
    """`project` with quantised weights. gate: 1, or 0 for one that is closed, or -1 for none."""
    gates = None if gate < 0 else torch.full((1,), gate, dtype=torch.int32)
    x, squares = stream(CPU, torch.bfloat16, batch, hidden)
    groups = -(-hidden // group_size)
    codes = torch.randint(16, (2 * rows, hidden), dtype=torch.uint8)
    zeros = torch.randint(16, (2 * rows, groups), dtype=torch.uint8) if kind == "int4" else None
    if kind == "fp8":
        codes = torch.randn(2 * rows, hidden).to(torch.float8_e4m3fn)
    scales = (torch.rand(2 * rows, groups) + 0.5).bfloat16()
    by_pairs, by_rows = (pack_weight(codes, scales, zeros, kind, group_size, stride) for stride in (rows, 8))
    values = by_rows.dequantise(torch.float64)
    kernel = Emulated(projections._gate_up_silu_kernel, 90, PDL=True, **how)
    out = nan(CPU, torch.bfloat16, batch, rows)
    with mock.patch.object(projections, "_gate_up_silu_kernel", kernel):
        projections.gate_up_silu(x, squares, by_pairs, out, EPS, gates)
    sums = Emulated(push._push_partial_kernel, 90, PDL=True, **how)
    zero = torch.zeros(1, dtype=torch.int32)
    exchange = Exchange(nan(CPU, torch.float32, batch, 2 * rows), zero + 6, zero)
    with mock.patch.object(push, "_push_partial_kernel", sums):
        push.push_partial(x, by_rows, exchange, 0, gates)
    counts = {name: kernel.counts[name] + sums.counts[name] for name in kernel.counts}
    if gate == 0:
        assert out.isnan().all()
        assert exchange.partial.isnan().all()
        return {"error": 0.0} | counts
    check(out, gate_up_silu_ref(x, squares, values, EPS), torch.bfloat16)
    expected = push_partial_ref(x, values)
    check(exchange.partial, expected, torch.float32)
    return {"error": float((exchange.partial - expected).norm() / expected.norm())} | counts


def received(late: bool, parts: int, **how: Any) -> Found:
    """A handover of x, the newest token and `A~`, combined from its parts; `late`: packets of the previous step."""
    shape, epoch, capacity = PairShape(2, 1, 1, 64, 2, 1, 16, parts), 6, 3
    (_, (target,)) = pairs(CPU, shape, epoch)
    target.is_receiver.fill_(1)
    o, lse = torch.randn(parts, 2, 16), 3 * torch.randn(parts, 2)
    message = torch.randn(shape.message_packets)
    target.own.inbox[1, 0] = pack(message, epoch - late)
    target.own.spec_out[1] = pack(o, epoch - late).view(target.own.spec_out[1].shape)
    target.own.spec_lse[1] = pack(lse, epoch - late).view(target.own.spec_lse[1].shape)
    x, attn_out = torch.zeros(1, 64), torch.zeros(1, 2, 16)
    k, v = torch.zeros(2, 1, 1, capacity, 16)
    seq_lens = torch.tensor([2], dtype=torch.int32)
    kernel = Emulated(handover._receive_handover_kernel, 90, **how)
    with mock.patch.object(handover, "_receive_handover_kernel", kernel):
        handover.receive_handover(target, 1, x, KVLayer(k, v), seq_lens, attn_out, 0)
    if late:
        assert torch.cat([x[0], k[0, 0, 1], v[0, 0, 1], attn_out.flatten()]).isnan().all()
        return {"error": 0.0} | kernel.counts
    assert torch.equal(torch.cat([x[0], k[0, 0, 1], v[0, 0, 1]]), message)
    weight = torch.exp2(lse.double() - lse.amax(0))
    expected = (weight[..., None] * o).sum(0) / weight.sum(0)[:, None]
    check(attn_out[0], expected, torch.float32)
    return {"error": float((attn_out[0] - expected).norm() / expected.norm())} | kernel.counts


def pack(values: Tensor, epoch: int) -> Tensor:
    """LL packets of fp32 values, made on the host."""
    return values.view(torch.int32).long().bitwise_and(0xFFFFFFFF) | epoch << 32


def _small_flashq(**how: Any) -> Found:
    return flashq((300,), 4, 1, 128, 2, **how)


def _all_heads(**how: Any) -> Found:
    """One program for all heads: requests with blocks, without, and with idle warps in the last iteration."""
    return flashq((500, 40, 130), 4, 2, 128, 1, dtype=torch.bfloat16, **how)


MIXED = [name for name in FORMATS if name != "flashq"]
CASES: dict[str, Callable[[], Found]] = {
    **compiled_lean_cases.CASES,
    **compiled_sampler_cases.CASES,
    "flashq, 4 x 128": sound(lambda: flashq((700,), 4, 2, 128, 6)),
    "flashq, 4 x 128, spec": sound(lambda: flashq((900,), 4, 2, 128, 6, S)),
    "flashq, 8 x 128, spec": sound(lambda: flashq((900,), 8, 1, 128, 4, S)),
    "flashq, 4 x 128, spec in 2 parts": sound(lambda: flashq((900,), 4, 2, 128, 20, S, dtype=torch.bfloat16, parts=2)),
    "flashq, 4 x 64, spec in 2 parts, one without tokens": sound(lambda: flashq((64,), 4, 2, 64, 8, S, parts=2)),
    "flashq, 4 x 128, spec in parts, long runs": sound(lambda: flashq((1800,), 4, 2, 128, 2, S, parts=2)),
    "flashq, 2 x 64, ragged": sound(lambda: flashq((65, 700, 319), 2, 2, 64, 20)),
    "flashq, 7 x 64, spec, sas, ragged": sound(lambda: flashq((65, 700, 300), 7, 2, 64, 8, S, "sas")),
    # The window begins within a block, at its edge, within the tail; with `A~` within the sink and behind it.
    **{
        f"flashq, 4 x 128, window {window}": sound(partial(flashq, (700,), 4, 2, 128, 6, window=window))
        for window in (5, 64, 190, 321)
    },
    "flashq, 4 x 128, spec in 2 parts, window": sound(
        lambda: flashq((900,), 4, 2, 128, 20, S, dtype=torch.bfloat16, parts=2, window=830)
    ),
    "flashq, 7 x 64, spec, sas, ragged, window": sound(
        lambda: flashq((65, 700, 300), 7, 2, 64, 8, S, "sas", window=500)
    ),
    "turboquant3, 4 x 64, window": sound(lambda: flashq((330,), 4, 1, 64, 3, codec="turboquant3", window=130)),
    "hybrid-k4v2, 8 x 128, spec, window": sound(
        lambda: flashq((500,), 8, 1, 128, 2, S, codec="hybrid-k4v2", window=333)
    ),
    "flashq, 4 x 128, on Ampere": sound(lambda: flashq((1500,), 4, 1, 128, 20, capability=80)),
    **{f"{name}, 4 x 128": sound(lambda name=name: flashq((300,), 4, 1, 128, 2, codec=name)) for name in MIXED},
    "turboquant3, 7 x 64, spec, sas": sound(lambda: flashq((330,), 7, 1, 64, 3, S, "sas", codec="turboquant3")),
    "turboquant2, 4 x 128, bf16": sound(
        lambda: flashq((200,), 4, 1, 128, 2, dtype=torch.bfloat16, codec="turboquant2")
    ),
    "hybrid-k3v2, 8 x 128, spec": sound(lambda: flashq((300,), 8, 1, 128, 2, S, codec="hybrid-k3v2")),
    "flashq, 3 x 64, bf16": sound(lambda: flashq((200,), 3, 2, 64, 2, dtype=torch.bfloat16)),
    "flashq, 5 x 128, fp16": sound(lambda: flashq((200,), 5, 2, 128, 2, dtype=torch.float16)),
    "flashq, 4 x 128, bf16, several work items": sound(lambda: _all_heads()),
    "flashq, 6 x 64, fp16, several work items, spec": sound(
        lambda: flashq((65, 40, 500), 6, 2, 64, 2, S, dtype=torch.float16, num_warps=2)
    ),
    "flashq, 4 x 128, bf16, read before the wait": sound(lambda: _all_heads(READ_LENGTHS_EARLY=True)),
    "flashq, 4 x 128, spec, lengths read before the wait": sound(
        lambda: flashq((900,), 4, 2, 128, 6, S, READ_LENGTHS_EARLY=True)
    ),
    "1 request": sound(lambda: project(1, 200, 40, torch.bfloat16, False)),
    "3 requests, a part of a chunk": sound(lambda: project(3, 200, 40, torch.bfloat16, False)),
    "8 requests, one chunk, fp16": sound(lambda: project(8, 1024, 24, torch.float16, False)),
    "2 requests, chunks of several tiles": sound(lambda: project(2, 1664, 88, torch.bfloat16, True)),
    "1 request, fp8": sound(lambda: project_quantised(1, 1096, 40, "fp8", 1096, -1)),
    "11 requests, fp8 in blocks": sound(lambda: project_quantised(11, 712, 24, "fp8", 128, -1)),
    "1 request, int4": sound(lambda: project_quantised(1, 5000, 24, "int4", 128, -1)),
    "3 requests, int4, chunks of several tiles": sound(lambda: project_quantised(3, 2112, 120, "int4", 64, 1)),
    "1 request, int4, closed gate": sound(lambda: project_quantised(1, 2112, 24, "int4", 32, 0)),
    "all-reduce": sound(lambda: all_reduce(False)),
    "all-reduce, packets of the previous step": sound(lambda: all_reduce(True)),
    "all-reduce, own packets in a buffer of their own": sound(lambda: all_reduce(False, own=True)),
    "all-reduce, accepted": sound(lambda: all_reduce(False, 1.0)),
    "all-reduce, rejected, packets not waited for": sound(lambda: all_reduce(True, 0.0)),
    "broken all-reduce, old packets": broken(partial(all_reduce, True), r"mov\.u32 (%r\d+), 0x7FC00000;", "", "error"),
    "verdict": sound(lambda: update_roles(False)),
    "verdict, of the previous step": sound(lambda: update_roles(True)),
    "broken verdict, old packets": broken(partial(update_roles, True), r"mov\.u32 (%r\d+), 0x7FC00000;", "", "error"),
    "logits": sound(lambda: logits_of_all(False)),
    "logits, rank 1's of the previous step": sound(lambda: logits_of_all(True)),
    "logits, own packets in a buffer of their own": sound(lambda: logits_of_all(False, own=True)),
    **{
        f"logits, a packet of rank {rank} misses its deadline": partial(logits_past_a_deadline, rank) for rank in (0, 1)
    },
    "broken logits, no rank named": broken(
        partial(logits_past_a_deadline, 1), r"@late\w* st\.volatile\.global\.u32[^;]*;", "", "error"
    ),
    **{f"handover, parts: {parts}": sound(partial(received, False, parts)) for parts in (1, 2, 3)},
    **{f"handover of the previous step, parts: {parts}": sound(partial(received, True, parts)) for parts in (1, 2)},
    "broken flashq, copies do not see barriers": broken(_small_flashq, r"fence\.proxy\.async[^;]*;", "", "shared"),
    "broken flashq, records not waited for": broken(
        _small_flashq, r"mbarrier\.try_wait\.parity\.shared\.b64 (\w+),[^;]*;", r"setp.eq.u32 \1, 0, 0;", "error"
    ),
    "broken flashq, q not waited for": broken(
        partial(flashq, (200,), 3, 2, 64, 2, dtype=torch.bfloat16),
        r"mbarrier\.try_wait\.parity\.shared\.b64 (\w+), \[%\w+\],[^;]*;",
        r"setp.eq.u32 \1, 0, 0;",
        "error",
    ),
    "broken flashq, q waited for by one warp": broken(
        lambda **how: _all_heads(**how),
        r"(mbarrier\.try_wait\.parity\.shared\.b64) (\w+), (\[%\w+\],[^;]*;)",
        r".reg .pred w; .reg .u32 t; mov.u32 t, %tid.x; setp.lt.u32 w, t, 32; setp.eq.u32 \2, 0, 0; @w \1 \2, \3",
        "shared",
    ),
    "broken flashq, warps do not meet": broken(
        _small_flashq, r"(st\.shared\.v2\.f32[^;]*;\s*)bar\.sync 0;", r"\1", "shared"
    ),
    "broken flashq, the next records overwrite sums": broken(
        lambda **how: _all_heads(**how), r"@(\w+) bar\.sync 0;", "", "shared"
    ),
    "broken flashq, only the last work item waits for sums": broken(
        lambda **how: _all_heads(**how), r"@(\w+) bar\.sync 0;", r"@!\1 bar.sync 0;", "shared"
    ),
    "broken flashq, copies do not see sums": broken(
        lambda **how: _all_heads(**how), r"(@\w+ bar\.sync 0;)\s*fence\.proxy\.async[^;]*;", r"\1", "shared"
    ),
    "broken flashq, the same part twice": broken(
        _small_flashq, r"mad\.lo\.u32 (\w+), \w+, 16,", r"mad.lo.u32 \1, 0, 16,", "error"
    ),
    "broken flashq, copies before reads": broken(
        partial(flashq, (900,), 4, 1, 128, 2), r"or\.b32 read, read, [^;]*;", "", "shared"
    ),
    "broken flashq, not transposed": broken(_small_flashq, r"(movmatrix[^;]*) (%\w+), u;", r"mov.b32 \2, u;", "error"),
    "broken flashq, bytes not transposed": broken(
        _small_flashq, r"movmatrix[^;]*\s(%\w+, %\w+);", r"mov.b32 \1;", "error"
    ),
}


# The fast tier: attention of both codecs in parts, each way to wait for packets and each way to miss them, one mutant.
FAST = (
    "hybrid-k3v2, 8 x 128, spec",
    "turboquant3, 4 x 128",
    "lean, 4 x 128, spec in parts",
    "Hopper lean, 4 x 128, ragged",
    "Hopper lean, 4 x 128, spec in 2 parts, window 560",
    "Hopper lean, 2 rows, window 65",
    "Hopper lean, 4 x 128, gate 1",
    "Hopper lean, 4 x 128, gate 0",
    "flashq, 4 x 64, spec in 2 parts, one without tokens",
    "1 request",
    "8 requests, one chunk, fp16",
    "all-reduce",
    "all-reduce, packets of the previous step",
    "all-reduce, rejected, packets not waited for",
    "verdict",
    "verdict, of the previous step",
    "logits, a packet of rank 1 misses its deadline",
    "handover, parts: 2",
    "handover of the previous step, parts: 2",
    "sampler, top_k and top_p",
    "broken verdict, old packets",
)


GROUPS = ("fast", "lean", "Hopper", "flashq", "step", "broken")


def group_of(name: str) -> str:
    """The group of a case: `fast`, or what test_compiled.py runs in the full tier only."""
    if name in FAST:
        return "fast"
    first = name.replace(",", " ").split()[0]
    if first in MIXED:
        return "flashq"
    return first if first in ("broken", "lean", "Hopper", "flashq") else "step"


def main(patterns: list[str], group: str | None = None) -> int:
    """Run the chosen cases. Returns the number of failures."""
    torch.set_num_threads(1)
    assert set(FAST) <= set(CASES), f"no such cases: {set(FAST) - set(CASES)}"
    chosen = {
        name: case
        for name, case in CASES.items()
        if (group is None or group_of(name) == group) and (not patterns or any(pattern in name for pattern in patterns))
    }
    assert chosen, "no such cases"
    failures = 0
    for name, case in chosen.items():
        begin = time.monotonic()
        try:
            result = ", ".join(f"{key} {value:.3g}" for key, value in case().items())
        except Exception:
            failures += 1
            result = "FAILED\n" + traceback.format_exc()
        print(f"{name}: {time.monotonic() - begin:.1f} s; {result}", flush=True)
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run compiled kernels on the CPU.")
    parser.add_argument("--group", choices=GROUPS)
    parser.add_argument("patterns", nargs="*")
    arguments = parser.parse_args()
    sys.exit(min(main(arguments.patterns, arguments.group), 1))
