"""One pass over a text reads from a quantised cache what decoding token by token reads."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiers import fast
from torch import Tensor

from alspec.config import QUANTISED_CODECS, SpeculationConfig
from alspec.kernels.attention.oracles import decode_attention_ref, speculative_decode_attention_ref
from alspec.kernels.attention.torch_attention import prefill_attention, window_prefill_attention
from alspec.kernels.kv_codec.flashq.quantize import compress, dequantize, quantize_int8, reconstruct
from alspec.kernels.kv_codec.formats import FLASHQ, FORMATS, TURBOQUANT, rotates_values
from alspec.kernels.kv_codec.turboquant.rotation import rotation
from alspec.kernels.kv_codec.turboquant.token_codes import compress_tokens, dequantize_tokens
from alspec.kernels.kv_codec.turboquant.variants import codebook_tokens, sketched_keys, uniform_values
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.runtime.cache.quantised_cache import QuantisedCache
from alspec.runtime.engine.engine import Engine
from alspec.runtime.eval import teacher_forced as module
from alspec.runtime.eval.quality import score_text
from alspec.runtime.eval.teacher_forced import (
    CODECS,
    SOFTMAXES,
    CacheSetting,
    cache_text,
    has_turboquant_keys,
    prompt_attention,
    teacher_forced_attention,
)
from alspec.sas import DROPPED_MASS, RELATIVE_ERROR, Softmax

SM_SCALE = 0.3
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
Array = np.ndarray


class SlowCache:
    """Keys or values of one layer, [H, n, D], stored token by token; written from the equations, in fp64.

    TurboQuant: `turn` is the rotation of values; stage 2 of a block is that of the codec.
    """

    def __init__(
        self, prompt: Tensor, bits: list[int], block: int, method: str = FLASHQ, turn: Tensor | None = None
    ) -> None:
        self.bits, self.block, self.method, self.turn = bits, block, method, turn
        x = self._rotated(prompt.float()).numpy()
        whole = x.shape[1] // block * block
        pieces = [x[:, i : i + block] for i in range(0, x.shape[1], block)]
        scales = [np.abs(piece).max((1, 2)) / np.float32(119) for piece in pieces]
        codes = [self._codes(piece, scale) for piece, scale in zip(pieces, scales, strict=True)]
        self.universal = np.max(scales, axis=0)
        # What the prompt's own attention reads.
        blocks = [c * s[:, None, None] for c, s in zip(codes, scales, strict=True)]
        self.prompt = self._rotated_back(torch.from_numpy(np.concatenate(blocks, axis=1)))
        self.records = [self._compressed(c, s) for c, s in zip(codes, scales, strict=True)][: whole // block]
        self.tail: list[Array] = []
        for t in range(whole, x.shape[1]):
            self._append(x[:, t])

    def append(self, token: Tensor) -> None:
        """Store one token [H, D]; a full tail becomes a record when the next token comes."""
        self._append(self._rotated(token.float()).numpy())

    def _append(self, token: Array) -> None:
        if len(self.tail) == self.block:
            self.records.append(self._compressed(np.stack(self.tail, 1), self.universal))
            self.tail = []
        self.tail.append(self._codes(token[:, None].astype(np.float32), self.universal)[:, 0])

    def read(self) -> Tensor:
        """Everything stored, [H, n, D] fp64."""
        tail = np.stack(self.tail, 1) * self.universal[:, None, None].astype(np.float64)
        return self._rotated_back(torch.from_numpy(np.concatenate([*self.records, tail], axis=1)))

    def _rotated(self, x: Tensor) -> Tensor:
        return x if self.turn is None else x @ self.turn.T

    def _rotated_back(self, x: Tensor) -> Tensor:
        return x if self.turn is None else x @ self.turn.to(x.dtype)

    @staticmethod
    def _codes(x: Array, scale: Array) -> Array:
        return np.clip(np.rint(x / scale[:, None, None]), -119, 119)

    def _compressed(self, codes: Array, scale: Array) -> Array:
        out = codes.astype(np.float64)
        if self.method == TURBOQUANT:
            (bits, *_), is_key, q1 = self.bits, self.turn is None, torch.from_numpy(codes.astype(np.int8))
            out = dequantize_tokens(compress_tokens(q1, bits, is_key), bits, is_key, torch.float64).numpy()
            return out * scale[:, None, None]
        for head, bits in enumerate(self.bits):
            for channel in range(codes.shape[2]) if bits < 8 else ():
                column = out[head, :, channel]
                low, high = column.min(), column.max()
                step = max(1.0, np.ceil((high - low) / (2**bits - 1)))
                out[head, :, channel] = np.floor((2 * (column - low) + step) / (2 * step)) * step + low
        return out * scale[:, None, None]


def slow_attention(q: Tensor, k: Tensor, v: Tensor, tokens: list[int], sm_scale: float) -> Tensor:
    """One position's attention over some tokens: q [Hq, D], k and v [H, n, D] fp64 -> [Hq, D] fp64."""
    k, v = (x[:, tokens].repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    return torch.einsum("ht,htd->hd", torch.softmax(sm_scale * torch.einsum("hd,htd->ht", q.double(), k), -1), v)


def predictor_tokens(n: int, chunk_size: int) -> list[int]:
    return [t for t in range(n) if t < chunk_size or t >= max(n - chunk_size, 0) // 64 * 64]


def slow_caches(codec: str, k: Tensor, v: Tensor, block: int) -> list[SlowCache]:
    """Caches of keys and values [H, n, D] after a prompt."""
    if codec not in FORMATS:
        bits = bits_of(codec, k, v)
        return [SlowCache(x, bits, block) for x in (k, v)]
    turn = rotation(v.shape[-1])
    return [
        SlowCache(x, [side.bits] * len(x), block, side.method, turn if is_v else None)
        for is_v, (x, side) in enumerate(zip((k, v), FORMATS[codec], strict=True))
    ]


def bits_of(codec: str, k: Tensor, v: Tensor) -> list[int]:
    """turbo-mixed: 2 bits for the half of the heads whose gap times std of channel gaps, over K and V, is least."""
    if codec != "turbo-mixed":
        return [{"int8": 8, "turbo4": 4, "turbo2": 2}[codec]] * len(k)
    priority = torch.zeros(len(k), dtype=torch.float64)
    for x in (k.double(), v.double()):
        channel_gaps = x.amax(1) - x.amin(1)
        priority += (x.amax((1, 2)) - x.amin((1, 2))) * channel_gaps.var(1, correction=0).sqrt()
    low = priority.sort().indices[: len(k) // 2].tolist()
    return [2 if head in low else 4 for head in range(len(k))]


def random_text(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [n, 4, 8], k and v [2, n, 8], bf16 values, with outliers in some channels of one head."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((n, 4, 8), (2, n, 8), (2, n, 8)))
    k[1, :, 3] *= 6
    v[1, :, 5] += 4
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "bf16"])
@pytest.mark.parametrize(
    ("n", "prompt", "block"), [(131, 1, 64), (130, 63, 64), (129, 64, 64), (203, 65, 32), (50, 20, 64)]
)
def test_every_position_reads_what_decoding_reads(codec: str, n: int, prompt: int, block: int) -> None:
    q, k, v = random_text(n, seed=n)
    slow = slow_caches(codec, k[:, :prompt], v[:, :prompt], block)
    setting = CacheSetting(codec, block_size=block)
    full, spec = teacher_forced_attention(q[prompt:], *cache_text(k, v, prompt, setting), 64, SM_SCALE, setting)
    assert full.shape == spec.shape == (n - prompt, 4, 8)
    for i in range(prompt, n):
        for cache, x in zip(slow, (k, v), strict=True):
            cache.append(x[:, i])
        keys, values = (cache.read() for cache in slow)
        for out, tokens in ((full, list(range(i + 1))), (spec, predictor_tokens(i + 1, 64))):
            expected = slow_attention(q[i], keys, values, tokens, SM_SCALE)
            torch.testing.assert_close(out[i - prompt].double(), expected, rtol=1e-5, atol=1e-5)


def test_positions_may_be_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = random_text(333, seed=2)
    setting = CacheSetting("turbo4")
    cached = cache_text(k, v, 100, setting)
    expected = teacher_forced_attention(q[7:], *cached, 64, SM_SCALE, setting)
    monkeypatch.setitem(module.SCORES_AT_ONCE, "cpu", 37 * 4 * 333)
    for found, whole in zip(teacher_forced_attention(q[7:], *cached, 64, SM_SCALE, setting), expected, strict=True):
        torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("codec", CODECS)
def test_several_texts_are_read_as_each_text_alone(codec: str) -> None:
    """turbo-mixed: the outliers of the third text lie in its first head, so another head gets 2 bits."""
    texts = [random_text(203, seed=seed) for seed in (6, 7, 8)]
    texts[2] = tuple(x.flip(0 if len(x) == 2 else 1) for x in texts[2])
    setting = CacheSetting(codec)
    alone = [
        teacher_forced_attention(q[65:], *cache_text(k, v, 65, setting), 64, SM_SCALE, setting) for q, k, v in texts
    ]
    q, k, v = (torch.cat(parts, dim) for parts, dim in zip(zip(*texts, strict=True), (1, 0, 0), strict=True))
    together = teacher_forced_attention(q[65:], *cache_text(k, v, 65, setting, 3), 64, SM_SCALE, setting)
    for out, expected in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(out, torch.cat(expected, 1), rtol=1e-5, atol=1e-6)
    assert bits_of("turbo-mixed", *texts[0][1:]) != bits_of("turbo-mixed", *texts[2][1:])


@pytest.mark.parametrize("codec", ["bf16", "turbo4"])
def test_sas_is_close_to_exact_but_not_equal(codec: str) -> None:
    q, k, v = random_text(400, seed=3)
    exact, sas = (
        teacher_forced_attention(q, *cache_text(k, v, 64, setting), 64, 1.0, setting)
        for setting in (CacheSetting(codec), CacheSetting(codec, softmax="sas"))
    )
    most = float(v.abs().max()) * 2 * (RELATIVE_ERROR + DROPPED_MASS)
    for found, expected in zip(sas, exact, strict=True):
        assert 0 < float((found - expected).abs().max()) < most


def test_sas_takes_the_cutoff_of_each_position() -> None:
    """As in decoding at each length. Scores are large, so that some lie between the cutoffs of two lengths."""
    q, k, v = random_text(200, seed=5)
    setting = CacheSetting("bf16", softmax="sas")
    full, spec = teacher_forced_attention(q, *cache_text(k, v, 64, setting), 64, 2.0, setting)
    cache = (k.float()[None], v.float()[None])
    for length in (1, 2, 63, 64, 129, 200):
        args = (q[length - 1 : length].float(), *cache, torch.tensor([length]))
        expected, _, _ = speculative_decode_attention_ref(*args, 64, 2.0, "sas")
        torch.testing.assert_close(full[length - 1].double(), decode_attention_ref(*args, 2.0, "sas")[0][0], **CLOSE)
        torch.testing.assert_close(spec[length - 1].double(), expected[0], **CLOSE)


def test_a_bf16_cache_gives_exact_attention() -> None:
    q, k, v = random_text(100, seed=4)
    setting = CacheSetting("bf16")
    full, _ = teacher_forced_attention(q, *cache_text(k, v, 1, setting), 64, SM_SCALE, setting)
    torch.testing.assert_close(full, prefill_attention(q.float(), k.float(), v.float(), SM_SCALE), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec in FORMATS])
def test_blocks_are_those_of_the_codec(codec: str) -> None:
    """To the bit: block by block, stage 2 of stage 1; values are rotated before and rotated back after."""
    _, k, v = random_text(64 * 3, seed=12)
    setting, turn = CacheSetting(codec), rotation(8)
    for cached, x, side, is_key in zip(
        cache_text(k, v, 64 * 3, setting), (k.float(), v.float() @ turn.T), FORMATS[codec], (True, False), strict=True
    ):
        q1, scale = quantize_int8(x)
        blocks = []
        for block in q1.split(64, 1):
            if side.method == FLASHQ:
                blocks.append(reconstruct(*compress(block, side.bits)).float())
            else:
                blocks.append(dequantize_tokens(compress_tokens(block, side.bits, is_key), side.bits, is_key))
        expected = dequantize(torch.cat(blocks, 1), scale)
        assert torch.equal(cached.stored, expected if is_key else expected @ turn)


def test_variants_replace_stage_2_of_their_side() -> None:
    """The plain norm replaces it on both sides, QJL that of keys, uniform codes that of values."""
    _, k, v = random_text(64, seed=13)
    turn = rotation(8)
    (k1, k_scale), (v1, v_scale) = quantize_int8(k.float()), quantize_int8(v.float() @ turn.T)
    default = CacheSetting("turboquant3")
    keys, values = (cached.stored for cached in cache_text(k, v, 64, default))
    norm_keys, norm_values = (codebook_tokens(x[:, None], 3, is_key, False) for x, is_key in ((k1, True), (v1, False)))
    for setting, expected_keys, expected_values in (
        (replace(default, norm_correction=False), norm_keys, norm_values),
        (replace(default, qjl="orthogonal"), sketched_keys(k1[:, None], 3, "orthogonal", True), None),
        (
            replace(default, qjl="gaussian", norm_correction=False),
            sketched_keys(k1[:, None], 3, "gaussian", False),
            norm_values,
        ),
        (replace(default, value_quantiser="uniform"), None, uniform_values(v1[:, None], 3)),
    ):
        found_keys, found_values = (cached.stored for cached in cache_text(k, v, 64, setting))
        if expected_keys is None:
            assert torch.equal(found_keys, keys)
        else:
            assert torch.equal(found_keys, dequantize(expected_keys[:, 0], k_scale))
        if expected_values is None:
            assert torch.equal(found_values, values)
        else:
            assert torch.equal(found_values, dequantize(expected_values[:, 0], v_scale) @ turn)


def test_protected_layers_have_an_exact_cache() -> None:
    setting = CacheSetting("turboquant3", softmax="sas", protect=2)
    layers = [setting.at_layer(layer, 7) for layer in range(7)]
    assert layers == [CacheSetting()] * 2 + [setting] * 3 + [CacheSetting()] * 2
    unprotected = replace(setting, protect=0)
    assert all(unprotected.at_layer(layer, 7) == unprotected for layer in range(7))


def test_labels() -> None:
    assert CacheSetting().label == "bf16"
    setting = CacheSetting("turbo-mixed", "sas", 32, "entropy", 1)
    assert setting.label == "turbo-mixed, sas, blocks of 32, entropy, 1 heads low"
    setting = CacheSetting("turboquant3", protect=2, norm_correction=False, qjl="gaussian", value_quantiser="uniform")
    assert setting.label == "turboquant3, 2 layers at each end in bf16, plain norm, gaussian QJL, uniform values"


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.set_num_threads(1)
    engine = Engine.from_pretrained(
        DEMO_CHECKPOINT, dtype="fp32", transport="gloo", speculation=SpeculationConfig(mode="simulated")
    )
    engine.load(1, 1024)
    return engine


@torch.no_grad()
def decode_slowly(
    engine: Engine, ids: list[int], prompt: int, threshold: float, codec: str, chunk_size: int
) -> tuple[list[float], Tensor]:
    """Read the prompt, then decode the rest token by token. Returns nats of each next token and hits [L, decoded]."""
    model, token_ids = engine.model, torch.tensor(ids)
    x, partial = model.embed(token_ids[:prompt]), None
    caches: list[list[SlowCache]] = []
    windows = model.config.windows(len(ids))
    for layer, window in enumerate(windows):
        x, q, k, v = model.pre_attention(layer, x, partial, torch.arange(prompt))
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        caches.append(slow_caches(codec, k, v, 64))
        read = [cache.prompt.float() for cache in caches[-1]]
        if window is None:
            out = prefill_attention(q, *read, model.sm_scale)
        else:
            out = window_prefill_attention(q, *read, model.sm_scale, window)
        x, partial = model.post_attention(layer, x, out)
    nats, hits = [], []
    for i in range(prompt, len(ids) - 1):
        x, partial = model.embed(token_ids[i : i + 1]), None
        for layer, cache in enumerate(caches):
            x, q, k, v = model.pre_attention(layer, x, partial, torch.tensor([i]))
            for part, new in zip(cache, (k, v), strict=True):
                part.append(new[0])
            keys, values = (part.read() for part in cache)
            visible = range(max(0, i + 1 - (windows[layer] or i + 1)), i + 1)
            near = [token for token in predictor_tokens(i + 1, chunk_size) if token in visible]
            full = slow_attention(q[0], keys, values, list(visible), model.sm_scale)
            spec = slow_attention(q[0], keys, values, near, model.sm_scale)
            hits.append(bool((spec - full).square().sum() < threshold**2 * full.square().sum()))
            x, partial = model.post_attention(layer, x, (spec if hits[-1] else full)[None].float())
        logits = model.lm_head(model.reduce_residual(x, partial))
        nats.append(float(torch.nn.functional.cross_entropy(logits, token_ids[i + 1 : i + 2])))
    return nats, torch.tensor(hits).view(-1, model.num_layers).T


@pytest.mark.parametrize(
    ("codec", "prompt", "window"),
    fast(
        [("turbo4", 351, None), ("turbo-mixed", 384, None), ("turbo4", 351, 200), ("turbo-mixed", 351, 330)],
        keep=[("turbo4", 351, 200)],
    ),
)
def test_one_pass_equals_decoding_step_by_step(
    engine: Engine, codec: str, prompt: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as a model whose layers have a sliding window, all but two of them."""
    config = engine.model.config.model_copy(update={"sliding_window": window, "full_layers": (2, 7)})
    monkeypatch.setattr(engine.model, "config", config)
    assert engine.tokenizer is not None
    assert engine.transport is not None
    words = ["lantern", "river", "the", "of", "captain", "was", "and", "is", "48213", "stood", "old", "harbour", "."]
    ids = engine.tokenizer.encode(" ".join(random.Random(prompt).choices(words, k=700)))[: prompt + 70]
    nats, hits = decode_slowly(engine, ids, prompt, 0.05, codec, 128)
    score = score_text(engine.model, engine.transport, ids, 0.05, 128, prompt, CacheSetting(codec))
    assert 0 < hits.float().mean() < 1, "both verdicts must occur"
    # fp32 rounds one position and many differently, so a value between two codes may get either.
    assert (score.hits[:, prompt:-1] == hits).float().mean() > 0.99
    difference = (score.nll[prompt:] - torch.tensor(nats)).abs()
    assert float(difference.median()) < 5e-4
    assert float(difference.max()) < 0.05
    exact = score_text(engine.model, engine.transport, ids, 0.05, 128, prompt)
    assert float((score.nll[prompt:] - exact.nll[prompt:]).abs().median()) > 20 * float(difference.median())


def test_a_text_without_a_prompt_is_scored_from_its_first_token(engine: Engine) -> None:
    assert engine.tokenizer is not None
    assert engine.transport is not None
    ids = engine.tokenizer.encode("He stopped at the bridge and looked at the water for a long while. " * 12)[:150]
    scores = [
        score_text(engine.model, engine.transport, ids, 0.0, 128, cache=CacheSetting(codec))
        for codec in ("bf16", "int8", "turbo4", "turbo2")
    ]
    errors = [float((score.nll - scores[0].nll).abs().mean()) for score in scores[1:]]
    assert 0 < errors[0] < errors[1] < errors[2]


def test_each_layer_may_have_a_lambda_of_its_own(engine: Engine) -> None:
    assert engine.transport is not None
    ids = torch.randint(6, 4096, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    thresholds = [0.0, torch.inf] * 5
    score = score_text(engine.model, engine.transport, ids, thresholds, 128, prompt_tokens=10)
    assert score.hits[:, 10:].float().mean(1).tolist() == [0.0, 1.0] * 5


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("codec", QUANTISED_CODECS)
def test_prompts_of_several_chunks_are_read_as_the_cache_reads_them(
    codec: str, softmax: Softmax, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk is read at stage 1, earlier ones from records. Heads with outliers in the first chunk keep 4 bits."""
    monkeypatch.setattr(module, "CHUNK_TOKENS", 128)
    generator, n = torch.Generator().manual_seed(9), 300
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((n, 8, 64), (4, n, 64), (4, n, 64)))
    k[:2, :128, 3] *= 3
    k[2:, 128:, 3] *= 6
    assert bits_of("turbo-mixed", k[:, :128], v[:, :128]) != bits_of("turbo-mixed", k, v)
    cache = QuantisedCache(codec, 1, 1, 4, n, 64, torch.device("cpu"), softmax)
    turn = rotation(64) if rotates_values(codec) else torch.eye(64)
    expected = []
    for start in range(0, n, 128):
        stop = min(start + 128, n)
        chunk = q[start:stop], *(x[:, start:stop].transpose(0, 1) for x in (k, v @ turn.T))
        expected.append(cache.prefill_attention(0, 0, start, *chunk, SM_SCALE, stop) @ turn)
    setting = CacheSetting(codec, softmax)
    found = prompt_attention(q, k, v, cache_text(k, v, n, setting), SM_SCALE, setting)
    if has_turboquant_keys(codec):  # a restored key between two INT8 codes may get either
        error = (found - torch.cat(expected)).abs()
        assert float((error < 1e-5).float().mean()) > 0.9
        assert float(error.max()) < 0.01
    else:
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_a_bf16_cache_may_be_read_with_sas() -> None:
    q, k, v = random_text(100, seed=10)
    setting = CacheSetting("bf16", softmax="sas")
    found = prompt_attention(q, k, v, cache_text(k, v, 100, setting), 1.0, setting)
    assert torch.equal(found, prefill_attention(q, k, v, 1.0, "sas").float())
    assert not torch.equal(found, prefill_attention(q, k, v, 1.0).float())


@pytest.mark.parametrize(("selector", "kept"), [("gap_std", 1), ("min_max", 0)])
def test_the_selector_chooses_the_2_bit_heads(selector: str, kept: int) -> None:
    """Two of three: the first has the widest range, the second one wide channel among narrow ones."""
    k, v = torch.randn(2, 3, 64, 8, generator=torch.Generator().manual_seed(11))
    k[0] *= 8
    k[1, :, 5] *= 7
    mixed, low, high = (
        cache_text(k, v, 64, setting)[0].stored
        for setting in (
            CacheSetting("turbo-mixed", selector=selector, low_heads=2), CacheSetting("turbo2"), CacheSetting("turbo4")
        )
    )  # fmt: skip
    for head in range(3):
        assert torch.equal(mixed[head], (high if head == kept else low)[head])
        assert not torch.equal(low[head], high[head])
