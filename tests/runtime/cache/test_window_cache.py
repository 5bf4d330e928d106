"""Rings of the newest tokens: attention, bytes, what they are refused for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comparison import check
from family_models import save_family

from alspec import Engine
from alspec.errors import UserError
from alspec.kernels.attention.dispatch import KVLayer
from alspec.kernels.attention.oracles import prefill_attention_ref
from alspec.kernels.attention.torch_attention import decode_attention, window_prefill_attention
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import cache_bytes, check_window, kept_tokens, new_cache
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
    assert kept_tokens(config, 50) == len(full_layers) * 50 + (3 - len(full_layers)) * window
    assert cache.max_context == 50


def test_a_short_context_needs_no_ring() -> None:
    for config, context in ((windowed(50), 50), (windowed(9, (0, 1, 2)), 50)):
        assert not isinstance(new_cache("bf16", config, 1, 1, context, F32, CPU), WindowCache)
        for mode, codec in (("paired", "bf16"), ("simulated", "turbo4")):
            check_window(codec, mode, config, context)


def test_what_does_not_serve_a_window_says_so() -> None:
    config = windowed(9)
    check_window("bf16", "off", config, 50)
    with pytest.raises(UserError, match="sliding window: speculation paired does not serve the model's window of 9"):
        check_window("bf16", "paired", config, 10)
    with pytest.raises(UserError, match=r"kv_cache turbo4 does not .* in a context of 10; .* of up to 9 tokens$"):
        check_window("turbo4", "off", config, 10)


def test_an_engine_refuses_before_it_loads(tmp_path: Path) -> None:
    save_family(tmp_path, "mistral-window")
    with Engine.from_pretrained(tmp_path, transport="gloo", speculation="simulated") as engine:
        with pytest.raises(UserError, match="speculation simulated does not serve the model's window of 20 tokens"):
            engine.generate([1] * 20, max_new_tokens=1)
        with pytest.raises(UserError, match="context of 21"):
            engine.load(1, 21)
        assert engine.memory is None
        assert isinstance(engine.generate([1] * 16, max_new_tokens=4, ignore_eos=True).token_ids, list)
