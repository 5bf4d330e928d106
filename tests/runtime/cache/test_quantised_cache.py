"""The quantised cache of a rank: its bytes, what prompts and tokens write, and attention over it, on CPU and GPU."""

from __future__ import annotations

import gc
import itertools
from typing import get_args

import pytest
import torch
from paired_ranks import TIMEOUT_NS, pairs
from stored_values import restored_blocks, stored_blocks
from tiers import fast
from torch import Tensor

from alspec.config import QUANTISED_CODECS, SamplingConfig
from alspec.errors import UserError
from alspec.kernels.attention.dispatch import DecodeAttention, attend
from alspec.kernels.attention.oracles import (
    decode_attention_ref,
    prefill_attention_ref,
    speculative_decode_attention_ref,
)
from alspec.kernels.comm.pair_state import PairShape
from alspec.kernels.kv_codec.codec_reference import kv_dequantize
from alspec.kernels.kv_codec.flashq.quantize import fake_quantize, head_priority, select_bits
from alspec.kernels.kv_codec.formats import FORMATS, format_of
from alspec.kernels.kv_codec.quantised_layer import BLOCK, PER_HEAD, QuantisedLayer
from alspec.kernels.speculation.handover import receive_handover
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import bytes_per_token, cache_bytes, check_codec, check_head_dim, new_cache
from alspec.runtime.cache.decode_cache import DecodeCache
from alspec.runtime.cache.kv_cache import KVCache
from alspec.runtime.cache.quantised_cache import QuantisedCache
from alspec.runtime.engine.engine import Engine
from alspec.runtime.profiling.profile import fill
from alspec.sas import DROPPED_MASS, RELATIVE_ERROR, Softmax

CPU = torch.device("cpu")
L, B, H, D = 2, 2, 4, 64
MODEL = LlamaConfig.from_shape("llama-3.1-8b")
by_codec = pytest.mark.parametrize("codec", QUANTISED_CODECS)
by_softmax = pytest.mark.parametrize("softmax", ["exact", "sas"])
by_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted without a GPU")),
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
        ),
    ],
)


def new(codec: str, max_context: int = 500, softmax: Softmax = "exact") -> QuantisedCache:
    return QuantisedCache(codec, L, B, H, max_context, D, CPU, softmax)


def draw(num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """K and V [n, H, D]. Heads and channels differ in size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(2, 1, H, D, generator=generator) * torch.tensor([3.0, 0.5, 2.0, 1.0])[:, None]
    k, v = torch.randn(2, num_tokens, H, D, generator=generator) * sizes + sizes
    return k, v


def write(cache: QuantisedCache, layer: int, request: int, k: Tensor, v: Tensor, chunk: int = 128) -> None:
    for start in range(0, len(k), chunk):
        cache.write_prefill(layer, request, start, k[start : start + chunk], v[start : start + chunk])


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _requested() -> int:
    """Bytes requested from the GPU's allocator, whose blocks may be larger."""
    gc.collect()
    return int(torch.cuda.memory_stats().get("requested_bytes.all.current", 0))


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
        ),
    ],
)
@pytest.mark.parametrize(("codec", "ratio"), [("turbo4", 3.76), ("turbo2", 7.10), ("turbo-mixed", 4.92)])
def test_allocated_bytes_are_the_planned_ones(codec: str, ratio: float, device: str) -> None:
    """Bytes of 16K more tokens, planned and allocated, and their ratio to the bf16 cache."""
    config, sizes = MODEL.model_copy(update={"num_layers": 2}), []
    for tokens in (16384, 32768):
        before = _requested() if device == "cuda" else 0
        cache = new_cache(codec, config, 1, 1, tokens, torch.bfloat16, torch.device(device))
        assert isinstance(cache, QuantisedCache)
        assert cache.num_bytes == cache_bytes(codec, config, 1, 1, tokens, torch.bfloat16)
        if device == "cuda":
            sizes.append(_requested() - before)
            assert 0 <= sizes[-1] - cache.num_bytes < 8192
        else:
            storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in cache._all.tensors.values()}
            sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in storages.values()))
            assert sizes[-1] == cache.num_bytes
        del cache
    per_token = (sizes[1] - sizes[0]) / 16384
    assert per_token == pytest.approx(bytes_per_token(codec, config, 1, torch.bfloat16), rel=1e-3)
    assert KVCache.bytes_per_token(2, 8, 128, torch.bfloat16) / per_token == pytest.approx(ratio, abs=0.01)
    # Each head has a tail at any length.
    assert sizes[0] - 16384 * per_token == pytest.approx(2 * 8 * (2 * BLOCK * 128 + 20), abs=8192)


@by_codec
@pytest.mark.parametrize("max_context", [1, 63, 64, 65, 1000])
def test_planned_bytes_are_those_of_the_tensors(codec: str, max_context: int) -> None:
    cache = QuantisedCache(codec, 3, 2, 4, max_context, 64, CPU)
    assert cache.num_bytes == QuantisedCache.bytes_for(codec, 3, 2, 4, max_context, 64)
    assert cache.num_bytes == sum(tensor.nbytes for tensor in cache._all.tensors.values())
    assert all(len(tensor.flatten()) for tensor in cache._all.tensors.values()), "kernels get addresses"


@by_codec
@pytest.mark.parametrize("max_context", [64, 500, 8191])
@pytest.mark.parametrize("num_heads", [1, 2, 3, 8])
def test_one_compiled_kernel_serves_all_layers(num_heads: int, max_context: int, codec: str) -> None:
    """Triton compiles again for pointers that are no multiple of 16 bytes, except for the `PER_HEAD` ones."""
    if codec == "turbo-mixed" and num_heads % 2:
        pytest.skip("half of the heads have 2 bits")
    cache = QuantisedCache(codec, 10, 1, num_heads, max_context, D, CPU)
    for layer in range(10):
        for name, tensor in cache.layer(layer).tensors.items():
            begins = tensor.data_ptr() - cache.layers.tensors[name].data_ptr()
            assert begins % 16 == 0 or f"{name}_ptr" in PER_HEAD, (layer, name)


@by_codec
def test_prompts_and_tokens_are_read_back(codec: str) -> None:
    """Two requests in two layers, beyond the ends of two blocks, equal the quantised and dequantised input."""
    cache = new(codec)
    lengths = (191, 64)
    texts = {(layer, b): draw(lengths[b] + 70, 10 * layer + b) for layer in range(L) for b in range(B)}
    for (layer, b), (k, v) in texts.items():
        write(cache, layer, b, k[: lengths[b]], v[: lengths[b]])
    for step in range(1, 71):
        for layer in range(L):
            rows = [[texts[layer, b][i][lengths[b] + step - 1] for b in range(B)] for i in range(2)]
            seq_lens = torch.tensor(lengths, dtype=torch.int32) + step
            cache.append(layer, torch.stack(rows[0]), torch.stack(rows[1]), seq_lens)
    seq_lens = torch.tensor(lengths) + 70
    for layer in range(L):
        found = kv_dequantize(cache.layer(layer), seq_lens)
        for b, length in enumerate(lengths):
            bits = cache.layer(layer).bits[b].tolist()
            whole = length // BLOCK * BLOCK
            for is_v, (x, read) in enumerate(zip(texts[layer, b], found, strict=True)):
                own_bits = FORMATS[format_of(codec)][is_v].bits
                for head in range(H):
                    expected = stored_blocks(x[:whole, head], codec, bits[head], bool(is_v))
                    assert torch.equal(read[b, head, :whole], expected)
                    # Appended tokens have the prompt's scale, so outliers are clipped: close, not equal. Scales that
                    # keep the norm of values have a larger error than least squares.
                    most = {4: 0.12, 3: 0.23, 2: 0.42}[own_bits or bits[head]]
                    assert error(read[b, head, whole : length + 70], x[whole:, head]) < most
            assert not found[0][b, :, length + 70 :].any()


def test_heads_are_selected_by_the_first_chunk_of_each_prompt() -> None:
    cache = new("turbo-mixed")
    layer = cache.layer(1)
    k, v = draw(300, 1)
    cache.write_prefill(1, 0, 0, k[:128], v[:128])
    expected = select_bits(head_priority(k[:128].transpose(0, 1), v[:128].transpose(0, 1)), H // 2)
    assert sorted(expected.tolist()) == [2, 2, 4, 4]
    assert expected.tolist() != [2, 2, 4, 4], "the heads of a cache without a prompt"
    assert torch.equal(layer.bits[0], expected)
    other = k.flip(1) * 7
    cache.write_prefill(1, 0, 128, other[128:256], v[128:256])
    assert torch.equal(layer.bits[0], expected)
    write(cache, 1, 1, other, v.flip(1))
    assert torch.equal(layer.bits[1], expected.flip(0))
    assert torch.equal(layer.bits[0], expected)
    # A new prompt overwrites scales, heads and records, as in an empty cache.
    again = new("turbo-mixed")
    write(again, 1, 0, other[:200], v.flip(1)[:200])
    write(cache, 1, 0, other[:200], v.flip(1)[:200])
    for a, b in zip(*(kv_dequantize(c.layer(1), torch.tensor([200])) for c in (cache, again)), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(cache.layer(1).tail_scale[0], again.layer(1).tail_scale[0])


CACHES = list(itertools.product(QUANTISED_CODECS, get_args(Softmax)))
FAST_CACHES = [(codec, "sas" if codec == "turbo4" else "exact") for codec in QUANTISED_CODECS]


@pytest.mark.parametrize(("codec", "softmax"), fast(CACHES, FAST_CACHES))
def test_prefill_attention_equals_the_reference(codec: str, softmax: Softmax) -> None:
    """Causal attention of a prompt chunk or a part of one, over its own stage-1 values and the records before it."""
    cache = new(codec, softmax=softmax)
    k, v = draw(330, 2)
    q = 4 * torch.randn(330, 2 * H, D, generator=torch.Generator().manual_seed(3))  # SAS drops weights
    for start in (0, 128, 256):
        part = slice(start, start + 128)
        stop = min(start + 128, 330)
        found = cache.prefill_attention(0, 1, start, q[part], k[part], v[part], D**-0.5, stop)
        bits = cache.layer(0).bits[1].tolist()

        def read(x: Tensor, is_v: bool, part: slice = part, bits: list[int] = bits) -> Tensor:
            heads = [restored_blocks(x[: part.start, head], codec, bits[head], is_v) for head in range(H)]
            return torch.cat([torch.stack(heads), fake_quantize(x[part].transpose(0, 1), 8)], dim=1)

        expected = prefill_attention_ref(q[part], read(k, False), read(v, True), D**-0.5, softmax)
        assert error(found, expected) < 2e-6
        for first, last in ((0, 64), (64, stop - start), (5, 7)):
            own = q[start + first : start + last]
            found = cache.prefill_attention(0, 1, start, own, k[part], v[part], D**-0.5, start + last)
            assert error(found, expected[first:last]) < 2e-6


@by_softmax
@by_codec
def test_decode_attention_equals_the_reference(codec: str, softmax: Softmax) -> None:
    """`A`, `A~` and the sums on CPU tensors, over the dequantised cache in fp64."""
    cache = new(codec, softmax=softmax)
    lengths = torch.tensor([400, 129], dtype=torch.int32)
    for b, n in enumerate(lengths.tolist()):
        k, v = draw(n, 4 + b)
        write(cache, 1, b, k[:-1], v[:-1])
    new_k, new_v = (torch.randn(B, H, D, generator=torch.Generator().manual_seed(seed)) for seed in (6, 7))
    cache.append(1, new_k, new_v, lengths)
    q = torch.randn(B, 2 * H, D, generator=torch.Generator().manual_seed(8))
    keys, values = kv_dequantize(cache.layer(1), lengths, torch.float64)
    attention = DecodeAttention([cache.layer(1)], 2 * H, 128, D**-0.5, CPU)
    expected, _ = decode_attention_ref(q, keys, values, lengths, D**-0.5, softmax)
    assert error(attention.full(q, cache.layer(1), lengths), expected) < 2e-6
    spec, full, sums = speculative_decode_attention_ref(q, keys, values, lengths, 128, D**-0.5, softmax)
    assert error(attention.predict(q, cache.layer(1), lengths), spec) < 2e-6
    found_full, found_sums = attention.verify(q, cache.layer(1), lengths)
    # SAS weights of the other tokens are relative to their own maximum.
    apart = 2 * RELATIVE_ERROR if softmax == "sas" else 0
    assert error(found_full, full) < 2e-6 + apart
    assert error(found_sums.sqrt(), sums.sqrt()) < 1e-5 + apart


@by_codec
def test_a_filled_cache_holds_normal_numbers(codec: str) -> None:
    """`profile.fill` gives every layer, request and head the spread of normal numbers."""
    cache = new(codec)
    fill(cache, seed=0)
    for layer in range(L):
        for x in kv_dequantize(cache.layer(layer), torch.tensor([500, 500])):
            std = x.std((2, 3))
            # Two bits of FlashQ add a variance of a third; least squares remove an eighth of that of TurboQuant's keys.
            assert bool(((std > 0.9) & (std < 1.25)).all())
            assert len(set(x[:, :, 7, 3].flatten().tolist())) > 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@by_codec
def test_a_gpu_holds_the_same_bits(codec: str) -> None:
    caches = [QuantisedCache(codec, L, B, H, 1000, D, torch.device(device)) for device in ("cpu", "cuda")]
    lengths = (391, 640)
    for layer, request in itertools.product(range(L), range(B)):
        k, v = (x.bfloat16() for x in draw(lengths[request], layer + 2 * request))
        for cache in caches:
            write(cache, layer, request, k.to(cache.device), v.to(cache.device))
    for step in range(1, 130):
        new_k, new_v = torch.randn(2, B, H, D).bfloat16()
        seq_lens = torch.tensor(lengths, dtype=torch.int32) + step
        for layer, cache in itertools.product(range(L), caches):
            cache.append(layer, new_k.to(cache.device), new_v.to(cache.device), seq_lens.to(cache.device))
    for name, expected in caches[0]._all.tensors.items():
        assert torch.equal(getattr(caches[1]._all, name).cpu(), expected), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@by_softmax
@by_codec
def test_captured_steps_give_the_tokens_of_simulated_steps(codec: str, softmax: Softmax) -> None:
    """The demo checkpoint in fp32, beyond the end of a block, at lambda = 0."""
    found = {}
    for mode in ("off", "simulated"):
        speculation = {"mode": mode, "threshold": 0.0}
        engine = Engine.from_pretrained(dtype="fp32", kv_cache=codec, softmax=softmax, speculation=speculation)
        tokens = engine.stream("The old man walked into the village and said " * 40, SamplingConfig(max_new_tokens=80))
        found[mode] = [token.token_id for token in tokens]
        assert engine.uses_graph == (mode == "off")
        engine.close()
    assert len(found["off"]) == 80
    assert found["off"] == found["simulated"]


@by_device
@pytest.mark.parametrize("codec", fast(QUANTISED_CODECS, ["turbo-mixed"]))
def test_fused_decoding_writes_the_bits_of_the_eager_step(codec: str, device: str) -> None:
    """A handover writes the token that completes a block, and the next one, which reads the block as a record."""
    place, head_dim, num_heads = torch.device(device), 64, 8
    plain, fused = (QuantisedCache(codec, 1, 1, 2, 512, head_dim, place) for _ in range(2))
    k, v = torch.randn(2, 127, 2, head_dim, generator=torch.Generator().manual_seed(4)).to(place)
    for cache in (plain, fused):
        cache.write_prefill(0, 0, 0, k, v)
    seq_lens = torch.tensor([127], dtype=torch.int32, device=place)
    decode = DecodeCache(fused, seq_lens, num_heads, D**-0.5, torch.float32)
    _, (receiver,) = pairs(place, PairShape(1, 1, 1, 16, num_heads, 2, head_dim), 6)
    receiver.is_receiver.fill_(1)
    receiver.own.spec_out.fill_(6 << 32)
    x = torch.zeros(1, 16, device=place)
    attention = DecodeAttention([plain.layer(0)], num_heads, 128, head_dim**-0.5, place)
    for seed in range(3):
        seq_lens += 1
        new_k, new_v = torch.randn(2, 1, 2, head_dim, generator=torch.Generator().manual_seed(seed)).to(place)
        q = torch.randn(1, num_heads, head_dim, generator=torch.Generator().manual_seed(9 + seed)).to(place)
        plain.append(0, new_k, new_v, seq_lens)
        expected = attention.full(q, plain.layer(0), seq_lens)
        words = torch.cat([new_k.flatten(), new_v.flatten()]).view(torch.int32).long() & 0xFFFFFFFF | 6 << 32
        receiver.own.inbox[0, 0, 16:] = words
        receive_handover(receiver, 0, x, decode.layers[0], seq_lens, torch.empty_like(q), TIMEOUT_NS)
        out, lse = torch.full_like(q, torch.nan), torch.empty(1, num_heads, device=place)
        attend(q, decode.layers[0], seq_lens, decode.sm_scale, decode.workspace(0), out, lse)
        assert error(out, expected) < 2**-10
        decode.compact()
        for name, tensor in plain.layer(0).tensors.items():
            assert torch.equal(tensor, getattr(fused.layer(0), name)), name


@by_device
def test_attention_uses_the_softmax_of_the_cache(device: str) -> None:
    """Prompts, the eager step and the fused decoder: SAS is close to the exact softmax and not equal."""
    place, num_heads = torch.device(device), 2 * H
    k, v = (x.to(place) for x in draw(400, 5))
    q = 3 * torch.randn(400, num_heads, D, generator=torch.Generator().manual_seed(6)).to(place)
    seq_lens = torch.tensor([400], dtype=torch.int32, device=place)
    outs: dict[Softmax, list[Tensor]] = {}
    for softmax in get_args(Softmax):
        cache = QuantisedCache("turbo4", 1, 1, H, 512, D, place, softmax)
        outs[softmax] = [cache.prefill_attention(0, 0, 0, q, k, v, D**-0.5, 400)]
        layer, newest = cache.layer(0), q[-1:].contiguous()
        attention = DecodeAttention([layer], num_heads, 128, D**-0.5, place)
        outs[softmax] += [attention.full(newest, layer, seq_lens).clone()]
        outs[softmax] += [attention.predict(newest, layer, seq_lens).clone()]
        outs[softmax] += [attention.verify(newest, layer, seq_lens)[0].clone()]
        out, lse = torch.full_like(newest, torch.nan), torch.empty(1, num_heads, device=place)
        decode = DecodeCache(cache, seq_lens, num_heads, D**-0.5, torch.float32)
        attend(newest, decode.layers[0], seq_lens, decode.sm_scale, decode.workspace(0), out, lse)
        outs[softmax] += [out]
    most = 2 * (RELATIVE_ERROR + DROPPED_MASS) * float(v.abs().max())
    for exact, sas in zip(outs["exact"], outs["sas"], strict=True):
        assert 0 < float((exact - sas).abs().max()) < most


def test_chunks_must_begin_at_a_block() -> None:
    with pytest.raises(AssertionError, match="begins at 32"):
        new("turbo4").write_prefill(0, 0, 32, *draw(4, 0))


def test_a_codec_refuses_models_that_do_not_fit() -> None:
    for codec in ("bf16", *QUANTISED_CODECS):
        check_codec(codec, MODEL, 4)
    with pytest.raises(UserError, match=r"kv_cache: turbo-mixed needs two KV heads on a rank, found 1"):
        check_codec("turbo-mixed", MODEL, 8)
    check_codec("turbo4", MODEL, 8)
    with pytest.raises(UserError, match=r"kv_cache: turbo2 needs a head_dim of up to 128, the model has 160"):
        check_codec("turbo2", MODEL.model_copy(update={"head_dim": 160}), 1)
    # 8 query heads for each KV head, then 9.
    check_codec("turbo4", MODEL.model_copy(update={"num_kv_heads": 4}), 1)
    with pytest.raises(UserError, match=r"kv_cache: turbo4 takes up to 8 query heads for each KV head, a rank has 9"):
        check_codec("turbo4", MODEL.model_copy(update={"num_qo_heads": 36, "num_kv_heads": 4}), 1)
    check_codec("bf16", MODEL.model_copy(update={"head_dim": 96}), 8)


def test_small_heads_are_refused_on_gpus() -> None:
    """The check comes before loading, since decode attention would not compile."""
    for head_dim in (2, 14):
        small = MODEL.model_copy(update={"head_dim": head_dim})
        check_head_dim(small, torch.device("cpu"))
        with pytest.raises(UserError, match=rf"head_dim: expected 16 or more on a GPU, the model has {head_dim}; use"):
            check_head_dim(small, torch.device("cuda"))
    check_head_dim(MODEL.model_copy(update={"head_dim": 16}), torch.device("cuda"))


@pytest.mark.parametrize(
    ("codec", "protect"), [("bf16", 0), *((codec, 0) for codec in QUANTISED_CODECS), ("turbo4", 1)]
)
def test_a_copied_prompt_is_as_if_it_had_been_written(codec: str, protect: int) -> None:
    """Both requests hold the same, wherever their records lie, and the next tokens are appended alike."""
    config = MODEL.model_copy(update={"num_layers": 3, "num_kv_heads": H, "num_qo_heads": H, "head_dim": D})
    other, prompt = draw(197, seed=1), draw(130, seed=2)
    lengths = torch.tensor([198, 131, 131], dtype=torch.int32)
    caches = [new_cache(codec, config, 1, 3, 500, torch.float32, CPU, protect=protect) for _ in range(2)]
    for cache, last in zip(caches, (prompt, other), strict=True):  # something else lies there before the copy
        for layer, (request, (k, v)) in itertools.product(range(3), enumerate((other, prompt, last))):
            for start in range(0, len(k), 128):
                cache.write_prefill(layer, request, start, k[start : start + 128], v[start : start + 128])
        if last is other:
            cache.copy_prompt(1, 2)
        for layer in range(3):
            cache.append(layer, *draw(3, seed=3), lengths)
    for layer in range(3):
        written, copied = (cache.layer(layer) for cache in caches)
        if isinstance(written, QuantisedLayer) and isinstance(copied, QuantisedLayer):
            for name in ("offset", "bits", "tail_scale"):
                assert torch.equal(getattr(written, name), getattr(copied, name)), name
            kept = [kv_dequantize(each, lengths) for each in (written, copied)]
        else:
            kept = [(each.k[:, :, :131], each.v[:, :, :131]) for each in (written, copied)]
        assert torch.equal(kept[0][0], kept[1][0])
        assert torch.equal(kept[0][1], kept[1][1])
