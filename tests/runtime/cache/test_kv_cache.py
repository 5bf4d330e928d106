"""The static cache: `append` and `write_prefill` write their tokens and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from alspec.runtime.cache.kv_cache import KVCache

L, B, HKV, N, D = 3, 2, 4, 50, 8


@pytest.fixture
def cache() -> KVCache:
    """A cache full of NaN, which show what was not written."""
    cache = KVCache(L, B, HKV, N, D, torch.float32, torch.device("cpu"))
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    return cache


def written(tensor: Tensor) -> set[tuple[int, int, int]]:
    """(layer, request, position) of what is not NaN. A token is written in all heads or in none."""
    is_written = ~tensor.isnan()
    assert torch.equal(is_written.any((2, 4)), is_written.all((2, 4)))
    return {(layer, request, position) for layer, request, position in is_written.all((2, 4)).nonzero().tolist()}


def test_sizes_and_bytes(cache: KVCache) -> None:
    sizes = (cache.num_layers, cache.batch_size, cache.num_kv_heads, cache.max_context, cache.head_dim)
    assert sizes == (L, B, HKV, N, D)
    assert cache.num_bytes == cache.k.nbytes + cache.v.nbytes
    assert cache.num_bytes == B * N * KVCache.bytes_per_token(L, HKV, D, torch.float32)
    assert KVCache.bytes_per_token(32, 8, 128, torch.bfloat16) == 128 * 1024


def test_new_cache_is_zero() -> None:
    cache = KVCache(L, B, HKV, N, D, torch.bfloat16, torch.device("cpu"))
    assert cache.k.dtype == cache.v.dtype == torch.bfloat16
    assert not cache.k.any()
    assert not cache.v.any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_append_writes_the_newest_token_of_each_request(cache: KVCache, dtype: torch.dtype) -> None:
    k, v = torch.randn(2, B, HKV, D)
    cache.append(1, k, v, torch.tensor([8, 50], dtype=dtype))
    assert written(cache.k) == written(cache.v) == {(1, 0, 7), (1, 1, 49)}
    for request, position in ((0, 7), (1, 49)):
        assert torch.equal(cache.k[1, request, :, position], k[request])
        assert torch.equal(cache.v[1, request, :, position], v[request])


def test_a_second_append_overwrites(cache: KVCache) -> None:
    k, v = torch.randn(2, B, HKV, D)
    seq_lens = torch.tensor([4, 4])
    cache.append(0, v, k, seq_lens)
    cache.append(0, k, v, seq_lens)
    assert torch.equal(cache.k[0, :, :, 3], k)
    assert torch.equal(cache.v[0, :, :, 3], v)


def test_a_prompt_is_written_in_chunks(cache: KVCache) -> None:
    k, v = torch.randn(2, 12, HKV, D)
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        keys, values = cache.write_prefill(2, 1, start, k[start:stop], v[start:stop])
        assert torch.equal(keys, k[:stop].transpose(0, 1))
        assert torch.equal(values, v[:stop].transpose(0, 1))
    assert written(cache.k) == written(cache.v) == {(2, 1, position) for position in range(12)}
    assert keys.untyped_storage().data_ptr() == cache.k.untyped_storage().data_ptr()


def test_values_are_stored_in_the_cache_dtype() -> None:
    cache = KVCache(1, 1, HKV, N, D, torch.bfloat16, torch.device("cpu"))
    k, v = torch.randn(2, 1, HKV, D)
    cache.append(0, k, v, torch.tensor([1]))
    cache.write_prefill(0, 0, 1, k, v)
    for position in (0, 1):
        assert torch.equal(cache.k[0, 0, :, position], k[0].bfloat16())
        assert torch.equal(cache.v[0, 0, :, position], v[0].bfloat16())
