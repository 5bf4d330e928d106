"""Decode attention with a sliding window over a cache that holds the whole context, against fp64.

What lies in front of the window is NaN, or large where it shares a block of 64 tokens with the window.
"""

from __future__ import annotations

import itertools
import math

import flashq_launch
import lean_launch
import pytest
import torch
from attention_launch import HAS_CUDA, S
from comparison import TOLERANCES, check, close
from tiers import fast
from torch import Tensor

from alspec.kernels.attention.dispatch import CacheLayer, DecodeAttention, KVLayer, attend_rows, attend_workspace
from alspec.kernels.attention.oracles import (
    decode_attention_ref,
    prefill_attention_ref,
    speculative_decode_attention_ref,
)
from alspec.kernels.attention.torch_attention import (
    decode_attention,
    dequantized_prefill_attention,
    predictor_attention,
    verify_attention,
    window_prefill_attention,
)
from alspec.kernels.kv_codec.flashq.quantize import dequantize, quantize_int8
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import new_cache
from alspec.sas import RELATIVE_ERROR

EDGES = (1, 63, 64, 65, 127, 128, 129)
LENGTHS = (1, 64, 65, 128, 191, 193, 320, 450)
# Around a block, around S, where sink and window meet, and where a rest lies between them.
WIDE = (2 * S - 1, 2 * S + 1, 2 * S + 63, 2 * S + 64, 2 * S + 65, 400)
WINDOWS = EDGES + WIDE
CPU = torch.device("cpu")
BY_WINDOW = fast(list(itertools.product(WINDOWS, (0, S))), keep=[(65, 0), (1, S), (128, S), (321, S)])
QUANTISED = [("turbo-mixed", 1), ("turbo4", 4), ("turboquant3", 1), ("hybrid-k4v2", 4)]


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_CUDA, reason="interpreted only where there is no GPU")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU")]),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The kernel runs in the interpreter, or compiled on a GPU."""
    return torch.device(request.param)


def edges_of(sliding_window: int) -> tuple[int, ...]:
    """Lengths at which the window begins with a block, one token before it and one behind it, and shorter ones."""
    return tuple(max(1, sliding_window + begin) for begin in (-1, 0, 1, 63, 64, 65, 130))


@pytest.mark.parametrize("sliding_window", WINDOWS)
def test_torch_operators(sliding_window: int) -> None:
    """Every kind of length beside every window, with and without `A~`."""
    launch = lean_launch.Launch.draw(LENGTHS + edges_of(sliding_window), 3, 2, 16, CPU, 4, 0)
    launch.slide(sliding_window)
    args = launch.q, launch.k, launch.v, launch.seq_lens
    for softmax in ("exact", "sas"):
        how = launch.sm_scale, softmax, sliding_window
        spec_out, full_out, _ = speculative_decode_attention_ref(*args, S, *how)
        near = predictor_attention(*args, S, *how)
        for found, expected in (
            (decode_attention(*args, *how)[0], full_out),
            (near[0], spec_out),
            (verify_attention(*args, *near, S, *how)[0], full_out),
        ):
            # Parts with SAS weights are relative to their own maxima.
            close(found, expected, 2e-6 if softmax == "exact" else 2 * RELATIVE_ERROR)


@pytest.mark.parametrize(("sliding_window", "chunk_size"), BY_WINDOW)
@pytest.mark.parametrize("head_dim", fast([64, 80, 256], keep=[64]))
def test_lean_kernel(sliding_window: int, chunk_size: int, head_dim: int, device: torch.device) -> None:
    """A ragged batch, and single requests whose window begins around the edge of a block."""
    lengths = edges_of(sliding_window)
    dtypes = [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]
    for dtype, batch in itertools.product(dtypes, (lengths, lengths[-1:], lengths[2:3])):
        parts = 2 if chunk_size and len(batch) == 1 else 1
        launch = lean_launch.Launch.draw(batch, 3, 2, head_dim, device, 7, chunk_size, dtype, parts)
        launch.slide(sliding_window)
        launch.run()
        launch.compare(check)


@pytest.mark.parametrize(("sliding_window", "chunk_size"), BY_WINDOW)
@pytest.mark.parametrize(("codec", "num_warps"), fast(QUANTISED, keep=QUANTISED[:1]))
def test_quantised_kernel(
    sliding_window: int, chunk_size: int, codec: str, num_warps: int, device: torch.device
) -> None:
    lengths = edges_of(sliding_window)
    for batch in (lengths, lengths[-1:], lengths[2:3]):
        parts = 2 if chunk_size and len(batch) == 1 else 1
        launch = flashq_launch.draw(
            batch, 3, 2, 64, device, 9, chunk_size, codec, num_warps=num_warps, parts=parts, scale=0.05
        )
        launch.slide(sliding_window)
        launch.run()
        launch.compare()


@pytest.mark.parametrize("sliding_window", fast([63, 65, 200], keep=[65]))
@pytest.mark.parametrize("kind", ["lean", "turbo4"])
def test_two_launches_give_the_result_of_one(kind: str, sliding_window: int, device: torch.device) -> None:
    lengths = (450, 66, 193)
    if kind == "lean":
        lean = lean_launch.Launch.draw(lengths, 2, 2, 64, device, 7, S)
        lean.slide(sliding_window)
        lean.in_two = True
        lean.run()
        lean.compare(check)
        return
    quantised = flashq_launch.draw(lengths, 2, 2, 64, device, 7, S, kind)
    quantised.slide(sliding_window)
    quantised.run("predictor", "rest")
    quantised.compare()


def test_sas_weights(device: torch.device) -> None:
    for sliding_window, chunk_size in ((65, 0), (321, S)):
        launch = flashq_launch.draw((450, 130), 4, 2, 64, device, 9, chunk_size)
        launch.softmax = "sas"
        launch.slide(sliding_window)
        launch.run()
        launch.compare()


def filled(codec: str, sliding_window: int, context: int, batch_size: int, device: torch.device) -> CacheLayer:
    """The only layer of a cache of random tokens, which holds the whole context."""
    config = LlamaConfig(
        hidden_size=48, intermediate_size=80, num_layers=1, num_qo_heads=6, num_kv_heads=2, head_dim=64, vocab_size=64,
        max_position_embeddings=512, sliding_window=sliding_window,
    )  # fmt: skip
    cache = new_cache(codec, config, 1, batch_size, context, torch.float32, device, keeps_context=True)
    for request in range(batch_size):
        k, v = (torch.randn(context, 2, 64, device=device) for _ in range(2))
        cache.write_prefill(0, request, 0, k, v)
    layer = cache.layer(0)
    assert layer.sliding_window == sliding_window
    return layer


ROWS = [(codec, *case) for codec in ("bf16", "turbo4", "turboquant3") for case in (((66, 259), 5), ((130, 1), 4))]


@pytest.mark.parametrize("sliding_window", fast(EDGES, keep=[1, 64, 65]))
@pytest.mark.parametrize(("codec", "first", "num_rows"), fast(ROWS, keep=[ROWS[3]]))
def test_each_row_has_its_own_window(
    codec: str, first: tuple[int, ...], num_rows: int, sliding_window: int, device: torch.device
) -> None:
    """Rows of a request, some of which repeat the one before them. The weights of blocks are those of each row, too."""
    layer = filled(codec, sliding_window, 300, len(first), device)
    lengths = torch.tensor(first)[:, None]
    row_lens = (lengths + torch.minimum(torch.arange(num_rows), 63 - (lengths - 1) % 64)).int().to(device)
    q = torch.randn(len(first) * num_rows, 6, 64, device=device)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=device)
    workspace = attend_workspace(layer, 6, device, rows=num_rows)
    is_lean = isinstance(layer, KVLayer)
    shape = (len(first), 2, 5, 4, num_rows * 3) if is_lean else (len(first) * num_rows, 2, 5, 4, 3)
    weights = torch.full(shape, -math.inf, device=device)
    attend_rows(q, layer, row_lens, row_lens[:, -1].contiguous(), 0.1, workspace, out, lse, weights)
    plain = DecodeAttention([layer], 6, S, 0.1, device)
    for row in range(num_rows):
        rows = slice(row, None, num_rows)
        expected, expected_lse, k = row_oracle(layer, q[rows], row_lens[:, row])
        tolerance = TOLERANCES[torch.float32] if is_lean else flashq_launch.TOLERANCE
        close(out[rows], expected, tolerance)
        close(lse[rows], expected_lse, tolerance)
        close(plain.full(q[rows].contiguous(), layer, row_lens[:, row].contiguous()), expected, tolerance)
        by_row = weights.unflatten(4, (num_rows, -1))[..., row, :] if is_lean else weights[rows]
        for request, n in enumerate(row_lens[:, row].tolist()):
            start, full = max(0, n - sliding_window), max(0, n // 64 - 2)
            scores = 0.1 * q[rows][request].double().cpu().unflatten(0, (2, -1)) @ k[request].transpose(1, 2)
            scores[..., :start] = -math.inf
            expected_mass = scores[..., : 64 * full].exp().unflatten(2, (-1, 64)).sum(3).transpose(1, 2)
            first_block = min(start // 64, full)
            mass = torch.exp2(by_row[request, :, first_block:full].cpu().double()).sum(2)
            close(mass, expected_mass[:, first_block:], 10 * tolerance)


def row_oracle(layer: CacheLayer, q: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and lse of one row of each request in fp64, and the keys."""
    from alspec.kernels.attention.dispatch import _dense_kv

    k, v = (x.double().cpu().nan_to_num() for x in _dense_kv(layer, lengths))
    out, lse = decode_attention_ref(q.double().cpu(), k, v, lengths.cpu(), 0.1, "exact", layer.sliding_window)
    return out, lse, k


@pytest.mark.parametrize("sliding_window", EDGES)
@pytest.mark.parametrize(("num_queries", "num_tokens"), [(1, 200), (70, 200), (300, 300), (5, 64)])
def test_prompts(num_queries: int, num_tokens: int, sliding_window: int) -> None:
    """Over floating-point and over INT8 keys and values, of which only blocks with visible tokens are read."""
    q, k, v = torch.randn(num_queries, 6, 16), torch.randn(2, num_tokens, 16), torch.randn(2, num_tokens, 16)
    check(
        window_prefill_attention(q, k, v, 0.3, sliding_window),
        prefill_attention_ref(q, k, v, 0.3, window=sliding_window),
        torch.float32,
    )
    sas = prefill_attention_ref(q, k, v, 0.3, "sas", sliding_window)
    close(window_prefill_attention(q, k, v, 0.3, sliding_window, "sas"), sas, 1e-5)
    (k8, k_scale), (v8, v_scale) = (quantize_int8(x, 64) for x in (k, v))
    dense = dequantize(k8, k_scale), dequantize(v8, v_scale)
    hidden = max(0, num_tokens - num_queries + 1 - sliding_window) // 64
    k_scale[:, :hidden], v_scale[:, :hidden] = math.nan, math.nan
    found = dequantized_prefill_attention(q, k8, v8, k_scale, v_scale, 0.3, window=sliding_window)
    check(found, prefill_attention_ref(q, *dense, 0.3, window=sliding_window), torch.float32)
