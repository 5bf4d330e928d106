"""Attention of several rows of a request: each row gets the bits that it gets alone."""

from __future__ import annotations

import pytest
import torch

from alspec.kernels.attention.dispatch import DecodeAttention
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import new_cache

HEAD_DIM, KV_HEADS, QO_HEADS, CONTEXT = 64, 2, 6, 200
CONFIG = LlamaConfig(
    hidden_size=48, intermediate_size=80, num_layers=1, num_qo_heads=QO_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
    vocab_size=64, rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=512, tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("codec", ["bf16", "turbo4", "hybrid-k4v2"])
@pytest.mark.parametrize("first", [(1, 64, 129), (63, 127, 190), (126, 2, 65)])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_rows_have_the_bits_of_single_tokens(
    codec: str, first: tuple[int, ...], num_rows: int, device: torch.device
) -> None:
    """Rows of a request do not go beyond the block of its first; those behind the last one repeat it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(num_rows)
    cache = new_cache(codec, CONFIG, 1, len(first), CONTEXT, dtype, device)
    for request in range(len(first)):
        k, v = (torch.randn(CONTEXT, KV_HEADS, HEAD_DIM, dtype=dtype, device=device) for _ in range(2))
        cache.write_prefill(0, request, 0, k, v)
    lengths = torch.tensor(first)
    rows = torch.minimum(torch.arange(num_rows)[:, None], 63 - (lengths - 1) % 64)
    seq_lens = (lengths + rows).int().to(device)
    q = torch.randn(num_rows, len(first), QO_HEADS, HEAD_DIM, dtype=dtype, device=device)
    attention = DecodeAttention([cache.layer(0)], QO_HEADS, 128, HEAD_DIM**-0.5, device)
    found = attention.full_rows(q, cache.layer(0), seq_lens)
    for row in range(num_rows):
        assert torch.equal(found[row], attention.full(q[row], cache.layer(0), seq_lens[row]))
    assert num_rows == 1 or not torch.equal(found[0], found[1])
