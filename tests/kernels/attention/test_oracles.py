"""The oracles against code by others: the SDPA of torch in fp64, and the Llama of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from alspec.kernels.attention.oracles import (
    apply_rope_ref,
    combine_partials_ref,
    decode_attention_ref,
    prefill_attention_ref,
    rms_norm_ref,
    silu_mul_ref,
    speculative_decode_attention_ref,
)

Check = Callable[[Tensor, Tensor, torch.dtype], None]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, sm_scale: float) -> Tensor:
    """q [n_q, Hq, D], k, v [Hkv, n, D], visible [n_q, n] -> [n_q, Hq, D], by torch."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=visible, scale=sm_scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ratio", [1, 3, 8])
@pytest.mark.parametrize("num_tokens", [1, 65, 200])
def test_decode_attention_ref_is_sdpa(ratio: int, num_tokens: int) -> None:
    q, k, v = draw(2, 2 * ratio, 16), draw(2, 2, 210, 16, seed=1), draw(2, 2, 210, 16, seed=2)
    out, lse = decode_attention_ref(q, k, v, torch.tensor([num_tokens, 210]), 0.4)
    for b, n in enumerate((num_tokens, 210)):
        close(out[b], sdpa(q[b : b + 1], k[b, :, :n], v[b, :, :n], None, 0.4)[0])
        # By definition of lse, the probabilities 2^(score - lse) of every head add up to 1.
        scores = torch.einsum("hgd,hnd->hgn", q[b].view(2, ratio, 16), k[b, :, :n]) * 0.4 * math.log2(math.e)
        close(torch.exp2(scores - lse[b].view(2, ratio, 1)).sum(-1), torch.ones(2, ratio, dtype=torch.float64))


@pytest.mark.parametrize("chunk_size", [128, 256])
@pytest.mark.parametrize("num_tokens", [1, 128, 300, 320, 577, 700])
def test_speculative_decode_attention_ref_is_sdpa(chunk_size: int, num_tokens: int) -> None:
    q, k, v = draw(1, 6, 16), draw(1, 2, num_tokens, 16, seed=1), draw(1, 2, num_tokens, 16, seed=2)
    spec_out, full_out, sums = speculative_decode_attention_ref(q, k, v, torch.tensor([num_tokens]), chunk_size, 0.4)
    # The predictor reads the first S tokens, and every tile of 64 that has one of the last S tokens.
    token = torch.arange(num_tokens)
    recent_tiles = torch.unique(token[-chunk_size:] // 64)
    visible = (token < chunk_size) | torch.isin(token // 64, recent_tiles)
    close(spec_out, sdpa(q, k[0], v[0], visible[None], 0.4))
    close(full_out, sdpa(q, k[0], v[0], None, 0.4))
    close(sums, torch.stack([(spec_out - full_out).square().sum(), full_out.square().sum()])[None])


def test_prefill_attention_ref_is_sdpa() -> None:
    q, k, v = draw(9, 6, 16), draw(2, 30, 16, seed=1), draw(2, 30, 16, seed=2)
    visible = torch.arange(30)[None, :] <= torch.arange(21, 30)[:, None]
    close(prefill_attention_ref(q, k, v, 0.4), sdpa(q, k, v, visible, 0.4))


def test_combine_partials_ref_is_attention_over_both_parts() -> None:
    q, k, v = draw(1, 4, 16), draw(1, 2, 50, 16, seed=1), draw(1, 2, 50, 16, seed=2)
    cut, rest = torch.tensor([20]), torch.tensor([30])
    first = decode_attention_ref(q, k, v, cut, 0.4)
    second = decode_attention_ref(q, k[:, :, 20:], v[:, :, 20:], rest, 0.4)
    empty = decode_attention_ref(q, k, v, torch.tensor([0]), 0.4)
    out, lse = combine_partials_ref(*(torch.stack(tensors) for tensors in zip(first, empty, second, strict=True)))
    close(out, sdpa(q, k[0], v[0], None, 0.4))
    close(lse, decode_attention_ref(q, k, v, torch.tensor([50]), 0.4)[1])


def test_rms_norm_ref_is_transformers(check: Check) -> None:
    norm = LlamaRMSNorm(48, eps=1e-3)
    norm.weight.data = draw(48, seed=1).float()
    x = draw(7, 48).float() * 0.05
    check(rms_norm_ref(x, norm.weight, 1e-3), norm(x), torch.float32)


def test_silu_mul_ref_is_torch() -> None:
    gate_up = draw(5, 32) * 5
    close(silu_mul_ref(gate_up), F.silu(gate_up[:, :16]) * gate_up[:, 16:])


def test_apply_rope_ref_is_transformers() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32)
    rotary = LlamaRotaryEmbedding(config)
    positions = torch.arange(40)
    angle = positions.double()[:, None] * rotary.inv_freq.double()
    cos, sin = (torch.cat([part, part], dim=-1)[None] for part in (angle.cos(), angle.sin()))
    q, k = draw(40, 2, 32), draw(40, 1, 32, seed=1)
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for x, rotated in zip((q, k), expected, strict=True):
        close(apply_rope_ref(x, positions, rotary.inv_freq), rotated[0].transpose(0, 1))


def test_oracles_do_not_change_their_inputs() -> None:
    q, k, v = draw(1, 4, 16), draw(1, 2, 300, 16, seed=1), draw(1, 2, 300, 16, seed=2)
    before = [tensor.clone() for tensor in (q, k, v)]
    speculative_decode_attention_ref(q, k, v, torch.tensor([300]), 128, 0.4)
    prefill_attention_ref(q, k[0], v[0], 0.4)
    apply_rope_ref(q, torch.tensor([5]), torch.ones(8))
    rms_norm_ref(q, torch.ones(16), 1e-5)
    silu_mul_ref(q)
    for tensor, copy in zip((q, k, v), before, strict=True):
        assert torch.equal(tensor, copy)
