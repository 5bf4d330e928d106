"""Recalled blocks: one pass over a text gives what token-by-token attention gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from alspec.predictor import KV_TILE, predictor_ranges, recall_lists, recalled_blocks
from alspec.runtime.eval import teacher_forced
from alspec.runtime.eval.teacher_forced import CachedTensor, CacheSetting, cache_text, teacher_forced_attention

HQ, HKV, D, S = 6, 2, 16, 64


def text(num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with a few tokens that many queries look up, so that masses differ."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(num_tokens, heads, D, generator=generator) for heads in (HQ, HKV, HKV))
    k[torch.randint(num_tokens, (9,), generator=generator)] *= 4
    return q, k.transpose(0, 1), v.transpose(0, 1)


def step_by_step(
    q: Tensor, k: Tensor, v: Tensor, first: int, count: int, start: int, sliding_window: int | None
) -> tuple[Tensor, Tensor]:
    """`A` and `A~` of the positions from `first` on, in fp64; masses are those of the positions from `start` on."""
    num_tokens, mass = len(q), torch.zeros(HKV, -(-len(q) // KV_TILE), dtype=torch.float64)
    rows = (q.double() * D**-0.5).unflatten(1, (HKV, -1))
    outs = []
    for n in range(start + 1, num_tokens + 1):
        scores = torch.einsum("hgd,htd->hgt", rows[n - 1], k[:, :n].double())
        scores[..., : max(0, n - (sliding_window or n))] = -math.inf
        weights = scores.softmax(-1)
        sink_end, window_start = predictor_ranges(torch.tensor(n), S)
        token = torch.arange(n)
        read = ((token < sink_end) | (token >= window_start)).expand(HKV, n).clone()
        last_window = predictor_ranges(torch.tensor(n - 1), S)[1]
        visible = max(0, n - 1 - (sliding_window or n))
        between = [
            block
            for block in range(mass.shape[1])
            if 64 * block >= S and 64 * block + 64 <= last_window and 64 * block + 64 > visible
        ]
        for head in range(HKV):
            for block in sorted(between, key=lambda block: (-float(mass[head, block]), block))[:count]:
                read[head, 64 * block : 64 * block + 64] = True
        spec = scores.masked_fill(~read[:, None], -math.inf).softmax(-1)
        if n > first:
            values = v[:, None, :n].double()
            outs.append([(w[..., None] * values).sum(2).flatten(0, 1) for w in (weights, spec)])
        padded = torch.nn.functional.pad(weights, (0, mass.shape[1] * 64 - n))
        mass = padded.unflatten(-1, (-1, 64)).sum(-1).amax(1)
    full_out, spec_out = zip(*outs, strict=True)
    return torch.stack(full_out), torch.stack(spec_out)


@pytest.mark.parametrize("sliding_window", [None, 277, 320])
@pytest.mark.parametrize(("num_tokens", "prompt", "count"), [(701, 0, 3), (650, 301, 2), (333, 1, 1), (500, 499, 4)])
def test_a_text_at_once(
    num_tokens: int, prompt: int, count: int, sliding_window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in several slices of positions. The prompt's last token gives the first masses."""
    monkeypatch.setitem(teacher_forced.SCORES_AT_ONCE, "cpu", 97 * HQ * num_tokens * 2)
    q, k, v = text(num_tokens, num_tokens)
    setting = CacheSetting(recall_blocks=count, sliding_window=sliding_window)
    cached = cache_text(k, v, max(prompt, 1), setting)
    before = q[prompt - 1 : prompt] if prompt else None
    found = teacher_forced_attention(q[prompt:], *cached, S, D**-0.5, setting, before)
    expected = step_by_step(q, k, v, prompt, count, max(prompt - 1, 0), sliding_window)
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-4, atol=1e-5)
    nothing = CacheSetting(sliding_window=sliding_window)
    window = teacher_forced_attention(q[prompt:], *cached, S, D**-0.5, nothing)[1]
    assert not torch.allclose(window, found[1], atol=1e-3), "recalled blocks must change A~"


def test_all_blocks_recalled_are_full_attention() -> None:
    q, k, v = text(517, 3)
    setting = CacheSetting(recall_blocks=8)
    cached = CachedTensor(k, k), CachedTensor(v, v)
    full_out, spec_out = teacher_forced_attention(q, *cached, S, D**-0.5, setting)
    # A block that has just left the window is not in the list of the token before.
    lengths = torch.arange(1, 518)
    is_complete = predictor_ranges(lengths, S)[1] == predictor_ranges(lengths - 1, S)[1]
    is_complete |= predictor_ranges(lengths, S)[1] == predictor_ranges(lengths, S)[0]
    assert (~is_complete).sum() < 9
    torch.testing.assert_close(spec_out[is_complete], full_out[is_complete], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_the_heaviest_blocks_between_sink_and_window(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 1200, (5,), generator=generator)
    mass = torch.randint(4, (5, 3, 19), generator=generator).float()  # many are equal
    sink_end, window_start = predictor_ranges(lengths, S)
    for count in (1, 2, 7, 40):
        chosen = recalled_blocks(mass, sink_end[:, None], window_start[:, None], count)
        for request, n in enumerate(lengths.tolist()):
            start = int(window_start[request])
            between = [block for block in range(19) if n > S and block >= S // 64 and 64 * block + 64 <= start]
            for head in range(3):
                best = sorted(between, key=lambda block: (-float(mass[request, head, block]), block))[:count]
                assert chosen[request, head].nonzero().flatten().tolist() == sorted(best)
                listed = recall_lists(mass, sink_end[:, None], window_start[:, None], count)[request, head].tolist()
                assert listed == sorted(best) + [-1] * (count - len(best))
