"""The simulated step against the same step written with masks, and the bookkeeping of priorities."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from alspec.predictor import predictor_ranges
from alspec.simulation import SimulatedStep, attend, replay_priorities, simulate_step

L, HQ, HKV, D, HIDDEN, S = 4, 4, 2, 8, 24, 128
CAPACITY = 480
SM_SCALE = D**-0.5


class Decoder:
    """A small random decoder whose attention depends on the position."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(L, *shape, generator=generator, dtype=torch.float64).to(dtype) / math.sqrt(shape[-1])

        self.wq, self.wk, self.wv = weight(HQ * D, HIDDEN), weight(HKV * D, HIDDEN), weight(HKV * D, HIDDEN)
        self.wo, self.up, self.down = weight(HIDDEN, HQ * D), weight(2 * HIDDEN, HIDDEN), weight(HIDDEN, 2 * HIDDEN)

    def pre_attention(self, layer: int, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.nn.functional.normalize(x, dim=-1) * HIDDEN**0.5
        angle = position[:, None, None].to(x.dtype) * 0.01
        q = (h @ self.wq[layer].T).unflatten(1, (HQ, D))
        k = (h @ self.wk[layer].T).unflatten(1, (HKV, D))
        v = (h @ self.wv[layer].T).unflatten(1, (HKV, D))
        return q * (1 + torch.cos(angle)), k + torch.sin(angle), v

    def post_attention(self, layer: int, x: Tensor, attention: Tensor) -> Tensor:
        x = x + attention.flatten(1) @ self.wo[layer].T
        mlp = torch.tanh(x @ self.up[layer].T) @ self.down[layer].T
        return x + mlp


@dataclasses.dataclass
class Case:
    decoder: Decoder
    x: Tensor
    k_cache: list[Tensor]
    v_cache: list[Tensor]
    seq_lens: Tensor
    sliding_windows: tuple[int | None, ...] = ()

    def simulate(self, threshold: float, **options: Tensor | tuple[int, int]) -> SimulatedStep:
        return simulate_step(
            self.x,
            self.k_cache,
            self.v_cache,
            self.seq_lens,
            self.decoder.pre_attention,
            self.decoder.post_attention,
            threshold=threshold,
            chunk_size=S,
            sm_scale=SM_SCALE,
            sliding_windows=self.sliding_windows,
            **options,  # type: ignore[arg-type]
        )


def make_case(lengths: list[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> Case:
    generator = torch.Generator().manual_seed(seed + 100)
    cache_shape = (2, L, len(lengths), HKV, CAPACITY, D)
    k_cache, v_cache = torch.randn(cache_shape, generator=generator, dtype=torch.float64).to(dtype)
    seq_lens = torch.tensor(lengths)
    for request, n in enumerate(lengths):  # the current token's place and what lies beyond it must not be read
        k_cache[:, request, :, n - 1 :] = math.nan
        v_cache[:, request, :, n - 1 :] = math.nan
    x = torch.randn(len(lengths), HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    return Case(Decoder(seed, dtype), x, list(k_cache), list(v_cache), seq_lens)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [B, Hq, D], k and v [B, Hkv, capacity, D], mask [B, capacity] bool -> [B, Hq, D]."""
    k, v = (t.masked_fill(~mask[:, None, :, None], 0).repeat_interleave(HQ // HKV, dim=1) for t in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q.unsqueeze(2), k, v, attn_mask=mask[:, None, None, :], scale=SM_SCALE
    )
    return out.squeeze(2)


def run_decoder(
    case: Case, choose: Callable[[int, Tensor, Tensor], Tensor]
) -> tuple[Tensor, list[Tensor], list[tuple[Tensor, Tensor]]]:
    """The step written with masks. `choose(layer, spec, full)` returns the attention that a layer goes on with.

    Returns x, the new keys of each layer, and each layer's (spec, full).
    """
    token = torch.arange(CAPACITY)
    n = case.seq_lens[:, None]
    near = (token < S) | (token >= (n - S).clamp(min=0) // 64 * 64)
    x, new_keys, outputs = case.x, [], []
    for layer in range(L):
        window = case.sliding_windows[layer] if case.sliding_windows else None
        full_mask = (token < n) & (token >= n - (window or CAPACITY))
        spec_mask = full_mask & near
        q, k, v = case.decoder.pre_attention(layer, x, case.seq_lens - 1)
        keys, values = case.k_cache[layer].clone(), case.v_cache[layer].clone()
        rows = torch.arange(len(case.x))
        keys[rows, :, case.seq_lens - 1], values[rows, :, case.seq_lens - 1] = k, v
        spec, full = (masked_attention(q, keys, values, mask) for mask in (spec_mask, full_mask))
        x = case.decoder.post_attention(layer, x, choose(layer, spec, full))
        new_keys.append(keys)
        outputs.append((spec, full))
    return x, new_keys, outputs


def relative_error(outputs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[L, B]: ||A~ - A|| / ||A||."""
    return torch.stack([(s - f).flatten(1).norm(dim=1) / f.flatten(1).norm(dim=1) for s, f in outputs])


RAGGED = [1, 63, 64, 127, 129, 255, 256, 257, 319, 320, 321, 480]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_lambda_zero_is_full_attention(dtype: torch.dtype, tolerance: float) -> None:
    case = make_case(RAGGED, dtype=dtype)
    result = case.simulate(0)
    x, new_keys, _ = run_decoder(case, lambda layer, spec, full: full)
    assert result.x.dtype == dtype
    torch.testing.assert_close(result.x, x, rtol=tolerance, atol=tolerance)
    for keys, expected in zip(result.k_cache, new_keys, strict=True):
        torch.testing.assert_close(keys, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert not result.hit_map.any()
    assert not result.accepted.any()
    assert result.senders == [0] * L


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_infinite_lambda_is_sink_and_window_attention(dtype: torch.dtype, tolerance: float) -> None:
    case = make_case(RAGGED, dtype=dtype)
    result = case.simulate(math.inf)
    x, new_keys, _ = run_decoder(case, lambda layer, spec, full: spec)
    torch.testing.assert_close(result.x, x, rtol=tolerance, atol=tolerance)
    for keys, expected in zip(result.k_cache, new_keys, strict=True):
        torch.testing.assert_close(keys, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert result.hit_map.all()
    assert result.accepted.all()
    assert result.senders == [0, 1, 0, 1]

    full_x = case.simulate(0).x
    gap_opens = 2 * S + 64
    for request, n in enumerate(RAGGED):
        assert torch.equal(result.x[request], full_x[request]) == (n < gap_opens), n


def with_windows(case: Case, windows: tuple[int | None, ...]) -> Case:
    """The case with a sliding window in some layers, in front of which the caches hold NaN."""
    for layer, window in enumerate(windows):
        for request, n in enumerate(case.seq_lens.tolist()):
            for cache in (case.k_cache[layer], case.v_cache[layer]):
                cache[request, :, : max(0, n - (window or n))] = math.nan
    return dataclasses.replace(case, sliding_windows=windows)


@pytest.mark.parametrize("windows", [(1, 63, 64, 65), (127, 128, 129, None), (None, 400, 330, 257)])
def test_layers_with_sliding_windows(windows: tuple[int | None, ...]) -> None:
    case = with_windows(make_case(RAGGED), windows)
    for threshold, index in ((0.0, 1), (math.inf, 0)):
        x, new_keys, outputs = run_decoder(case, lambda layer, *outs, index=index: outs[index])
        result = case.simulate(threshold)
        torch.testing.assert_close(result.x, x, rtol=1e-12, atol=1e-12)
        for keys, expected in zip(result.k_cache, new_keys, strict=True):
            torch.testing.assert_close(keys, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert torch.equal(case.simulate(1e-9).hit_map[0], relative_error(outputs)[0] < 1e-9)


@pytest.mark.parametrize("n", [1, S - 1, S, 2 * S - 1, 2 * S, 2 * S + 63])
def test_sink_and_window_that_meet_accept_every_layer(n: int) -> None:
    assert make_case([n]).simulate(1e-9).accepted.all()


def test_a_gap_rejects_a_tiny_lambda() -> None:
    assert not make_case([2 * S + 64]).simulate(1e-9).accepted.any()


@pytest.mark.parametrize("seed", range(6))
def test_each_layer_goes_on_with_the_output_of_its_verdict(seed: int) -> None:
    """Lambda is the median of the layers' largest relative errors: some layers and requests accept, others reject."""
    case = make_case([480, 400, 330], seed)
    _, _, outputs = run_decoder(case, lambda layer, spec, full: full)
    threshold = float(relative_error(outputs).amax(dim=1).quantile(0.5))

    result = case.simulate(threshold)
    assert result.accepted.any()
    assert not result.accepted.all()

    x, _, outputs = run_decoder(case, lambda layer, spec, full: spec if result.accepted[layer] else full)
    assert torch.equal(result.hit_map, relative_error(outputs) < threshold)
    assert torch.equal(result.accepted, result.hit_map.all(dim=1))
    torch.testing.assert_close(result.x, x, rtol=1e-12, atol=1e-12)


def test_both_layer_verdicts_occur_and_accepted_errors_reach_later_layers() -> None:
    case = make_case([480], seed=3)
    _, _, outputs = run_decoder(case, lambda layer, spec, full: full)
    errors = relative_error(outputs)[:, 0]
    result = case.simulate(float(errors.mean()))
    assert result.accepted.any()
    assert not result.accepted.all()
    first_hit = result.accepted.tolist().index(True)
    exact = case.simulate(0)
    new_token = (0, slice(None), 479)
    for layer in range(L):
        same = torch.equal(result.k_cache[layer][new_token], exact.k_cache[layer][new_token])
        assert same == (layer <= first_hit)


def test_one_live_request_that_rejects_rejects_the_layer() -> None:
    case = make_case([100, 480, 200])
    result = case.simulate(1e-6)
    assert result.hit_map.tolist() == [[True, False, True]] * L
    assert not result.accepted.any()

    result = case.simulate(1e-6, live=torch.tensor([True, False, True]))
    assert result.hit_map.tolist() == [[True, False, True]] * L
    assert result.accepted.all()
    result = case.simulate(1e-6, live=torch.tensor([False, False, True]))
    assert result.hit_map.tolist() == [[False, False, True]] * L
    assert result.accepted.all()
    assert case.simulate(0, live=torch.zeros(3, dtype=torch.bool)).accepted.all()


def test_requests_of_a_batch_do_not_mix() -> None:
    lengths = [300, 480, 5]
    case = make_case(lengths)
    result = case.simulate(math.inf)
    for i in range(len(lengths)):
        alone = Case(
            case.decoder,
            case.x[i : i + 1],
            [k[i : i + 1] for k in case.k_cache],
            [v[i : i + 1] for v in case.v_cache],
            case.seq_lens[i : i + 1],
        ).simulate(math.inf)
        torch.testing.assert_close(alone.x[0], result.x[i], rtol=1e-12, atol=1e-12)


def test_several_steps_go_on_from_the_returned_caches() -> None:
    """Each step writes keys and values of its own token and nothing else."""
    case = make_case([320], seed=1)
    start, tokens = case, torch.randn(3, 1, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for i, token in enumerate(tokens):
        case = dataclasses.replace(case, x=token, seq_lens=start.seq_lens + i)
        result = case.simulate(0)
        case = dataclasses.replace(case, k_cache=result.k_cache, v_cache=result.v_cache)
    for before, after in zip(start.k_cache, case.k_cache, strict=True):
        assert torch.equal(after[:, :, :319], before[:, :, :319])
        assert not after[:, :, :322].isnan().any()
        assert after[:, :, 322:].isnan().all()


def test_inputs_are_not_modified() -> None:
    case = make_case([300, 480])
    before = [t.clone() for t in (case.x, *case.k_cache, *case.v_cache, case.seq_lens)]
    case.simulate(0.1)
    for old, new in zip(before, (case.x, *case.k_cache, *case.v_cache, case.seq_lens), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


def test_attend_reads_only_the_listed_tokens() -> None:
    q = torch.ones(1, 2, 4, dtype=torch.float64)
    k = torch.full((1, 1, 5, 4), math.nan, dtype=torch.float64)
    v = torch.full((1, 1, 5, 4), math.nan, dtype=torch.float64)
    k[0, 0, 1], k[0, 0, 4] = 0.0, math.log(3.0) / 4
    v[0, 0, 1], v[0, 0, 4] = 1.0, 5.0
    # scores 0 and ln 3: weights 1/4 and 3/4
    torch.testing.assert_close(attend(q, k, v, [[1, 4]], 1.0), torch.full((1, 2, 4), 4.0, dtype=torch.float64))


def test_attend_does_not_overflow_with_large_scores() -> None:
    q, k = torch.full((1, 1, 1), 1e4, dtype=torch.float64), torch.tensor([[[[1.0], [2.0]]]], dtype=torch.float64)
    assert attend(q, k, k, [[0, 1]], 1.0).item() == 2.0


def test_replay_counts_gated_operations_by_hand() -> None:
    """Layer by layer (pre, post) per group: accept, reject, accept from p = [2, 0].

    layer 0: pre 0;       accept: p = [0, 1], post 1
    layer 1: pre 1;       reject: p = [1, 2], post 0 and 1
    layer 2: pre 0 and 1; accept: p = [1, 0], post 0
    """
    senders, gated_ops, priority = replay_priorities([True, False, True])
    assert senders == [0, 1, 1]
    assert gated_ops == (1 + 1 + 2, 1 + 2 + 1)
    assert priority == (1, 0)


def test_replay_of_only_hits_or_only_misses() -> None:
    # After a hit, post-attention and the next pre-attention run on one group only.
    assert replay_priorities([True] * 6) == ([0, 1, 0, 1, 0, 1], (6, 6), (1, 0))
    # After the first handover no group skips: 2 operations per layer, without the receiver's first pre-attention.
    assert replay_priorities([False] * 6) == ([0] * 6, (12, 11), (2, 1))
    assert replay_priorities([]) == ([], (0, 0), (2, 0))


def test_bookkeeping_of_a_step_follows_its_verdicts_and_the_priority_given() -> None:
    case = make_case([480], seed=3)
    result = case.simulate(math.inf, priority=(0, 1))
    assert result.senders == [1, 0, 1, 0]
    assert result.gated_ops == (4, 4)
    assert result.priority == (0, 1)
    for seed in range(4):
        result = make_case([480], seed).simulate(0.3)
        expected = replay_priorities(result.accepted.tolist())
        assert (result.senders, result.gated_ops, result.priority) == expected


@pytest.mark.parametrize("lengths", [[0], [CAPACITY + 1]])
def test_a_length_outside_the_cache_is_refused(lengths: list[int]) -> None:
    case = dataclasses.replace(make_case([5]), seq_lens=torch.tensor(lengths))
    with pytest.raises(ValueError, match="seq_lens"):
        case.simulate(0.1)


def test_low_precision_and_missing_layers_are_refused() -> None:
    case = make_case([5])
    with pytest.raises(ValueError, match="x:"):
        dataclasses.replace(case, x=case.x.bfloat16()).simulate(0.1)
    with pytest.raises(ValueError, match="layers"):
        dataclasses.replace(case, v_cache=case.v_cache[1:]).simulate(0.1)
    with pytest.raises(ValueError, match="layers"):
        dataclasses.replace(case, k_cache=[], v_cache=[]).simulate(0.1)


NB = -(-CAPACITY // 64)


def random_masses(batch: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(batch, HKV, NB, generator=generator, dtype=torch.float64) for _ in range(L)]


def test_all_blocks_recalled_are_full_attention() -> None:
    # A block that has just left the window is not in the list of the token before.
    lengths = torch.tensor(RAGGED)
    (_, window), (_, before) = predictor_ranges(lengths, S), predictor_ranges(lengths - 1, S)
    complete = lengths[(window == before) | (lengths < 2 * S + 64)].tolist()
    case, masses = make_case(complete), random_masses(len(complete), 1)
    recalled, full = case.simulate(math.inf, recall_blocks=NB, masses=masses), case.simulate(0)
    assert recalled.accepted.all()
    torch.testing.assert_close(recalled.x, full.x, rtol=1e-12, atol=1e-12)
    assert not full.masses


@pytest.mark.parametrize("windows", [(), (300, None, 450, 130), (319, 20, None, 319)])
def test_recalled_blocks_and_masses_of_a_step(windows: tuple[int | None, ...]) -> None:
    """Against masks: each KV head reads its own blocks, and masses are those of the full attention."""
    case, masses = with_windows(make_case([480, 440], 7), windows), random_masses(2, 2)
    result = case.simulate(0, recall_blocks=1, masses=masses)
    token, n = torch.arange(CAPACITY), case.seq_lens[:, None]
    window = (n - S).clamp(min=0) // 64 * 64
    for layer, keys in enumerate(result.k_cache):
        q, _, _ = case.decoder.pre_attention(layer, layer_input(case, layer), case.seq_lens - 1)
        scores = torch.einsum("bhgd,bhtd->bhgt", q.unflatten(1, (HKV, -1)), keys.nan_to_num()) * SM_SCALE
        there = (token < n) & (token >= n - ((windows[layer] if windows else None) or CAPACITY))
        weights = scores.masked_fill(~there[:, None, None], -math.inf).softmax(-1)
        padded = torch.nn.functional.pad(weights, (0, NB * 64 - CAPACITY))
        expected = padded.unflatten(-1, (NB, 64)).sum(-1).amax(2)
        torch.testing.assert_close(result.masses[layer], expected, rtol=1e-10, atol=1e-12)
    # The verdict of the first layer compares with A~ over sink, window and the heaviest block of each KV head.
    first, own = torch.arange(NB) * 64, windows[0] if windows else CAPACITY
    assert own is not None
    # Candidates have a visible token of the token before.
    between = ((first >= S) & (first + 64 <= window) & (first + 64 > n - 1 - own))[:, None]
    block = masses[0].masked_fill(~between, -1).argmax(-1)
    read = ((token < S) | (token >= window))[:, None] | (token // 64 == block[..., None])
    q, k, v = case.decoder.pre_attention(0, case.x, case.seq_lens - 1)
    keys, values = case.k_cache[0].clone(), case.v_cache[0].clone()
    rows = torch.arange(2)
    keys[rows, :, case.seq_lens - 1], values[rows, :, case.seq_lens - 1] = k, v
    outs = []
    there = ((token < n) & (token >= n - own))[:, None]
    for mask in (read & there, there.expand(2, HKV, CAPACITY)):
        heads = mask.repeat_interleave(HQ // HKV, 1)
        k_heads, v_heads = (x.masked_fill(~mask[..., None], 0).repeat_interleave(HQ // HKV, 1) for x in (keys, values))
        scores = torch.einsum("bhd,bhtd->bht", q, k_heads) * SM_SCALE
        outs.append(torch.einsum("bht,bhtd->bhd", scores.masked_fill(~heads, -math.inf).softmax(-1), v_heads))
    error = relative_error([(outs[0], outs[1])])[0]
    for factor, expected_hits in ((1.001, [True, True]), (0.999, [False, False])):
        for request in range(2):
            hits = case.simulate(float(error[request]) * factor, recall_blocks=1, masses=masses).hit_map[0]
            assert bool(hits[request]) == expected_hits[request]


def layer_input(case: Case, layer: int) -> Tensor:
    """x before a layer under full attention."""
    inputs = [case.x]
    _, _, outputs = run_decoder(case, lambda layer, spec, full: full)
    for index, (_, full) in enumerate(outputs[:-1]):
        inputs.append(case.decoder.post_attention(index, inputs[-1], full))
    return inputs[layer]
