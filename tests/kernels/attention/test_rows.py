"""Attention of several rows of a request: bit for bit as one by one, or in one launch that reads the cache once."""

from __future__ import annotations

import math

import pytest
import torch
from comparison import TOLERANCES, close
from flashq_launch import TOLERANCE
from tiers import fast

from alspec.kernels.attention.dispatch import (
    CacheLayer,
    DecodeAttention,
    KVLayer,
    _dense_kv,
    attend_rows,
    attend_workspace,
    rows_together,
)
from alspec.kernels.attention.oracles import decode_attention_ref
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import new_cache

HEAD_DIM, KV_HEADS, QO_HEADS, CONTEXT = 64, 2, 6, 200


def filled(
    codec: str, batch_size: int, context: int, dtype: torch.dtype, device: torch.device, heads_per_kv: int = 3
) -> CacheLayer:
    """The only layer of a cache of random tokens."""
    config = LlamaConfig(
        hidden_size=48, intermediate_size=80, num_layers=1, num_qo_heads=heads_per_kv * KV_HEADS,
        num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=64, rms_norm_eps=1e-5, rope_theta=1e4,
        max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    cache = new_cache(codec, config, 1, batch_size, context, dtype, device)
    for request in range(batch_size):
        k, v = (torch.randn(context, KV_HEADS, HEAD_DIM, dtype=dtype, device=device) for _ in range(2))
        cache.write_prefill(0, request, 0, k, v)
    return cache.layer(0)


@pytest.mark.parametrize("codec", ["bf16", "turbo4", "hybrid-k4v2"])
@pytest.mark.parametrize("first", [(1, 64, 129), (63, 127, 190), (126, 2, 65)])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_rows_have_the_bits_of_single_tokens(
    codec: str, first: tuple[int, ...], num_rows: int, device: torch.device
) -> None:
    """Rows of a request do not go beyond the block of its first; those behind the last one repeat it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = filled(codec, len(first), CONTEXT, dtype, device)
    lengths = torch.tensor(first)
    rows = torch.minimum(torch.arange(num_rows)[:, None], 63 - (lengths - 1) % 64)
    seq_lens = (lengths + rows).int().to(device)
    q = torch.randn(num_rows, len(first), QO_HEADS, HEAD_DIM, dtype=dtype, device=device)
    attention = DecodeAttention([layer], QO_HEADS, 128, HEAD_DIM**-0.5, device)
    found = attention.full_rows(q, layer, seq_lens)
    for row in range(num_rows):
        assert torch.equal(found[row], attention.full(q[row], layer, seq_lens[row]))
    assert num_rows == 1 or not torch.equal(found[0], found[1])


FIRST = [((1,), 2, 3), ((64, 129, 340), 5, 1), ((190, 1, 65, 320), 4, 4), ((250,), 16, 4), ((511, 100), 7, 5)]
FIRST += [((385, 441), 5, 4), ((323,), 7, 2), ((130, 448), 9, 1)]  # over a quantised cache a last bundle of fewer rows
ROW_CASES = [(codec, *case) for codec in ("bf16", "turbo4", "turboquant3") for case in FIRST]


@pytest.mark.parametrize(
    ("codec", "first", "num_rows", "heads_per_kv"),
    fast(ROW_CASES, keep=[ROW_CASES[index] for index in (0, 1, 2, 8, 14, 21)]),
)
def test_one_launch_serves_all_rows(
    codec: str,
    first: tuple[int, ...],
    num_rows: int,
    heads_per_kv: int,
    device: torch.device,
) -> None:
    """Also where rows repeat the one before them, and where a tile holds nothing that a row may see."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tolerance = max(TOLERANCES[dtype], 0.0 if codec == "bf16" else TOLERANCE)
    context, batch_size, heads = 540, len(first), heads_per_kv * KV_HEADS
    layer = filled(codec, batch_size, context, dtype, device, heads_per_kv)
    lengths = torch.tensor(first)[:, None]
    most = torch.randint(num_rows, (batch_size, 1)) if codec == "bf16" else 63 - (lengths - 1) % 64
    row_lens = (lengths + torch.minimum(torch.arange(num_rows), most)).int().to(device)
    q = torch.randn(batch_size * num_rows, heads, HEAD_DIM, dtype=dtype, device=device)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=device)
    workspace = attend_workspace(layer, heads, device, rows=num_rows)
    for buffer in (workspace.o, workspace.lse):
        buffer.fill_(math.nan)
    if isinstance(layer, KVLayer):  # what no row sees may be anything
        for request, end in enumerate(row_lens[:, -1].tolist()):
            layer.k[request, :, end:], layer.v[request, :, end:] = math.nan, math.nan
    together = rows_together(layer, heads, num_rows)
    bundles = -(-num_rows // together)
    # Over a quantised cache, only one of the four numbers of a block is written.
    weights = torch.full(
        (batch_size * bundles, KV_HEADS, 9, 4, together * heads_per_kv),
        math.nan if isinstance(layer, KVLayer) else -math.inf, device=device,
    )  # fmt: skip
    attend_rows(q, layer, row_lens, row_lens[:, -1].contiguous(), 0.1, workspace, out, lse, weights)
    for row in range(num_rows):
        k, v = _dense_kv(layer, row_lens[:, row])
        rows = slice(row, None, num_rows)
        expected, expected_lse = decode_attention_ref(
            q[rows].double(), k.double().nan_to_num(), v.double().nan_to_num(), row_lens[:, row], 0.1
        )
        close(out[rows], expected, tolerance)
        close(lse[rows], expected_lse, tolerance)
        by_row = weights.unflatten(4, (together, -1))[row // together :: bundles, ..., row % together, :]
        for request, length in enumerate(row_lens[:, row].tolist()):
            full = max(0, length // 64 - 2)  # blocks that can be recalled
            mass = torch.exp2(by_row[request, :, :full]).sum(2)  # [Hkv, blocks, heads of each]
            heads_q = q[rows][request].double().unflatten(0, (KV_HEADS, -1))
            scores = 0.1 * torch.einsum("hgd,hnd->hgn", heads_q, k[request, :, : 64 * full].double())
            close(mass, scores.exp().unflatten(2, (-1, 64)).sum(3).transpose(1, 2), tolerance)


@pytest.mark.parametrize("codec", ["bf16", "turbo4"])
def test_weights_of_other_bundles_are_refused(codec: str, device: torch.device) -> None:
    """Their memory could be smaller than what is written."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer, num_rows, heads = filled(codec, 1, 200, dtype, device, 4), 5, 4 * KV_HEADS
    q = torch.zeros(num_rows, heads, HEAD_DIM, dtype=dtype, device=device)
    lengths = torch.full((1, num_rows), 100, dtype=torch.int32, device=device)
    workspace = attend_workspace(layer, heads, device, rows=num_rows)
    lse, weights = torch.zeros(num_rows, heads, device=device), torch.zeros(num_rows, KV_HEADS, 4, 4, 4, device=device)
    with pytest.raises(ValueError, match="block_lse: expected"):
        attend_rows(q, layer, lengths, lengths[:, -1].contiguous(), 0.1, workspace, q, lse, weights)
