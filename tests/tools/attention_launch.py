"""The tensors of a launch of decode attention, and their comparison with the oracles, for the tests of both kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tiers import fast
from torch import Tensor

from alspec.kernels.attention.decode.lean_decode import LeanWorkspace, SpecOutput
from alspec.kernels.attention.oracles import decode_attention_ref, speculative_decode_attention_ref
from alspec.kernels.comm.ll_packets import unpack_packets
from alspec.sas import Softmax

__all__ = ["BY_EDGE", "EDGES", "EPOCH", "HAS_CUDA", "AttentionLaunch", "S"]

S = 128
EPOCH = 7
EDGES = (1, 63, 64, 65, 127, 128, 129, 2 * S - 1, 2 * S, 2 * S + 1, 2 * S + 63, 2 * S + 64, 2 * S + 65, 700)
# All lengths with a predictor; without one only those around a tile are in the fast tier.
BY_EDGE = fast(
    list(itertools.product(EDGES, (0, S))),
    keep=[*((length, S) for length in EDGES), *((length, 0) for length in (1, 63, 64, 65, 700))],
)
HAS_CUDA = torch.cuda.is_available()


@dataclass(kw_only=True)
class AttentionLaunch:
    """Inputs and outputs of decode attention. A subclass launches its kernel, after `clear`."""

    q: Tensor
    k: Tensor  # [B, H, N, D], read by the oracle; NaN beyond `seq_lens`
    v: Tensor
    seq_lens: Tensor
    workspace: LeanWorkspace
    out: Tensor
    lse: Tensor
    speculation: SpecOutput | None = None
    sliding_window: int | None = None

    @property
    def softmax(self) -> Softmax:
        return "exact"

    @property
    def sm_scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def outputs(self) -> list[Tensor]:
        spec = self.speculation
        outputs = [self.out, self.lse]
        outputs += [] if spec is None else [spec.spec_out, spec.sums]
        outputs += [] if spec is None or spec.spec_lse is None else [spec.spec_lse]
        return outputs

    def clear(self) -> None:
        """Fill all outputs and partials with NaN, and packets with 0, which is no epoch."""
        for tensor in (self.workspace.o, self.workspace.lse, *self.outputs()):
            tensor.fill_(math.nan if tensor.is_floating_point() else 0)

    @property
    def spec_out(self) -> Tensor:
        """`A~`, NaN for each packet that did not arrive."""
        assert self.speculation is not None
        found = self.speculation.spec_out
        if found.is_floating_point():
            return found
        o = unpack_packets(found, EPOCH).view(-1, *self.q.shape)
        if self.speculation.spec_lse is None:
            return o[0]
        # A part without tokens has weight 0, but its packets arrive too.
        weight = (self.spec_lse.double() * math.log(2)).softmax(0)
        return (o.double() * weight[..., None]).sum(0)

    @property
    def spec_lse(self) -> Tensor:
        """The lse of each part of `A~`: -inf without tokens, NaN for each packet that did not arrive."""
        assert self.speculation is not None
        assert self.speculation.spec_lse is not None
        return unpack_packets(self.speculation.spec_lse, EPOCH)

    def compare_each(self, close: Callable[[str, Tensor, Tensor], None]) -> None:
        """Call `close(name, found, expected)` for out, lse, spec_out and sums."""
        q, seq_lens = self.q.to(self.k.device), self.seq_lens.to(self.k.device)
        how = self.sm_scale, self.softmax, self.sliding_window
        out, lse = decode_attention_ref(q, self.k, self.v, seq_lens, *how)
        close("out", self.out, out)
        close("lse", self.lse, lse)
        if self.speculation is not None:
            chunk_size = self.speculation.chunk_size
            spec_out, _, sums = speculative_decode_attention_ref(q, self.k, self.v, seq_lens, chunk_size, *how)
            close("spec_out", self.spec_out, spec_out)
            close("sums", self.speculation.sums.sum(1), sums)
