"""Cases of lean attention for compiled_cases.py: as launched on Ampere, and for one request on Hopper (by TMA)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import lean_launch
import torch
from comparison import check
from emulated import CPU, Emulated, Found, S, broken, counts_of, error_of, sound

from alspec.kernels.attention.decode import combine, lean_decode
from alspec.kernels.attention.oracles import decode_attention_ref

__all__ = ["CASES"]


def lean(
    lengths: tuple[int, ...],
    heads_per_kv: int,
    num_kv_heads: int,
    head_dim: int,
    num_programs: int,
    chunk_size: int = 0,
    parts: int = 1,
    long_run: int = 0,
    window: int | None = None,
    **how: Any,
) -> Found:
    """Lean attention as launched on Ampere, but with tiles of 64 tokens: a short context has several.

    Args:
        long_run: a run of more tiles than this has tiles of 128 tokens; 0: no run has.
        window: a sliding window, tokens.
        how: arguments of `Emulated` for the attention kernel; `combine`: the same for the combine kernel.
    """
    combine_constants = how.pop("combine", {})
    kernels = {
        "lean_decode_kernel": Emulated(lean_decode.lean_decode_kernel, 80, **how),
        "lean_combine_kernel": Emulated(lean_decode.lean_combine_kernel, 80, **combine_constants),
    }
    launch = lean_launch.Launch.draw(
        lengths, heads_per_kv, num_kv_heads, head_dim, CPU, num_programs, chunk_size, torch.bfloat16, parts
    )
    if window is not None:
        launch.slide(window)
    with (
        mock.patch.multiple(lean_decode, **kernels),
        mock.patch.object(lean_decode, "_settings", return_value=(64, long_run, 2, False)),
    ):
        launch.run()
    launch.compare(check)
    return error_of(launch) | counts_of(kernels)


def hopper(
    lengths: int | tuple[int, ...],
    heads_per_kv: int,
    num_kv_heads: int,
    head_dim: int,
    num_programs: int,
    chunk_size: int = 0,
    parts: int = 1,
    *,
    long_run: int = 0,
    block_n: int = 64,
    stages: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    in_two: bool = False,
    early: bool = False,
    gate: int | None = None,
    max_programs: int = combine.MAX_PROGRAMS,
    window: int | None = None,
    **how: Any,
) -> Found:
    """Lean attention as launched on Hopper, of one request or several.

    Args:
        long_run, block_n, stages: replace the result of `_settings`; see `lean`.
        early: read before the previous kernel ends, which writes q, the newest token and the gate.
        gate: at 0 the kernel may write nothing.
        max_programs: of the combine of a batch.
        window: a sliding window, tokens.
    """
    lengths = (lengths,) if isinstance(lengths, int) else lengths
    launch = lean_launch.Launch.draw(
        lengths, heads_per_kv, num_kv_heads, head_dim, CPU, num_programs, chunk_size, dtype, parts
    )
    launch.in_two = in_two
    if window is not None:
        launch.slide(window, loaded=2 * block_n)
    gates = [] if gate is None else [torch.tensor([gate], dtype=torch.int32)]
    newest = [x[request, :, length - 1] for request, length in enumerate(lengths) for x in (launch.k, launch.v)]
    late = (launch.q, *newest, *gates)
    kernels = {
        "lean_sm90_kernel": Emulated(lean_decode.lean_sm90_kernel, 90, late=late, **how),
        "lean_combine_kernel": Emulated(lean_decode.lean_combine_kernel, 90),
    }
    attend = partial(lean_decode.lean_decode_attention, gate=gates[0] if gates else None, prefetch_before_wait=early)
    with (
        mock.patch.multiple(lean_decode, **kernels),
        mock.patch.object(lean_decode, "_settings", return_value=(block_n, long_run, stages, True)),
        mock.patch.object(lean_decode, "_uses_tma", return_value=True),
        mock.patch.object(combine, "MAX_PROGRAMS", max_programs),
        mock.patch.object(lean_launch, "lean_decode_attention", attend),
    ):
        launch.run()
    if gate == 0:
        for tensor in (launch.workspace.o, launch.workspace.lse, *launch.outputs()):  # unchanged since `clear`
            assert tensor.isnan().all() if tensor.is_floating_point() else not tensor.any()
        return {"error": 0.0} | counts_of(kernels)
    launch.compare(lambda found, expected, _: check(found, expected, torch.bfloat16))
    return error_of(launch) | counts_of(kernels)


@contextmanager
def on_hopper() -> Iterator[dict[str, Emulated]]:
    """Launches of this block run Hopper's main loop in the emulator; yields its kernels."""
    kernels = {
        "lean_sm90_kernel": Emulated(lean_decode.lean_sm90_kernel, 90),
        "lean_combine_kernel": Emulated(lean_decode.lean_combine_kernel, 90),
    }
    with (
        mock.patch.multiple(lean_decode, **kernels),
        mock.patch.object(lean_decode, "_settings", return_value=(64, 0, 2, True)),
        mock.patch.object(lean_decode, "_uses_tma", return_value=True),
    ):
        yield kernels


def hopper_rows(lengths: tuple[int, ...], num_rows: int, window: int, num_programs: int) -> Found:
    """Lean attention of several rows of each request, each with a sliding window of its own, as launched on Hopper."""
    launch = lean_launch.Launch.draw(lengths, 4, 2, 64, CPU, num_programs, 0, torch.bfloat16)
    launch.slide(window + num_rows - 1, loaded=64)
    row_lens = launch.seq_lens[:, None] - torch.arange(num_rows - 1, -1, -1, dtype=torch.int32)
    q = torch.randn(len(lengths) * num_rows, 8, 64, generator=torch.Generator().manual_seed(window)).bfloat16()
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
    workspace = lean_decode.LeanWorkspace.allocate(len(lengths), 8 * num_rows, 2, 64, CPU, num_programs)
    with on_hopper() as kernels:
        lean_decode.lean_decode_attention(
            q, launch.k, launch.v, launch.seq_lens, 0.1, workspace, out, lse, row_lens=row_lens.contiguous(),
            sliding_window=window,
        )  # fmt: skip
    for row in range(num_rows):
        rows = slice(row, None, num_rows)
        k, v = launch.k.double().nan_to_num(), launch.v.double().nan_to_num()
        args = q[rows].double(), k, v, row_lens[:, row], 0.1, "exact", window
        expected, expected_lse = decode_attention_ref(*args)
        check(out[rows], expected, torch.bfloat16)
        check(lse[rows], expected_lse, torch.bfloat16)
    return {"error": float((out[rows].double() - expected).norm() / expected.norm())} | counts_of(kernels)


def hopper_recall(length: int, window: int | None, blocks: list[int]) -> Found:
    """`A~` over listed blocks as well, as launched on Hopper; those in front of a sliding window are left out."""
    launch = lean_launch.Launch.draw((length,), 4, 2, 64, CPU, 7, S, torch.bfloat16, 4)
    if window is not None:
        launch.slide(window, loaded=256)
    assert launch.speculation is not None
    lists = torch.tensor([[blocks, [*blocks[1:], -1]]], dtype=torch.int32)
    block_lse = torch.full((1, 2, -(-length // 64), 4, 4), -torch.inf)
    launch.speculation = replace(launch.speculation, recall=lean_decode.RecallBuffers(lists, block_lse, 2))
    with on_hopper() as kernels:
        launch.run()
    token = torch.arange(launch.k.shape[2])
    visible = (token < length) & (token >= length - (window or length))
    near = (token < S) | (token >= (length - S) // 64 * 64)
    scores = torch.einsum("hgd,htd->hgt", launch.q[0].unflatten(0, (2, 4)).double(), launch.k[0].double().nan_to_num())
    for head in range(2):
        is_read = visible & (near | torch.isin(token // 64, lists[0, head]))
        for found, is_seen in ((launch.out, visible), (launch.spec_out, is_read)):
            weights = (scores[head] * launch.sm_scale).masked_fill(~is_seen, -torch.inf).softmax(-1)
            expected = weights @ launch.v[0, head].double().nan_to_num()
            check(found[0].unflatten(0, (2, 4))[head], expected, torch.bfloat16)
        rest = range(max(S, (length - (window or length)) // 64 * 64), (length - S) // 64 * 64, 64)
        masses = torch.exp2(block_lse[0, head].double()).sum(1)
        for begin in rest:
            own = torch.where(visible & (token // 64 == begin // 64), (scores[head] * launch.sm_scale).exp(), 0).sum(-1)
            check(masses[begin // 64], own, torch.bfloat16)
    return error_of(launch) | counts_of(kernels)


def _small(**how: Any) -> Found:
    return lean((300,), 4, 1, 128, 4, **how)


def _small_hopper(**how: Any) -> Found:
    """Six tiles of one program: three in a row use the same buffer."""
    return hopper(330, 4, 1, 128, 1, **how)


def _meet_later(match: re.Match[str]) -> str:
    """Issue copies without waiting until all warps have read K."""
    return re.sub(r"bar\.sync\s*0;", "", match[1]) + "bar.sync 0; " + match[2]


CASES: dict[str, Callable[[], Found]] = {
    "lean, 4 x 128": sound(lambda: lean((700,), 4, 2, 128, 8)),
    "lean, 4 x 128, spec": sound(lambda: lean((900,), 4, 2, 128, 8, S)),
    "lean, 4 x 128, spec in parts": sound(lambda: lean((900,), 4, 2, 128, 12, S, 3)),
    "lean, 2 x 64, spec in parts, some without tokens": sound(lambda: lean((250,), 2, 1, 64, 5, S, 5)),
    "lean, 1 x 64, spec, ragged": sound(lambda: lean((65, 500, 300), 1, 2, 64, 7, S)),
    "lean, 2 x 16, ragged": sound(lambda: lean((513, 1, 1), 2, 2, 16, 7)),
    "lean, 4 x 128, two kinds of tiles, short": sound(lambda: lean((330,), 4, 2, 128, 4, long_run=3)),
    "lean, 4 x 128, two kinds of tiles, long": sound(lambda: lean((450,), 4, 2, 128, 4, long_run=3)),
    "lean, 4 x 128, two kinds of tiles, ragged": sound(lambda: lean((300, 40, 130), 4, 1, 128, 5, long_run=3)),
    "lean, 4 x 128, two kinds of tiles, spec in parts": sound(lambda: lean((700,), 4, 1, 128, 6, S, 2, long_run=3)),
    "lean, 8 x 128, rounds of combining": sound(lambda: lean((1500,), 8, 1, 128, 20, combine={"ROUND": 16})),
    "lean, 4 x 64, spec, rounds of combining": sound(lambda: lean((3000,), 4, 1, 64, 40, S, combine={"ROUND": 16})),
    **{f"Hopper lean, 4 x 128, {n} tokens": sound(partial(hopper, n, 4, 2, 128, 3)) for n in (1, 63, 64, 65, 129)},
    "Hopper lean, 8 x 128, three heads in two runs": sound(lambda: hopper(330, 8, 3, 128, 2)),
    "Hopper lean, 4 x 128, spec": sound(lambda: hopper(900, 4, 2, 128, 3, S)),
    # 16 tiles of 32 KB for two programs: the program without `A~` waits, and again after its first tile.
    "Hopper lean, 4 x 128, spec with a head start": sound(lambda: hopper(1300, 4, 1, 128, 2, S)),
    "Hopper lean, 4 x 128, spec in 2 parts": sound(lambda: hopper(700, 4, 2, 128, 3, S, 2)),
    "Hopper lean, 8 x 128, spec in 3 parts": sound(lambda: hopper(500, 8, 1, 128, 7, S, 3)),
    "Hopper lean, 4 x 64, spec in 5 parts, some without tokens": sound(lambda: hopper(250, 4, 1, 64, 5, S, 5)),
    "Hopper lean, 4 x 128, spec of all tokens": sound(lambda: hopper(200, 4, 1, 128, 2, S)),
    "Hopper lean, 4 x 128, two kinds of tiles, short": sound(lambda: hopper(330, 4, 2, 128, 4, long_run=3)),
    "Hopper lean, 4 x 128, two kinds of tiles, long": sound(lambda: hopper(330, 4, 2, 128, 1, long_run=3)),
    "Hopper lean, 4 x 128, long tiles, spec in parts": sound(lambda: hopper(900, 4, 1, 128, 2, S, 2, long_run=3)),
    "Hopper lean, 4 x 64, tiles of 256": sound(lambda: hopper(700, 4, 2, 64, 1, block_n=128, long_run=2)),
    "Hopper lean, 1 x 64, tiles of 128, three in flight": sound(
        lambda: hopper(700, 1, 1, 64, 1, block_n=128, stages=3, dtype=torch.float16)
    ),
    "Hopper lean, 4 x 80, spec": sound(lambda: hopper(330, 4, 1, 80, 2, S)),
    "Hopper lean, 16 x 128": sound(lambda: hopper(200, 16, 1, 128, 2)),
    "Hopper lean, 1 x 256, spec": sound(lambda: hopper(330, 1, 1, 256, 2, S)),
    "Hopper lean, 4 x 136": sound(lambda: hopper(130, 4, 1, 136, 1)),
    "Hopper lean, 4 x 128, two launches": sound(lambda: hopper(500, 4, 1, 128, 2, S, in_two=True)),
    "Hopper lean, 4 x 128, gate 1": sound(lambda: hopper(130, 4, 1, 128, 2, gate=1)),
    "Hopper lean, 4 x 128, gate 0": sound(lambda: hopper(130, 4, 1, 128, 2, gate=0)),
    **{
        f"Hopper lean, 4 x 128, spec in parts, lengths read before the wait, gate {gate}": sound(
            partial(hopper, 900, 4, 2, 128, 12, S, 3, early=True, gate=gate)
        )
        for gate in (0, 1)
    },
    **{
        f"Hopper lean, 4 x 128, read before the wait, {n} tokens": sound(partial(hopper, n, 4, 2, 128, 5, early=True))
        for n in (1, 64, 65, 330)
    },
    "Hopper lean, 4 x 128, long tiles, read before the wait": sound(
        lambda: hopper(330, 4, 2, 128, 1, long_run=3, early=True)
    ),
    "Hopper lean, 4 x 128, ragged": sound(lambda: hopper((200, 77, 300), 4, 2, 128, 5)),
    "Hopper lean, 4 x 128, ragged, read before the wait": sound(
        lambda: hopper((200, 77, 300), 4, 2, 128, 5, early=True)
    ),
    "Hopper lean, 4 x 128, ragged, few programs combine": sound(
        lambda: hopper((200, 77, 300), 4, 2, 128, 5, max_programs=5)
    ),
    "Hopper lean, 8 x 128, equal, none split": sound(lambda: hopper((300, 300, 300), 8, 2, 128, 6)),
    "Hopper lean, 4 x 128, equal, two of a program": sound(lambda: hopper((130, 130, 130), 4, 2, 128, 3)),
    "Hopper lean, 13 x 64, ragged, two kinds of tiles": sound(
        lambda: hopper((130, 64, 1, 300), 13, 2, 64, 7, long_run=2)
    ),
    # Two requests have no token between sink and window, so that a run skips their outputs.
    "Hopper lean, 3 x 96, spec, ragged": sound(lambda: hopper((400, 77, 120, 300), 3, 2, 96, 6, S)),
    **{
        f"Hopper lean, 4 x 128, window {window}": sound(partial(hopper, 330, 4, 2, 128, 3, window=window))
        for window in (1, 63, 64, 65, 128, 129, 200)
    },
    # The window begins within the sink, behind it, and within the recent window.
    **{
        f"Hopper lean, 4 x 128, spec in 2 parts, window {window}": sound(
            partial(hopper, 700, 4, 2, 128, 3, S, 2, window=window)
        )
        for window in (650, 560, 100)
    },
    "Hopper lean, 4 x 64, long tiles, window": sound(
        lambda: hopper(900, 4, 2, 64, 1, block_n=128, long_run=2, window=600)
    ),
    "Hopper lean, 4 x 128, ragged, read before the wait, window": sound(
        lambda: hopper((200, 77, 300), 4, 2, 128, 5, early=True, window=130)
    ),
    "Hopper lean, 3 x 96, spec, ragged, window": sound(lambda: hopper((400, 77, 120, 300), 3, 2, 96, 6, S, window=130)),
    "Hopper lean, 4 x 128, two launches, window": sound(lambda: hopper(500, 4, 1, 128, 2, S, in_two=True, window=321)),
    "Hopper lean, 2 rows, window 65": sound(lambda: hopper_rows((200,), 2, 65, 3)),
    "Hopper lean, 4 rows, ragged, window 64": sound(lambda: hopper_rows((200, 130), 4, 64, 5)),
    "Hopper lean, recall": sound(lambda: hopper_recall(900, None, [2, 5, 9])),
    # The first block has left the window; the window begins within the first block.
    "Hopper lean, recall, window 708": sound(lambda: hopper_recall(900, 708, [2, 5, 9])),
    "Hopper lean, recall, window 730": sound(lambda: hopper_recall(900, 730, [2, 5, 9])),
    "lean, 4 x 128, window": sound(lambda: lean((700,), 4, 2, 128, 8, window=300)),
    "lean, 4 x 128, spec, window": sound(lambda: lean((900,), 4, 2, 128, 8, S, window=790)),
    "lean, 2 x 16, ragged, window": sound(lambda: lean((513, 1, 100), 2, 2, 16, 7, window=65)),
    "broken lean, other lanes": broken(_small, r"(shfl\.sync\.bfly[^;]*), 8, 31,", r"\1, 4, 31,", "error"),
    "broken lean, tiles not waited for": broken(_small, r"(cp\.async\.wait_group\s*)\d+", r"\g<1>9", "error"),
    "broken lean, no barriers": broken(_small, r"bar\.sync\s*0;", "", "shared"),
    "broken combine, other lanes": broken(
        lambda edit: lean((1500,), 4, 1, 128, 20, combine={"edit": edit}),
        r"(shfl\.sync\.bfly[^;]*), 8, 31,",
        r"\1, 4, 31,",
        "error",
    ),
    "broken Hopper lean, no barriers": broken(_small_hopper, r"bar\.sync\s*0;", "", "shared"),
    "broken Hopper lean, the next K overwrites what is read": broken(
        _small_hopper,
        r"(?s)(wgmma\.wait_group[^;]*;(?:(?!wgmma).)*?)(ld\.shared\.v2\.b32(?:(?!bar\.sync|wgmma).)*ex2)",
        _meet_later,
        "shared",
    ),
    "broken Hopper lean, the previous phase": broken(
        partial(hopper, 128, 4, 1, 128, 1),
        r"(mbarrier\.try_wait\.parity\S*) (\w+), (\[%\w+\]), (%\w+);",
        r".reg .b32 other; xor.b32 other, \4, 1; \1 \2, \3, other;",
        "error",
    ),
    "broken Hopper lean, copies do not see barriers": broken(
        partial(_small_hopper, early=True),
        r"(mbarrier\.init[^;]*;[^;]*)fence\.proxy\.async[^;]*;",
        r"\1",
        "shared",
    ),
    "broken Hopper lean, products do not see q": broken(
        _small_hopper, r"(st\.shared\.v4[^;]*;[^;]*)fence\.proxy\.async[^;]*;", r"\1", "shared"
    ),
    "broken Hopper lean, products do not see P": broken(
        _small_hopper, r"(stmatrix[^;]*;[^;]*)fence\.proxy\.async[^;]*;", r"\1", "shared"
    ),
    "broken Hopper lean, products not waited for": broken(
        _small_hopper, r"wgmma\.wait_group\.sync\.aligned 0;", "", "error"
    ),
    "broken Hopper lean, q read before the wait": broken(
        partial(_small_hopper, early=True), r"griddepcontrol\.wait;", "", "unordered"
    ),
    "broken Hopper lean, newest token read before the wait": broken(
        partial(hopper, 64, 4, 1, 128, 1, early=True),
        r"(add\.s32\s+(%r\d+), %r\d+, 64;[^;]*)setp\.lt\.s32(\s+%p\d+, \2,)",
        r"\1setp.le.s32\3",
        "unordered",
    ),
}
