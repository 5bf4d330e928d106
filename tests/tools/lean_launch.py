"""Launches of lean decode attention over a random floating-point cache, for its tests and the emulated cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from attention_launch import EPOCH, AttentionLaunch
from torch import Tensor

from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import LeanWorkspace, SpecOutput, lean_decode_attention

__all__ = ["Launch"]

Check = Callable[[Tensor, Tensor, torch.dtype], None]


@dataclass(kw_only=True)
class Launch(AttentionLaunch):
    """A launch over a random floating-point cache, with NaN behind each length."""

    in_two: bool = False  # launches: the predictor, then the rest

    @classmethod
    def draw(
        cls,
        lengths: tuple[int, ...],
        ratio: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_programs: int,
        chunk_size: int,
        dtype: torch.dtype = torch.float32,
        parts: int = 1,
    ) -> Launch:
        batch, capacity = len(lengths), max(lengths) + 70
        generator = torch.Generator().manual_seed(sum(lengths) + ratio * head_dim)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        q, k = normal(batch, ratio * num_kv_heads, head_dim), normal(batch, num_kv_heads, capacity, head_dim)
        v = normal(*k.shape)
        for request, length in enumerate(lengths):
            k[request, :, length:] = math.nan
            v[request, :, length:] = math.nan
        launch = cls(
            q=q,
            k=k,
            v=v,
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            workspace=LeanWorkspace.allocate(batch, q.shape[1], num_kv_heads, head_dim, device, num_programs),
            out=torch.empty_like(q),
            lse=torch.empty(q.shape[:2], device=device),
        )
        if chunk_size:
            launch.speculation = SpecOutput(
                chunk_size,
                spec_out=torch.empty(parts, *q.shape, dtype=torch.int64, device=device),
                sums=torch.empty(batch, num_sums(batch, q.shape[1], head_dim), 2, device=device),
                epoch=torch.tensor([EPOCH], dtype=torch.int32, device=device),
                spec_lse=torch.empty(parts, *q.shape[:2], dtype=torch.int64, device=device) if parts > 1 else None,
            )
        return launch

    def slide(self, sliding_window: int, loaded: int | None = None) -> None:
        """Give the launch a sliding window: NaN in the blocks in front of it, large values before it in its block.

        loaded: tokens in front of that block that have large values, too, because a tile may hold them: on Hopper.
        """
        self.sliding_window = sliding_window
        loaded = (256 if self.q.is_cuda else 0) if loaded is None else loaded
        for request, n in enumerate(self.seq_lens.tolist()):
            first = max(0, n - sliding_window)
            unread = max(0, first // 64 * 64 - loaded)
            for cache in (self.k, self.v):
                cache[request, :, :unread] = math.nan
                cache[request, :, unread:first] *= 50

    def run(self) -> None:
        self.clear()
        for phase in ("predictor", "rest") if self.in_two else ("all",):
            lean_decode_attention(
                self.q, self.k, self.v, self.seq_lens, self.sm_scale, self.workspace, self.out, self.lse,
                self.speculation, phase, sliding_window=self.sliding_window,
            )  # fmt: skip

    def compare(self, check: Check) -> None:
        self.compare_each(lambda _, found, expected: check(found, expected, self.q.dtype))
