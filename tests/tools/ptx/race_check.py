"""Launches for `compute-sanitizer --tool racecheck python tests/tools/ptx/race_check.py` (and memcheck, synccheck).

A number as argument chooses one case. With ten such processes at a time, all cases take two minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch

from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import (
    LeanWorkspace,
    Phase,
    SpecOutput,
    lean_decode_attention,
    spec_parts,
)
from alspec.kernels.attention.oracles import decode_attention_ref, int8_prefill_attention_ref
from alspec.kernels.attention.prefill.int8_prefill import int8_prefill_attention
from alspec.launch.bench.bench_common import new_spec_output
from alspec.launch.bench.bench_quantised import QuantisedCase, quantised_run
from alspec.runtime.cache.quantised_cache import QuantisedCache
from alspec.sas import Softmax

# Lengths, programs, query heads of a KV head, head_dim; an output has one, two and many partials.
LEAN = (
    ((700,), 7, 4, 128),
    ((65, 1500, 319), 30, 4, 128),
    ((9000,), 132, 4, 128),
    ((9000,), 132, 1, 64),
    ((9000,), 132, 8, 128),
)
FLASHQ = (((700,), 4, 128), ((65, 1500, 319), 4, 128), ((33000,), 4, 128), ((33000,), 8, 128), ((9000,), 1, 64))
# Cached tokens, tokens of the prompt chunk, query heads of a KV head, head_dim; one tile, and more than are in flight.
PROMPTS = ((0, 64, 4, 128), (0, 200, 4, 64), (128, 130, 4, 128), (640, 333, 1, 128), (640, 333, 4, 64))


def main(case: int | None = None) -> None:
    """Run both decode kernels, plain, speculative and in two launches, and prompts over a FlashQ cache."""
    cases: list[Callable[[], None]] = [
        *(partial(lean, *sizes) for sizes in LEAN),
        *(partial(flashq, *sizes, chunk_size) for sizes in FLASHQ for chunk_size in (0, 128)),
        *(partial(prompt, *sizes) for sizes in PROMPTS),
    ]
    for run in cases if case is None else [cases[case]]:
        run()


def lean(lengths: tuple[int, ...], num_programs: int, heads_per_kv: int, head_dim: int) -> None:
    """Decode over a bf16 cache of 2 KV heads."""
    device, batch, heads = torch.device("cuda"), len(lengths), 2
    q = torch.randn(batch, heads_per_kv * heads, head_dim, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(batch, heads, max(lengths), head_dim, dtype=q.dtype, device=device) for _ in range(2))
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    workspace = LeanWorkspace.allocate(batch, heads_per_kv * heads, heads, head_dim, device, num_programs)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    epoch = torch.ones(1, dtype=torch.int32, device=device)
    sums = torch.empty(batch, num_sums(batch, heads_per_kv * heads, head_dim), 2, device=device)
    speculation = SpecOutput(128, torch.empty_like(q, dtype=torch.int64), sums, epoch)
    # One request has its `A~` in parts, as between paired ranks.
    parts = spec_parts(128, batch, heads_per_kv * heads, heads, head_dim, q.dtype, device)
    in_parts, _ = new_spec_output(128, q, parts, device)
    launches: tuple[tuple[str, SpecOutput | None, tuple[Phase, ...]], ...] = (
        ("plain", None, ("all",)),
        ("spec", speculation, ("all",)),
        (f"spec in {in_parts.parts}", in_parts, ("all",)),
        ("two launches", speculation, ("predictor", "rest")),
    )
    for name, spec, phases in launches:
        for phase in phases:
            lean_decode_attention(q, k, v, seq_lens, head_dim**-0.5, workspace, out, lse, spec, phase)
        expected = decode_attention_ref(q, k, v, seq_lens, head_dim**-0.5)[0]
        report(f"{name}, {lengths}, {num_programs} programs, {heads_per_kv} x {head_dim}", out, expected)


def flashq(lengths: tuple[int, ...], heads_per_kv: int, head_dim: int, chunk_size: int) -> None:
    """Decode over a FlashQ cache of 2 KV heads, one with 2 bits."""
    case = QuantisedCase.draw(list(lengths), 2 * heads_per_kv, 2, head_dim, "turbo-mixed", 0)
    out = quantised_run(case, chunk_size)(len(case.q) - 1)[0]
    expected = decode_attention_ref(*case.last(), head_dim**-0.5)[0]
    report(f"turbo-mixed, S {chunk_size}, {lengths}, {heads_per_kv} x {head_dim}", out, expected)


def prompt(cached: int, chunk: int, heads_per_kv: int, head_dim: int) -> None:
    """Store a prompt in one or two chunks, read the first one, attend to the last one. The error is 1 to 2 %."""
    device, heads, num_tokens = torch.device("cuda"), 2, cached + chunk
    cache = QuantisedCache("turbo-mixed", 1, 1, heads, num_tokens, head_dim, device)
    q = torch.randn(chunk, heads_per_kv * heads, head_dim, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(num_tokens, heads, head_dim, dtype=q.dtype, device=device) for _ in range(2))
    # Scores grow, so that some tiles are rescaled and others are not.
    k *= torch.linspace(0.5, 8, num_tokens, device=device)[:, None, None]
    for begin, end in ((0, cached), (cached, num_tokens)):
        if end > begin:
            prefix = cache.write_prefill(0, 0, begin, k[begin:end], v[begin:end])
    expected = int8_prefill_attention_ref(q, *prefix, head_dim**-0.5)[0]
    for softmax in get_args(Softmax):
        out = int8_prefill_attention(q, *prefix, head_dim**-0.5, softmax)[0]
        report(f"prompt, {softmax}, {chunk} of {num_tokens} tokens, {heads_per_kv} x {head_dim}", out, expected)


def report(what: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    """Print the relative error of an output."""
    print(f"{what}: relative error {float((out.double() - expected).norm() / expected.norm()):.1e}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
