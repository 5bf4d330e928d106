"""Launches for `compute-sanitizer --tool racecheck python tests/kernels/race_check.py` (and memcheck, synccheck)."""

from __future__ import annotations

import torch

from alspec.kernels.lean_attention import LeanWorkspace, Speculation, lean_decode_attention
from alspec.kernels.reference import decode_attention_ref


def main() -> None:
    """One, two and many partials for an output, one and two levels, plain, speculative and in two launches."""
    device = torch.device("cuda")
    for lengths, num_programs in (((700,), 7), ((65, 1500, 319), 30), ((9000,), 132)):
        batch, heads, dim = len(lengths), 2, 128
        q = torch.randn(batch, 4 * heads, dim, dtype=torch.bfloat16, device=device)
        k, v = (torch.randn(batch, heads, max(lengths), dim, dtype=q.dtype, device=device) for _ in range(2))
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        workspace = LeanWorkspace.allocate(batch, 4 * heads, heads, dim, device, num_programs)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
        flag, epoch = (torch.ones(shape, dtype=torch.int32, device=device) for shape in ((batch, heads), (1,)))
        sums = torch.empty(batch, 4 * heads, 2, device=device)
        speculation = Speculation(128, torch.empty_like(q), sums, flag, epoch)
        expected = decode_attention_ref(q, k, v, seq_lens, dim**-0.5)[0]
        for spec, parts in ((None, ("all",)), (speculation, ("all",)), (speculation, ("predictor", "rest"))):
            for part in parts:
                lean_decode_attention(q, k, v, seq_lens, dim**-0.5, workspace, out, lse, spec, part)
            error = float((out.double() - expected).norm() / expected.norm())
            print(f"lengths {lengths}, {num_programs} programs, {'+'.join(parts)}: relative error {error:.1e}")


if __name__ == "__main__":
    main()
