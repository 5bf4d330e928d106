"""What the tests of both decode attention kernels share: a launch's tensors, and their comparison with the oracles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from alspec.kernels.attention.decode.lean_decode import LeanWorkspace, SpecOutput
from alspec.kernels.attention.reference import decode_attention_ref, speculative_decode_attention_ref
from alspec.kernels.comm.ll_packets import unpack_packets
from alspec.sas import Softmax

__all__ = ["EDGES", "EPOCH", "HAS_CUDA", "AttentionLaunch", "S"]

S = 128
EPOCH = 7
EDGES = (1, 63, 64, 65, 127, 128, 129, 2 * S - 1, 2 * S, 2 * S + 1, 2 * S + 63, 2 * S + 64, 2 * S + 65, 700)
HAS_CUDA = torch.cuda.is_available()


@dataclass(kw_only=True)
class AttentionLaunch:
    """Inputs and outputs of decode attention. A test kernel's own launch runs it, after `clear`."""

    q: Tensor
    k: Tensor  # [B, H, N, D], what the oracle reads; NaN beyond `seq_lens`
    v: Tensor
    seq_lens: Tensor
    workspace: LeanWorkspace
    out: Tensor
    lse: Tensor
    speculation: SpecOutput | None = None

    @property
    def softmax(self) -> Softmax:
        return "exact"

    @property
    def sm_scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def outputs(self) -> list[Tensor]:
        spec = self.speculation
        guess = [] if spec is None else [spec.spec_out, spec.sums]
        guess += [] if spec is None or spec.spec_lse is None else [spec.spec_lse]
        return [self.out, self.lse, *guess]

    def clear(self) -> None:
        """NaN in all that a launch has to write before it, or another, reads it; words of no epoch."""
        for tensor in (self.workspace.o, self.workspace.lse, *self.outputs()):
            tensor.fill_(math.nan if tensor.is_floating_point() else 0)

    @property
    def guess(self) -> Tensor:
        """`A~`, NaN where a word did not come."""
        assert self.speculation is not None
        found = self.speculation.spec_out
        if found.is_floating_point():
            return found
        o = unpack_packets(found, EPOCH).view(-1, *self.q.shape)
        if self.speculation.spec_lse is None:
            return o[0]
        # A partial of no tokens has no weight, but is there.
        weight = (self.guess_lse.double() * math.log(2)).softmax(0)
        return (o.double() * weight[..., None]).sum(0)

    @property
    def guess_lse(self) -> Tensor:
        """Of each part of `A~`, -inf without tokens; NaN where a word did not come."""
        assert self.speculation is not None
        assert self.speculation.spec_lse is not None
        return unpack_packets(self.speculation.spec_lse, EPOCH)

    def compare_each(self, close: Callable[[str, Tensor, Tensor], None]) -> None:
        """`close(name, found, expected)` of out, lse, guess and sums."""
        q, seq_lens = self.q.to(self.k.device), self.seq_lens.to(self.k.device)
        out, lse = decode_attention_ref(q, self.k, self.v, seq_lens, self.sm_scale, self.softmax)
        close("out", self.out, out)
        close("lse", self.lse, lse)
        if self.speculation is not None:
            chunk_size = self.speculation.chunk_size
            spec_out, _, sums = speculative_decode_attention_ref(
                q, self.k, self.v, seq_lens, chunk_size, self.sm_scale, self.softmax
            )
            close("guess", self.guess, spec_out)
            close("sums", self.speculation.sums.sum(1), sums)
