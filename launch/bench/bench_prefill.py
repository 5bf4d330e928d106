"""Measure prefill attention over INT8 and over bf16, for whole prompts and for a prompt chunk after a prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from alspec.kernels.attention.oracles import int8_prefill_attention_ref
from alspec.kernels.attention.prefill.int8_prefill import int8_prefill_attention
from alspec.kernels.attention.torch_attention import newest_causal_mask, prefill_attention
from alspec.launch.bench.bench_common import check_close

__all__ = ["PREFILL_CASES", "PrefillCase", "check_prefill", "prefill_runs"]

# (queries, all tokens): a whole prompt, or a prompt chunk after a prefix.
PREFILL_CASES = ((8192, 8192), (32768, 32768), (4096, 32768))
HEADS, HEAD_DIM = (32, 8), 128
# Relative RMS. The rounding of q changes scores of these inputs by 0.006, SAS weights by 0.001, bf16 outputs by 0.002.
TOLERANCE = 1.5e-2
CHECKED_ROWS = 64
OURS = "alspec.int8_prefill_attention"

Run = Callable[[int], Tensor]


@dataclass
class PrefillCase:
    """One prompt: keys and values in INT8, and the same numbers in bf16."""

    q: Tensor  # [n_q, Hq, D] bf16
    k: Tensor  # [Hkv, n, D] bf16
    v: Tensor
    k8: Tensor  # [Hkv, n, D] int8
    v8: Tensor
    k_scale: Tensor  # [Hkv, n / 64] fp32
    v_scale: Tensor

    @classmethod
    def draw(cls, num_queries: int, num_tokens: int) -> PrefillCase:
        """Fresh random inputs."""

        def cache() -> tuple[Tensor, Tensor, Tensor]:
            blocks = torch.randn(HEADS[1], num_tokens // 64, 64 * HEAD_DIM, device="cuda")
            scale = blocks.abs().amax(2) / 119
            levels = (blocks / scale[..., None]).round()
            bf16 = (levels * scale[..., None]).bfloat16()
            shape = (HEADS[1], num_tokens, HEAD_DIM)
            return bf16.view(shape), levels.to(torch.int8).view(shape), scale

        q = torch.randn(num_queries, HEADS[0], HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        (k, k8, k_scale), (v, v8, v_scale) = cache(), cache()
        return cls(q, k, v, k8, v8, k_scale, v_scale)

    @property
    def flops(self) -> int:
        """Operations of both products, without what the causal mask hides."""
        num_queries, num_tokens = self.q.shape[0], self.k.shape[1]
        pairs = num_queries * num_tokens - num_queries * (num_queries - 1) // 2
        return 4 * pairs * HEADS[0] * HEAD_DIM

    def num_bytes(self, impl: str) -> int:
        """Bytes that a run must read and write: q and o, and K and V in INT8 with scales or in bf16."""
        quantised = (self.k8, self.v8, self.k_scale, self.v_scale)
        cache = quantised if impl.startswith(OURS) else (self.k, self.v)
        return 2 * self.q.nbytes + sum(tensor.nbytes for tensor in cache)


def prefill_runs(case: PrefillCase) -> dict[str, Run]:
    """SDPA, our attention over bf16, and our INT8 attention with each softmax.

    The argument, the index of a copy, is ignored. One copy is enough: each run rereads its inputs hundreds of times.
    """
    num_queries, num_tokens = case.q.shape[0], case.k.shape[1]
    is_prompt = num_queries == num_tokens
    mask = None if is_prompt else newest_causal_mask(num_queries, num_tokens)
    q = case.q.transpose(0, 1)[None].contiguous()

    def sdpa(_: int) -> Tensor:
        out = F.scaled_dot_product_attention(
            q, case.k[None], case.v[None], attn_mask=mask, is_causal=is_prompt, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def bf16(_: int) -> Tensor:
        return prefill_attention(case.q, case.k, case.v, HEAD_DIM**-0.5)

    def exact(_: int) -> Tensor:
        return int8_prefill_attention(case.q, case.k8, case.v8, case.k_scale, case.v_scale, HEAD_DIM**-0.5)[0]

    def sas(_: int) -> Tensor:
        return int8_prefill_attention(case.q, case.k8, case.v8, case.k_scale, case.v_scale, HEAD_DIM**-0.5, "sas")[0]

    return {"torch.sdpa": sdpa, "alspec.prefill_attention": bf16, OURS: exact, f"{OURS}.sas": sas}


def check_prefill(case: PrefillCase, run: Run) -> None:
    """Compare the first, some middle and the last rows with the fp64 oracle.

    Raises:
        BadNumbersError: the error is larger than `TOLERANCE`.
    """
    out = run(0)
    num_queries, num_tokens = case.q.shape[0], case.k.shape[1]
    for begin in (0, num_queries // 2 - 7, num_queries - CHECKED_ROWS):
        end = begin + CHECKED_ROWS
        seen = num_tokens - num_queries + end
        expected, _ = int8_prefill_attention_ref(
            case.q[begin:end], case.k8[:, :seen], case.v8[:, :seen], case.k_scale, case.v_scale, HEAD_DIM**-0.5
        )
        check_close(f"rows {begin} to {end} of {num_queries}", out[begin:end], expected, TOLERANCE)
