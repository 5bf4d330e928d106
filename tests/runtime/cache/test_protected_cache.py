"""Layers that stay uncompressed beside quantised ones: which layers, how many bytes, and what is read."""

from __future__ import annotations

import pytest
import torch

from alspec.config import QUANTISED_CODECS
from alspec.errors import UserError
from alspec.kernels.attention.dispatch import KVLayer
from alspec.kernels.kv_codec.quantised_layer import QuantisedLayer
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import bytes_per_token, cache_bytes, check_codec, new_cache

CPU = torch.device("cpu")
MODEL = LlamaConfig.from_shape("llama-3.2-1b").model_copy(update={"num_layers": 7})


@pytest.mark.parametrize("codec", QUANTISED_CODECS)
@pytest.mark.parametrize("protect", [0, 1, 3])
def test_planned_bytes_are_those_of_the_cache(codec: str, protect: int) -> None:
    config = MODEL.model_copy(update={"num_layers": 7})
    sizes = []
    for tokens in (64, 640):
        cache = new_cache(codec, config, 2, 3, tokens, torch.bfloat16, CPU, protect=protect)
        assert cache.num_bytes == cache_bytes(codec, config, 2, 3, tokens, torch.bfloat16, protect)
        sizes.append(cache.num_bytes)
    per_token = bytes_per_token(codec, config, 2, torch.bfloat16, protect)
    assert sizes[1] - sizes[0] == 3 * 576 * per_token
    kinds = [type(cache.layer(layer)) for layer in range(7)]
    assert kinds == [KVLayer] * protect + [QuantisedLayer] * (7 - 2 * protect) + [KVLayer] * protect


def test_layers_are_kept_apart() -> None:
    """Each layer reads back its own tokens: exactly if it is protected, closely if it is quantised."""
    cache = new_cache("turboquant4", MODEL, 1, 1, 256, torch.float32, CPU, protect=2)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randn(7, 2, 100, cache.num_kv_heads, cache.head_dim, generator=generator)
    q = torch.randn(1, MODEL.num_qo_heads, cache.head_dim, generator=generator)
    reference = new_cache("bf16", MODEL, 1, 1, 256, torch.float32, CPU)
    for layer, (k, v) in enumerate(texts):
        outs = [c.prefill_attention(layer, 0, 0, q, k, v, 0.1, 100) for c in (cache, reference)]
        error = float((outs[0] - outs[1]).norm() / outs[1].norm())
        assert (error == 0) == (layer < 2 or layer >= 5)
        assert error < 0.05


def test_what_cannot_be_protected_is_refused() -> None:
    check_codec("turboquant3", MODEL, 1, 3)
    with pytest.raises(UserError, match="kv_protect: expected less than half of the model's 7 layers, found 4"):
        check_codec("turboquant3", MODEL, 1, 4)
    with pytest.raises(UserError, match="kv_protect: a bf16 cache has no quantised layers"):
        check_codec("bf16", MODEL, 1, 1)
