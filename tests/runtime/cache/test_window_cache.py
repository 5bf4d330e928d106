"""Caches of models with a sliding window: rings of the newest tokens, and whole contexts; attention and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comparison import check
from family_models import save_family

from alspec import Engine
from alspec.kernels.attention.dispatch import KVLayer
from alspec.kernels.attention.oracles import prefill_attention_ref
from alspec.kernels.attention.torch_attention import decode_attention, window_prefill_attention
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import bytes_per_token, cache_bytes, new_cache, read_bytes, read_tokens
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.cache.window_cache import WindowCache

CPU, F32 = torch.device("cpu"), torch.float32
SIZES = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 50, "num_qo_heads": 4, "num_kv_heads": 2}


def windowed(window: int, full_layers: tuple[int, ...] = (1,), num_layers: int = 3) -> LlamaConfig:
    options = {"sliding_window": window, "full_layers": full_layers, "num_layers": num_layers}
    return LlamaConfig(**(SIZES | options), head_dim=8)


@pytest.mark.parametrize(
    ("num_queries", "num_tokens", "window"), [(1, 1, 1), (5, 9, 3), (300, 700, 7), (600, 600, 290)]
)
def test_a_token_attends_to_its_window(num_queries: int, num_tokens: int, window: int) -> None:
    q, k, v = torch.randn(num_queries, 4, 8), torch.randn(2, num_tokens, 8), torch.randn(2, num_tokens, 8)
    found = window_prefill_attention(q, k, v, 0.3, window)
    check(found, prefill_attention_ref(q, k, v, 0.3, window=window), F32)


@pytest.mark.parametrize("lengths", [[1, 5], [11, 12], [13, 40]])
def test_a_ring_is_read_as_any_cache(lengths: list[int]) -> None:
    """Token by token from the first on; the ring has NaN where nothing was written."""
    cache = new_cache("bf16", windowed(12), 1, 2, 50, F32, CPU)
    assert isinstance(cache, WindowCache)
    for layer in range(3):
        for tensor in cache.layer(layer)[:2]:
            assert isinstance(tensor, torch.Tensor)
            tensor.fill_(torch.nan)
    k, v = torch.randn(2, 2, 40, 2, 8)
    for layer in (0, 1):
        for position in range(max(lengths)):
            seq_lens = torch.tensor([min(position + 1, length) for length in lengths])
            at = seq_lens - 1
            cache.append(layer, k[[0, 1], at], v[[0, 1], at], seq_lens)
        kv = cache.layer(layer)
        assert isinstance(kv, KVLayer)
        assert kv.is_ring == (layer != 1)
        q, seq_lens = torch.randn(2, 4, 8), torch.tensor(lengths)
        found = decode_attention(q, kv.k, kv.v, kv.lengths(seq_lens), 0.3)[0]
        for request, length in enumerate(lengths):
            keys, values = (x[request, :length].transpose(0, 1) for x in (k, v))
            window = 12 if layer != 1 else None
            expected = prefill_attention_ref(q[request][None], keys, values, 0.3, window=window)
            check(found[request], expected[0], F32)


@pytest.mark.parametrize(("window", "full_layers"), [(12, (1,)), (12, ()), (49, (0, 2))])
def test_bytes(window: int, full_layers: tuple[int, ...]) -> None:
    config = windowed(window, full_layers)
    cache = new_cache("bf16", config, 2, 3, 50, F32, CPU)
    assert isinstance(cache, WindowCache)
    assert cache.num_bytes == cache_bytes("bf16", config, 2, 3, 50, F32)
    assert read_tokens(config, 50) == len(full_layers) * 50 + (3 - len(full_layers)) * window
    assert cache.max_context == 50
    whole = new_cache("bf16", config, 2, 3, 50, F32, CPU, keeps_context=True)
    assert isinstance(whole, KVCache)
    assert whole.num_bytes == cache_bytes("bf16", config, 2, 3, 50, F32, keeps_context=True) == 3 * 3 * 50 * 2 * 8 * 4
    assert [whole.layer(layer).sliding_window for layer in range(3)] == config.windows(50)


@pytest.mark.parametrize(("codec", "protect"), [("bf16", 0), ("turbo4", 0), ("hybrid-k4v2", 1)])
def test_bytes_that_a_step_reads(codec: str, protect: int) -> None:
    """Layers with a window read no more than its tokens, in every cache; protected layers are uncompressed."""
    config = windowed(100, (0, 3), num_layers=4).model_copy(update={"head_dim": 64})
    per_layer = [bytes_per_token(codec, config.model_copy(update={"num_layers": n}), 1, F32) for n in (1, 2)]
    exact = bytes_per_token("bf16", config.model_copy(update={"num_layers": 1}), 1, F32)
    assert per_layer[1] == 2 * per_layer[0]
    for context in (99, 101, 640):
        outer = exact if protect else per_layer[0]
        expected = 2 * context * outer + 2 * min(context, 100) * per_layer[0]
        assert read_bytes(codec, config, 1, F32, context, protect) == expected


def test_a_short_context_needs_no_ring() -> None:
    for config, context in ((windowed(50), 50), (windowed(9, (0, 1, 2)), 50)):
        cache = new_cache("bf16", config, 1, 1, context, F32, CPU)
        assert not isinstance(cache, WindowCache)
        assert {cache.layer(layer).sliding_window for layer in range(3)} == {None}


@pytest.mark.parametrize("codec", ["turbo4", "turboquant3", "hybrid-k4v2"])
@pytest.mark.parametrize("protect", [0, 1])
def test_layers_of_a_quantised_cache_know_their_windows(codec: str, protect: int) -> None:
    config = windowed(70, (1,), num_layers=4).model_copy(update={"head_dim": 64})
    cache = new_cache(codec, config, 1, 1, 200, F32, CPU, protect=protect)
    assert [cache.layer(layer).sliding_window for layer in range(4)] == [70, None, 70, 70]
    assert isinstance(cache.layer(0), KVLayer) == (protect == 1)


@pytest.mark.parametrize(
    ("options", "for_turns", "has_ring"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"speculation": "simulated"}, False, False),
        ({"draft": "ngram"}, False, False),
        ({"kv_cache": "turbo4"}, False, False),
    ],
)
def test_what_reads_older_tokens_keeps_them(
    options: dict[str, str], for_turns: bool, has_ring: bool, tmp_path: Path
) -> None:
    """A ring serves plain steps alone. The memory plan knows which one it is."""
    save_family(tmp_path, "qwen2-window")
    with Engine.from_pretrained(tmp_path, transport="gloo", dtype="fp32", **options) as engine:
        engine.load(1, 80, for_turns=for_turns)
        assert isinstance(engine.cache, WindowCache) == has_ring
        assert engine.memory is not None
        assert engine.cache.num_bytes == engine.memory.cache_bytes
