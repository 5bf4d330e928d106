"""Reference semantics of attention-level speculation: one decode step in a single process.

Every layer computes the full output `A` and the speculative output `A~` by a softmax over an explicit list of tokens,
takes each request's verdict, and lets `A~` through when every live request accepts. Errors of an accepted `A~` reach
later layers and their keys and values; this is part of the method. It is slow on purpose, and the oracle of every
distributed mode.
Source: Attention-Level Speculation, Algorithms 1 and 2 and section 5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alspec.predictor import KV_TILE, block_masses, first_visible, predictor_ranges, recalled_blocks
from alspec.priority import INITIAL_PRIORITY, Priority, after_handover, after_verdict, sender, skips_compute
from alspec.verdict import accepts, distance_sums, layer_verdict

__all__ = ["PostAttention", "PreAttention", "SimulatedStep", "attend", "replay_priorities", "simulate_step"]

PreAttention = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(layer, x [B, hidden], position [B] int64) -> q [B, Hq, D], k [B, Hkv, D], v [B, Hkv, D]: norm, projection, RoPE."""
PostAttention = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, x [B, hidden], attention [B, Hq, D]) -> x [B, hidden]: output projection, residuals, norm, MLP."""


@dataclass(frozen=True)
class SimulatedStep:
    """Result of one simulated decode step of L layers and B requests."""

    x: Tensor
    """[B, hidden], after the last layer."""
    k_cache: list[Tensor]
    """L x [B, Hkv, capacity, D]: the input caches with the new token's keys."""
    v_cache: list[Tensor]
    """L x [B, Hkv, capacity, D]: the input caches with the new token's values."""
    hit_map: Tensor
    """[L, B] bool: each live request's own verdict; False for a request that is not live."""
    accepted: Tensor
    """[L] bool: the layer's verdict, True where `A~` was used."""
    senders: list[int]
    """L x group (0 or 1) that computes the layer's attention."""
    gated_ops: tuple[int, int]
    """Pre- and post-attention operations that each group runs. A receiver also runs those of a rejected layer."""
    priority: Priority
    """Priorities after the last layer: its sender holds `x`."""
    masses: list[Tensor]
    """L x [B, Hkv, NB]: masses of blocks in this token's full attention; empty without `recall_blocks`."""


def simulate_step(
    x: Tensor,
    k_cache: Sequence[Tensor],
    v_cache: Sequence[Tensor],
    seq_lens: Tensor,
    pre_attention: PreAttention,
    post_attention: PostAttention,
    *,
    threshold: float,
    chunk_size: int,
    sm_scale: float,
    live: Tensor | None = None,
    priority: Priority = INITIAL_PRIORITY,
    recall_blocks: int = 0,
    masses: Sequence[Tensor] = (),
    sliding_windows: Sequence[int | None] = (),
) -> SimulatedStep:
    """Run one decode step with speculation simulated. Inputs are not modified.

    Args:
        x: [B, hidden] fp32 or fp64, the embedded current tokens.
        k_cache: L x [B, Hkv, capacity, D], dtype of `x`: keys of the tokens before the current one; L >= 1.
        v_cache: as `k_cache`, values.
        seq_lens: [B] int32 or int64, tokens of each request, the current one included; its position is `seq_len - 1`.
        pre_attention: see `PreAttention`.
        post_attention: see `PostAttention`.
        threshold: lambda; 0 is full attention, inf is sink and window attention in every layer.
        chunk_size: S, tokens.
        sm_scale: softmax scale, usually `D ** -0.5`.
        live: [B] bool, requests that count in the layer's verdict; all if not given.
        priority: priorities at the start of the step.
        recall_blocks: blocks of 64 tokens that `A~` of a KV head reads beside sink and window (predictor.py).
        masses: with `recall_blocks`, L x [B, Hkv, NB], the masses of the token before.
        sliding_windows: newest tokens that a token attends to in each layer, None: all; not given: all in every layer.

    Returns:
        See `SimulatedStep`.

    Raises:
        ValueError: dtype of `x`, cache lists of unequal length or empty, a sequence length outside [1, capacity].

    """
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"x: expected float32 or float64, found {x.dtype}")
    if len(k_cache) != len(v_cache) or not k_cache:
        raise ValueError(f"expected caches of the same L >= 1 layers, found {len(k_cache)} and {len(v_cache)}")
    lengths = [int(n) for n in seq_lens.tolist()]
    capacity = k_cache[0].shape[2]
    if any(not 1 <= n <= capacity for n in lengths):
        raise ValueError(f"seq_lens: expected 1 .. {capacity} tokens, found {lengths}")

    live = torch.ones_like(seq_lens, dtype=torch.bool) if live is None else live
    position = seq_lens.to(torch.int64) - 1
    new_masses: list[Tensor] = []
    new_k, new_v = [layer.clone() for layer in k_cache], [layer.clone() for layer in v_cache]
    hits: list[Tensor] = []
    verdicts: list[Tensor] = []
    for layer, (keys, values) in enumerate(zip(new_k, new_v, strict=True)):
        q, k, v = pre_attention(layer, x, position)
        for request, n in enumerate(lengths):
            keys[request, :, n - 1] = k[request]
            values[request, :, n - 1] = v[request]
        window = sliding_windows[layer] if sliding_windows else None
        visible = [list(range(first, n)) for first, n in zip(first_visible(seq_lens, window), lengths, strict=True)]
        full_out = attend(q, keys, values, visible, sm_scale)
        if recall_blocks:
            chosen = _recalled(masses[layer], seq_lens, recall_blocks, chunk_size, window)
            spec_out = _attend_recalling(q, keys, values, visible, chosen, chunk_size, sm_scale)
            new_masses.append(_masses(q, keys, visible, masses[layer], sm_scale))
        else:
            spec_out = attend(q, keys, values, _spec_tokens(visible, chunk_size), sm_scale)
        request_accepts = accepts(distance_sums(spec_out, full_out), threshold)
        hits.append(request_accepts & live)
        verdicts.append(layer_verdict(request_accepts, live))
        x = post_attention(layer, x, spec_out if verdicts[-1] else full_out)

    accepted = torch.stack(verdicts)
    senders, gated_ops, priority = replay_priorities([bool(a) for a in accepted], priority)
    return SimulatedStep(x, new_k, new_v, torch.stack(hits), accepted, senders, gated_ops, priority, new_masses)


def attend(q: Tensor, k: Tensor, v: Tensor, tokens: Sequence[Sequence[int]], sm_scale: float) -> Tensor:
    """Softmax attention of each request over an explicit list of its tokens.

        o = sum_t w_t v_t / sum_t w_t,   w_t = exp(sm_scale q . k_t - max),   t in tokens[request]

    Args:
        q: [B, Hq, D].
        k: [B, Hkv, capacity, D]; query head h reads KV head `h // (Hq / Hkv)`.
        v: [B, Hkv, capacity, D].
        tokens: for each request, the positions it attends to, at least one, each once.
        sm_scale: softmax scale.

    Returns:
        [B, Hq, D] in q's dtype.

    """
    heads_per_kv = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for request, positions in enumerate(tokens):
        index = torch.tensor(positions, dtype=torch.int64, device=q.device)
        for head in range(q.shape[1]):
            keys = k[request, head // heads_per_kv, index]
            values = v[request, head // heads_per_kv, index]
            scores = sm_scale * (keys @ q[request, head])
            weights = torch.exp(scores - scores.max())
            out[request, head] = (weights @ values) / weights.sum()
    return out


def replay_priorities(
    accepted: Sequence[bool], priority: Priority = INITIAL_PRIORITY
) -> tuple[list[int], tuple[int, int], Priority]:
    """Follow the priority protocol through one step.

    Args:
        accepted: the verdict of each layer.
        priority: priorities at the start of the step.

    Returns:
        senders, gated_ops, priority: as in `SimulatedStep`.

    """
    senders: list[int] = []
    ops = [0, 0]

    def run_gated(priority: Priority) -> None:
        for group in (0, 1):
            ops[group] += not skips_compute(priority, group)

    for accept in accepted:
        run_gated(priority)  # pre-attention
        senders.append(sender(priority))
        priority = after_verdict(after_handover(priority), accept)
        run_gated(priority)  # post-attention
    return senders, (ops[0], ops[1]), priority


def _spec_tokens(visible: Sequence[Sequence[int]], chunk_size: int) -> list[list[int]]:
    """Visible positions in sink and window, for each request."""
    sink_end, window_start = predictor_ranges(torch.tensor([tokens[-1] + 1 for tokens in visible]), chunk_size)
    ranges = zip(visible, sink_end.tolist(), window_start.tolist(), strict=True)
    return [[t for t in tokens if t < sink or t >= window] for tokens, sink, window in ranges]


def _recalled(mass: Tensor, seq_lens: Tensor, count: int, chunk_size: int, sliding_window: int | None) -> Tensor:
    """[B, Hkv, NB] bool, the blocks that were heavy for the token before."""
    sink_end, window_start = predictor_ranges(seq_lens - 1, chunk_size, sliding_window)
    return recalled_blocks(mass, sink_end[:, None], window_start[:, None], count)


def _attend_recalling(
    q: Tensor, k: Tensor, v: Tensor, visible: Sequence[Sequence[int]], chosen: Tensor, chunk_size: int, sm_scale: float
) -> Tensor:
    """`A~` over the visible tokens of sink, window and the recalled blocks, which each KV head has of its own."""
    heads_per_kv, near = q.shape[1] // k.shape[1], _spec_tokens(visible, chunk_size)
    outs = []
    for head in range(k.shape[1]):
        tokens = [
            own + [t for t in visible[request] if chosen[request, head, t // KV_TILE]]
            for request, own in enumerate(near)
        ]
        own_heads = slice(head * heads_per_kv, (head + 1) * heads_per_kv)
        outs.append(attend(q[:, own_heads], k[:, head : head + 1], v[:, head : head + 1], tokens, sm_scale))
    return torch.cat(outs, dim=1)


def _masses(q: Tensor, k: Tensor, visible: Sequence[Sequence[int]], mass: Tensor, sm_scale: float) -> Tensor:
    """Masses of this token's full attention, in the shape of `mass`."""
    found = torch.zeros_like(mass)
    for request, tokens in enumerate(visible):
        rows = q[request].unflatten(0, (k.shape[1], -1))  # [Hkv, G, D]
        weights = torch.softmax(sm_scale * (rows @ k[request, :, tokens].transpose(1, 2)), dim=-1)
        blocks = torch.tensor(tokens, device=q.device) // KV_TILE
        found[request] = block_masses(weights, blocks, mass.shape[-1])
    return found
