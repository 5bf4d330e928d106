"""The attention of torch operations against its fp64 oracles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from tiers import covering, fast
from torch import Tensor

from alspec.kernels.attention import torch_attention
from alspec.kernels.attention.oracles import (
    combine_partials_ref,
    decode_attention_ref,
    prefill_attention_ref,
    speculative_decode_attention_ref,
)
from alspec.kernels.attention.torch_attention import (
    SCORES_AT_ONCE,
    combine_partials,
    decode_attention,
    predictor_attention,
    predictor_attention_all,
    prefill_attention,
    verify_attention,
)
from alspec.sas import DROPPED_MASS, RELATIVE_ERROR
from alspec.verdict import accepts, distance_sums

Check = Callable[[Tensor, Tensor, torch.dtype], None]

S = 128
GQA_RATIOS = (1, 3, 4, 8, 16)
HEAD_DIMS = (16, 64, 80, 96, 128)
DTYPES = (torch.float32, torch.bfloat16)
# Around one tile, around one chunk, where sink and window meet, and where the first token lies between them.
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 2 * S - 1, 2 * S, 2 * S + 1, 2 * S + 63, 2 * S + 64, 2 * S + 65)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
by_shape = pytest.mark.parametrize(
    ("ratio", "head_dim", "dtype"), covering(GQA_RATIOS, HEAD_DIMS, DTYPES), ids=lambda value: str(value).split(".")[-1]
)


def draw(shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal numbers. The CPU draws them, so that every device gets the same ones."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def ragged_batch(
    lengths: tuple[int, ...], ratio: int, head_dim: int, device: torch.device, dtype: torch.dtype, unused: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """q, k_cache, v_cache, seq_lens, sm_scale; one request per length. The cache holds `unused` past each length."""
    num_kv_heads, capacity = 2, max(lengths) + 70
    seed = 1000 * ratio + head_dim
    q = draw((len(lengths), num_kv_heads * ratio, head_dim), seed, device, dtype)
    k, v = (draw((len(lengths), num_kv_heads, capacity, head_dim), seed + i, device, dtype) for i in (1, 2))
    for request, length in enumerate(lengths):
        k[request, :, length:] = unused
        v[request, :, length:] = unused
    return q, k, v, torch.tensor(lengths), head_dim**-0.5


@by_shape
def test_decode_attention_matches_the_oracle(
    ratio: int, head_dim: int, dtype: torch.dtype, device: torch.device, check: Check
) -> None:
    args = ragged_batch(LENGTHS, ratio, head_dim, device, dtype, unused=math.nan)
    out, lse = decode_attention(*args)
    expected_out, expected_lse = decode_attention_ref(*args)
    assert out.dtype == lse.dtype == torch.float32
    check(out, expected_out, dtype)
    check(lse, expected_lse, dtype)


@by_shape
def test_predictor_and_verification_match_the_oracle(
    ratio: int, head_dim: int, dtype: torch.dtype, device: torch.device, check: Check
) -> None:
    q, k, v, seq_lens, sm_scale = ragged_batch(LENGTHS, ratio, head_dim, device, dtype, unused=math.nan)
    spec_out, spec_lse = predictor_attention(q, k, v, seq_lens, S, sm_scale)
    full_out, _ = verify_attention(q, k, v, seq_lens, spec_out, spec_lse, S, sm_scale)
    sums = distance_sums(spec_out, full_out)
    expected_spec, expected_full, expected_sums = speculative_decode_attention_ref(q, k, v, seq_lens, S, sm_scale)
    check(spec_out, expected_spec, dtype)
    check(full_out, expected_full, dtype)
    # Compare distances, not their squares: distances have the error of the outputs.
    check(sums.sqrt(), expected_sums.sqrt(), dtype)

    is_empty = torch.tensor(LENGTHS) < 2 * S + 64
    assert is_empty.any()
    assert not is_empty.all()
    assert torch.equal(full_out[is_empty], spec_out[is_empty]), "an empty middle must give A~ itself"
    assert torch.equal(sums[:, 0].cpu() == 0, is_empty), "dist2 is 0 exactly where the middle is empty"
    for threshold in (0.0, 0.1, 0.5, math.inf):
        assert torch.equal(accepts(sums, threshold).cpu(), accepts(expected_sums.float(), threshold).cpu())


@by_dtype
def test_decode_with_sas_weights_matches_the_oracle(dtype: torch.dtype, device: torch.device, check: Check) -> None:
    """The scores are far apart, so that the cutoff drops some tokens."""
    q, k, v, seq_lens, _ = ragged_batch((*LENGTHS, 700), 4, 64, device, dtype, unused=math.nan)
    args = (q, k, v, seq_lens)
    out, lse = decode_attention(*args, 1.0, "sas")
    expected_out, expected_lse = decode_attention_ref(*args, 1.0, "sas")
    check(out, expected_out, dtype)
    check(lse, expected_lse, dtype)
    assert not torch.equal(out, decode_attention(*args, 1.0)[0])

    spec = predictor_attention(*args, S, 1.0, "sas")
    full_out, _ = verify_attention(*args, *spec, S, 1.0, "sas")
    sums = distance_sums(spec[0], full_out)
    expected_spec, _, expected_sums = speculative_decode_attention_ref(*args, S, 1.0, "sas")
    check(spec[0], expected_spec, dtype)
    # The weights of the rest are relative to its own maximum, so fewer tokens are dropped.
    error = (full_out - expected_out.to(device)).norm() / expected_out.norm()
    assert error < 2 * RELATIVE_ERROR
    torch.testing.assert_close(sums.cpu().double(), expected_sums.cpu(), rtol=4 * RELATIVE_ERROR, atol=1e-6)


@by_dtype
@pytest.mark.parametrize("chunk_size", [128, 256, 512])
def test_the_predictor_is_attention_over_sink_and_window(
    chunk_size: int, dtype: torch.dtype, device: torch.device, check: Check
) -> None:
    """Output and lse are those of attention over the tokens of sink and window alone."""
    lengths = tuple(2 * chunk_size + extra for extra in (-1, 0, 1, 63, 64, 65, 200))
    q, k, v, seq_lens, sm_scale = ragged_batch(lengths, 4, 64, device, dtype, unused=math.nan)
    spec_out, spec_lse = predictor_attention(q, k, v, seq_lens, chunk_size, sm_scale)
    for request, n in enumerate(lengths):
        window_start = max(chunk_size, (n - chunk_size) // 64 * 64)
        kept = [*range(chunk_size), *range(window_start, n)]
        one = slice(request, request + 1)
        part = (q[one], k[one][:, :, kept], v[one][:, :, kept], torch.tensor([len(kept)]), sm_scale)
        expected_out, expected_lse = decode_attention_ref(*part)
        check(spec_out[one], expected_out, dtype)
        check(spec_lse[one], expected_lse, dtype)
    full_out, _ = verify_attention(q, k, v, seq_lens, spec_out, spec_lse, chunk_size, sm_scale)
    sums = distance_sums(spec_out, full_out)
    check(full_out, decode_attention_ref(q, k, v, seq_lens, sm_scale)[0], dtype)
    assert (sums[:, 0].cpu() == 0).tolist() == [n < 2 * chunk_size + 64 for n in lengths]


@pytest.mark.parametrize("unused", fast([0.0, 1e4, -1e4, math.inf, math.nan], keep=[1e4, math.inf, math.nan]))
@by_dtype
def test_unused_cache_does_not_matter(unused: float, dtype: torch.dtype, device: torch.device) -> None:
    lengths = (1, 65, 2 * S + 65, 500)

    def run(fill: float) -> list[Tensor]:
        q, k, v, seq_lens, sm_scale = ragged_batch(lengths, 3, 80, device, dtype, unused=fill)
        spec = predictor_attention(q, k, v, seq_lens, S, sm_scale)
        return [
            *decode_attention(q, k, v, seq_lens, sm_scale),
            *spec,
            *verify_attention(q, k, v, seq_lens, *spec, S, sm_scale),
        ]

    for found, expected in zip(run(unused), run(1.0), strict=True):
        assert torch.equal(found, expected)


@by_dtype
def test_tokens_between_sink_and_window_do_not_reach_the_predictor(dtype: torch.dtype, device: torch.device) -> None:
    q, k, v, seq_lens, sm_scale = ragged_batch((700,), 4, 64, device, dtype, unused=0.0)
    before = predictor_attention(q, k, v, seq_lens, S, sm_scale)
    window_start = (700 - S) // 64 * 64
    k[:, :, S:window_start] = math.nan
    v[:, :, S:window_start] = math.nan
    for found, expected in zip(predictor_attention(q, k, v, seq_lens, S, sm_scale), before, strict=True):
        assert torch.equal(found, expected)
    k[:, :, window_start] = 7.0
    assert not torch.equal(predictor_attention(q, k, v, seq_lens, S, sm_scale)[1], before[1])


@by_dtype
def test_a_batch_gives_the_bits_of_its_requests_alone(dtype: torch.dtype, device: torch.device) -> None:
    q, k, v, seq_lens, sm_scale = ragged_batch(LENGTHS, 4, 64, device, dtype, unused=math.nan)
    out, lse = decode_attention(q, k, v, seq_lens, sm_scale)
    for b in range(len(LENGTHS)):
        one = decode_attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], seq_lens[b : b + 1], sm_scale)
        assert torch.equal(one[0][0], out[b])
        assert torch.equal(one[1][0], lse[b])


@pytest.mark.parametrize("cuts", [(0, 321), (1, 320), (63, 64, 65), (0, 0, 128, 321, 321)], ids=str)
def test_combined_parts_are_the_whole(cuts: tuple[int, ...], device: torch.device, check: Check) -> None:
    """Any partition of the tokens, empty parts included, combines to attention over all tokens."""
    q, k, v, seq_lens, sm_scale = ragged_batch((321, 321), 4, 64, device, torch.float32, unused=0.0)
    parts = []
    for start, stop in zip((0, *cuts), (*cuts, 321), strict=True):
        lens = torch.full((2,), stop - start)
        parts.append(decode_attention(q, k[:, :, start:stop], v[:, :, start:stop], lens, sm_scale))
    o_partial, lse_partial = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    out, lse = combine_partials(o_partial, lse_partial)
    expected_out, expected_lse = decode_attention_ref(q, k, v, seq_lens, sm_scale)
    check(out, expected_out, torch.float32)
    check(lse, expected_lse, torch.float32)
    combined_ref = combine_partials_ref(o_partial, lse_partial)
    check(combined_ref[0], expected_out, torch.float32)
    check(combined_ref[1], expected_lse, torch.float32)


def test_combine_partials_is_associative(device: torch.device, check: Check) -> None:
    o = draw((3, 2, 8, 64), 0, device, torch.float32)
    lse = draw((3, 2, 8), 1, device, torch.float32) * 20
    lse[1, 0, :3] = -math.inf

    def combine(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return combine_partials(torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts]))

    a, b, c = ((o[i], lse[i]) for i in range(3))
    expected = combine_partials_ref(o, lse)
    for found in (combine(a, b, c), combine(combine(a, b), c), combine(a, combine(b, c)), combine(c, b, a)):
        check(found[0], expected[0], torch.float32)
        check(found[1], expected[1], torch.float32)


def test_combining_with_an_empty_part_changes_no_bit(device: torch.device) -> None:
    o, lse = draw((2, 8, 64), 0, device, torch.float32), draw((2, 8), 1, device, torch.float32)
    empty = (torch.zeros_like(o), torch.full_like(lse, -math.inf))
    for order in (((o, lse), empty), (empty, (o, lse))):
        combined_out, combined_lse = combine_partials(*(torch.stack(tensors) for tensors in zip(*order, strict=True)))
        assert torch.equal(combined_out, o)
        assert torch.equal(combined_lse, lse)


def test_combine_partials_accepts_a_large_lse(device: torch.device, check: Check) -> None:
    """2^lse overflows fp32 from 128 on, so the code may use only differences as exponents."""
    o = draw((2, 1, 4, 16), 0, device, torch.float32)
    lse = torch.tensor([[[3000.0, -3000.0, 500.0, 0.0]], [[2999.0, -3001.0, -500.0, 0.0]]], device=device)
    for found, expected in zip(combine_partials(o, lse), combine_partials_ref(o, lse), strict=True):
        check(found, expected, torch.float32)


QUERIES, PREFIXES = (1, 2, 63, 64, 65), (0, 1, 63, 64, 65, 127)


@pytest.mark.parametrize(("num_queries", "prefix", "dtype"), covering(QUERIES, PREFIXES, DTYPES), ids=str)
def test_prefill_attention_matches_the_oracle(
    num_queries: int, prefix: int, dtype: torch.dtype, device: torch.device, check: Check
) -> None:
    head_dim = 64
    q = draw((num_queries, 6, head_dim), 0, device, dtype)
    k, v = (draw((2, num_queries + prefix, head_dim), seed, device, dtype) for seed in (1, 2))
    out = prefill_attention(q, k, v, head_dim**-0.5)
    assert out.dtype == dtype
    check(out, prefill_attention_ref(q, k, v, head_dim**-0.5), dtype)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10), reason="needs such a GPU"
)
@pytest.mark.parametrize(
    ("shape", "prefix", "dtype"),
    covering([(1, 64), (4, 128), (3, 80), (8, 96), (16, 128)], [0, 128, 512], [torch.bfloat16, torch.float16]),
    ids=str,
)
def test_cudnn_computes_whole_prompt_chunks(
    shape: tuple[int, int], prefix: int, dtype: torch.dtype, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K and V are views of a longer cache, whose further tokens do not matter."""
    ratio, head_dim = shape
    monkeypatch.setattr(torch_attention, "WHOLE_CHUNK", 128)
    device, num_queries = torch.device("cuda"), 256
    q = draw((num_queries, 2 * ratio, head_dim), 0, device, dtype)
    cache = torch.full((2, 2, 1000, head_dim), math.nan, device=device, dtype=dtype)
    cache[:, :, : num_queries + prefix] = draw((2, 2, num_queries + prefix, head_dim), 1, device, dtype)
    k, v = cache[:, :, : num_queries + prefix]
    expected = prefill_attention_ref(q, k, v, head_dim**-0.5)
    with mock.patch.object(torch_attention, "_partial_by_cudnn", wraps=torch_attention._partial_by_cudnn) as partial:
        check(prefill_attention(q, k, v, head_dim**-0.5), expected, dtype)
    assert partial.call_count == (2 if prefix else 1)
    with mock.patch.object(torch_attention, "_partial_by_cudnn") as partial:
        check(prefill_attention(q[1:], k, v, head_dim**-0.5), expected[1:], dtype)
        if prefix:
            shorter = k[:, 1:], v[:, 1:]
            check(prefill_attention(q, *shorter, 0.1), prefill_attention_ref(q, *shorter, 0.1), dtype)
    assert not partial.called, "cuDNN would prepare a plan for a part of a chunk"


@pytest.mark.parametrize("num_queries", QUERIES)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_partials_of_chunk_and_prefix_combine(
    num_queries: int, prefix: int, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle computes the two partials of a whole prompt chunk, with scores far apart."""

    def partial(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
        k, v = (x[0].repeat_interleave(q.shape[1] // x.shape[1], 0).double() for x in (k, v))
        scores = q[0].double() @ k.transpose(1, 2) * sm_scale
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1) > 0, -math.inf)
        return (scores.softmax(-1) @ v).to(q.dtype)[None], scores.logsumexp(-1).float()[None]

    monkeypatch.setattr(torch_attention, "_fused_prefill", lambda *qkv: torch_attention._attention_by_cudnn)
    monkeypatch.setattr(torch_attention, "_partial_by_cudnn", partial)
    q = draw((num_queries, 6, 64), 0, torch.device("cpu"), torch.float32)
    k, v = (draw((2, num_queries + prefix, 64), seed, q.device, q.dtype) for seed in (1, 2))
    check(prefill_attention(q, k, v, 2.0), prefill_attention_ref(q, k, v, 2.0), q.dtype)


@by_dtype
@pytest.mark.parametrize(("num_queries", "prefix"), [(1, 0), (1, 127), (65, 0), (64, 65), (5, 700)])
def test_prefill_with_sas_weights_matches_the_oracle(
    num_queries: int,
    prefix: int,
    dtype: torch.dtype,
    device: torch.device,
    check: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = draw((num_queries, 6, 64), 0, device, dtype)
    k, v = (draw((2, num_queries + prefix, 64), seed, device, dtype) for seed in (1, 2))
    expected = prefill_attention_ref(q, k, v, 1.0, "sas")
    out = prefill_attention(q, k, v, 1.0, "sas")
    assert out.dtype == dtype
    check(out, expected, dtype)
    exact = prefill_attention_ref(q, k, v, 1.0)
    assert float((expected - exact).abs().max()) < 2 * (RELATIVE_ERROR + DROPPED_MASS) * float(v.abs().max())
    monkeypatch.setitem(SCORES_AT_ONCE, device.type, 3 * 6 * k.shape[1])
    check(prefill_attention(q, k, v, 1.0, "sas"), expected, dtype)


@by_shape
def test_prefill_attention_takes_every_head_shape(
    ratio: int, head_dim: int, dtype: torch.dtype, device: torch.device, check: Check
) -> None:
    q = draw((37, 2 * ratio, head_dim), 0, device, dtype)
    k, v = (draw((2, 37 + 21, head_dim), seed, device, dtype) for seed in (1, 2))
    check(prefill_attention(q, k, v, 0.3), prefill_attention_ref(q, k, v, 0.3), dtype)


def test_prefill_behind_a_prefix_takes_slices_of_queries(
    device: torch.device, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice has so few queries that its mask is small."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(shape, generator=generator).to(device) for shape in ((40, 6, 16), (2, 53, 16), (2, 53, 16)))
    monkeypatch.setitem(SCORES_AT_ONCE, device.type, 7 * 53)
    monkeypatch.setattr("alspec.kernels.attention.torch_attention.QUERIES_AT_ONCE", 7)
    check(prefill_attention(q, k, v, 0.3), prefill_attention_ref(q, k, v, 0.3), torch.float32)


def test_slices_of_queries_have_a_least_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of the prefix does not matter."""
    monkeypatch.setitem(SCORES_AT_ONCE, "cpu", 1)
    monkeypatch.setattr(torch_attention, "QUERIES_AT_ONCE", 16)
    q, k, v = torch.randn(40, 2, 16), torch.randn(2, 53, 16), torch.randn(2, 53, 16)
    with mock.patch.object(torch_attention, "_masked_attention", wraps=torch_attention._masked_attention) as masked:
        prefill_attention(q, k, v, 0.3)
    assert [len(call.args[0]) for call in masked.call_args_list] == [16, 16, 8]


def test_prefill_attention_reads_cache_views(device: torch.device) -> None:
    """The engine passes views of a longer cache. The tokens behind a view must not matter."""
    q = draw((5, 4, 32), 0, device, torch.float32)
    cache = torch.full((2, 2, 100, 32), math.nan, device=device)
    cache[:, :, :12] = draw((2, 2, 12, 32), 1, device, torch.float32)
    out = prefill_attention(q, cache[0, :, :12], cache[1, :, :12], 0.2)
    expected = prefill_attention(q, cache[0, :, :12].contiguous(), cache[1, :, :12].contiguous(), 0.2)
    assert torch.equal(out, expected)


def test_prompt_chunks_give_the_whole_prefill(device: torch.device, check: Check) -> None:
    q = draw((131, 6, 48), 0, device, torch.float32)
    k, v = (draw((2, 131, 48), seed, device, torch.float32) for seed in (1, 2))
    edges = (0, 1, 64, 66, 131)
    chunks = [prefill_attention(q[i:j], k[:, :j], v[:, :j], 0.2) for i, j in itertools.pairwise(edges)]
    check(torch.cat(chunks), prefill_attention_ref(q, k, v, 0.2), torch.float32)


POSITIONS = (1, 64, 2 * S + 62, 2 * S + 63, 2 * S + 64, 2 * S + 127, 2 * S + 128, 450)


@by_dtype
@pytest.mark.parametrize("num_tokens", fast(POSITIONS, keep=[1, 64, 2 * S + 63, 2 * S + 64, 450]))
def test_predictor_attention_all_gives_a_spec_output_for_each_position(
    num_tokens: int, dtype: torch.dtype, device: torch.device, check: Check
) -> None:
    """Each A~ is the one that decoding step by step gives."""
    q = draw((num_tokens, 6, 32), 0, device, dtype)
    k, v = (draw((2, num_tokens, 32), seed, device, dtype) for seed in (1, 2))
    out = predictor_attention_all(q, k, v, S, 0.25)
    lengths = torch.arange(1, num_tokens + 1)
    k_cache, v_cache = (cache.expand(num_tokens, *cache.shape) for cache in (k, v))
    expected, _, _ = speculative_decode_attention_ref(q, k_cache, v_cache, lengths, S, 0.25)
    assert out.dtype == dtype
    check(out, expected, dtype)
