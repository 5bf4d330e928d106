"""Launches for `compute-sanitizer --tool racecheck python tests/kernels/race_check.py` (and memcheck, synccheck)."""

from __future__ import annotations

import torch

from alspec.kernels.lean_attention import LeanWorkspace, Phase, Speculation, guess_parts, lean_decode_attention
from alspec.kernels.merge import num_sums
from alspec.kernels.reference import decode_attention_ref
from alspec.launch.bench_turbo import TurboCase, turbo_run
from alspec.launch.spec_ready import pair_speculation

# Lengths, programs, query heads of a KV head, head_dim: one, two and many partials for an output.
LEAN = (
    ((700,), 7, 4, 128),
    ((65, 1500, 319), 30, 4, 128),
    ((9000,), 132, 4, 128),
    ((9000,), 132, 1, 64),
    ((9000,), 132, 8, 128),
)
TURBO = (((700,), 4, 128), ((65, 1500, 319), 4, 128), ((33000,), 4, 128), ((33000,), 8, 128), ((9000,), 1, 64))


def main() -> None:
    """Both decode kernels, plain, speculative and in two launches."""
    for lengths, num_programs, heads_per_kv, head_dim in LEAN:
        lean(lengths, num_programs, heads_per_kv, head_dim)
    for lengths, heads_per_kv, head_dim in TURBO:
        for chunk_size in (0, 128):
            case = TurboCase.draw(list(lengths), 2 * heads_per_kv, 2, head_dim, "turbo-mixed", 0)
            out = turbo_run(case, chunk_size)(len(case.q) - 1)[0]
            q, k, v, seq_lens = case.last()
            report(f"turbo-mixed, S {chunk_size}, {lengths}, {heads_per_kv} x {head_dim}", out, q, k, v, seq_lens)


def lean(lengths: tuple[int, ...], num_programs: int, heads_per_kv: int, head_dim: int) -> None:
    """Decode over a bf16 cache of 2 KV heads."""
    device, batch, heads = torch.device("cuda"), len(lengths), 2
    q = torch.randn(batch, heads_per_kv * heads, head_dim, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(batch, heads, max(lengths), head_dim, dtype=q.dtype, device=device) for _ in range(2))
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    workspace = LeanWorkspace.allocate(batch, heads_per_kv * heads, heads, head_dim, device, num_programs)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    epoch = torch.ones(1, dtype=torch.int32, device=device)
    sums = torch.empty(batch, num_sums(heads_per_kv * heads, head_dim), 2, device=device)
    speculation = Speculation(128, torch.empty_like(q, dtype=torch.int64), sums, epoch)
    # Of one request in parts, as a pair has it.
    parts = guess_parts(128, batch, heads_per_kv * heads, heads, head_dim, q.dtype, device)
    in_parts, _ = pair_speculation(128, q, parts, device)
    launches: tuple[tuple[str, Speculation | None, tuple[Phase, ...]], ...] = (
        ("plain", None, ("all",)),
        ("guess", speculation, ("all",)),
        (f"guess in {in_parts.parts}", in_parts, ("all",)),
        ("two launches", speculation, ("predictor", "rest")),
    )
    for name, spec, phases in launches:
        for phase in phases:
            lean_decode_attention(q, k, v, seq_lens, head_dim**-0.5, workspace, out, lse, spec, phase)
        report(f"{name}, {lengths}, {num_programs} programs, {heads_per_kv} x {head_dim}", out, q, k, v, seq_lens)


def report(
    what: str, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """Print how far an output is from the oracle's."""
    expected = decode_attention_ref(q, k, v, seq_lens, q.shape[-1] ** -0.5)[0]
    print(f"{what}: relative error {float((out.double() - expected).norm() / expected.norm()):.1e}")


if __name__ == "__main__":
    main()
