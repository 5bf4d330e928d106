"""Fused steps of two paired groups, both ranks in one process, against the simulated eager step; with forced verdicts
against one rank, bit for bit.

The interpreter cannot wait, so the sender of each layer runs first. The priorities on the device tell which rank sends.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiers import fast
from torch import Tensor

from alspec.config import SpeculationConfig
from alspec.kernels.attention.decode.combine import num_sums
from alspec.kernels.attention.decode.lean_decode import SpecOutput
from alspec.kernels.attention.dispatch import KVLayer, attend
from alspec.kernels.attention.recall import RecallState
from alspec.kernels.comm.exchange import Exchange, LogitExchange
from alspec.kernels.comm.pair_state import PairShape, PairState
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.llama import Llama, load_weights
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import Cache, new_cache
from alspec.runtime.decode.decoder import DecodeBuffers, Decoder
from alspec.runtime.decode.eager_step import DecodeState, EagerStep
from alspec.runtime.decode.hooks import no_hook
from alspec.runtime.decode.paired_decoder import PairedDecoder, SpeculationState
from alspec.runtime.decode.prefill import prefill
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.distributed.transport import Transport

CPU = torch.device("cpu")
S = 128
# The second step completes a block, which the third step reads.
PROMPT = torch.randint(256, (382,), generator=torch.Generator().manual_seed(2)).tolist()
STEPS = 3


class Pair:
    """Two paired ranks with the same model, each with its own cache and memory."""

    def __init__(
        self,
        model: Llama,
        threshold: float,
        codec: str,
        forced: Tensor | None = None,
        stops_early: bool = True,
        recall_blocks: int = 0,
        prompt: list[int] = PROMPT,
    ) -> None:
        config, self.model = model.config, model
        transport = Transport(Placement(), CPU, "gloo", None)
        shape = PairShape(
            config.num_layers, 1, 1, config.hidden_size, config.num_qo_heads, config.num_kv_heads, config.head_dim,
            1 + bool(recall_blocks), recall_blocks,
        )  # fmt: skip
        memories = [torch.zeros(sum(shape.field_sizes()), dtype=torch.int64) for _ in range(2)]
        meetings = torch.zeros(2, 2, dtype=torch.int64)
        self.epoch = torch.ones(1, dtype=torch.int32)
        self.ranks = []
        self.is_new = True
        self.caches = [_cache(config, codec, prompt) for _ in range(2)]
        for group, cache in enumerate(self.caches):
            prefill(model, cache, transport, 0, prompt, no_hook)
            exchange = Exchange(torch.zeros(1, config.hidden_size), self.epoch, torch.zeros(1, dtype=torch.int32))
            own, paired = memories[group], memories[1 - group]
            pair = PairState.build(
                shape, exchange, group, 1 - group, own, paired, [own.data_ptr()],
                meetings[group], [meeting.data_ptr() for meeting in meetings],
            )  # fmt: skip
            pairing = SpeculationState(
                threshold=threshold,
                chunk_size=S,
                hits=torch.full((config.num_layers, 1), -1, dtype=torch.int32),
                live=torch.ones(1, dtype=torch.int32),
                forced=forced,
                recall=_recall(config, cache, recall_blocks),
            )
            sums = torch.full((1, num_sums(1, shape.num_qo_heads, shape.head_dim), 2), torch.nan)
            logit_exchange = LogitExchange(torch.zeros(1, config.vocab_size), self.epoch, exchange.fault)
            buffers = DecodeBuffers.allocate(config, 1, 1, torch.float32, CPU)
            self.ranks.append(
                PairedDecoder(
                    config, model.weights, model.rotary, cache, buffers, exchange, logit_exchange,
                    transport.all_reduce, transport.all_gather_world, pairing, pair, sums, stops_early,
                )
            )  # fmt: skip

    def in_order(self) -> list[PairedDecoder]:
        """The sender, then the receiver."""
        return sorted(self.ranks, key=lambda rank: -self._rank_of(rank))

    def _rank_of(self, rank: PairedDecoder) -> int:
        own, other = rank.pair.priority.tolist()
        # A receiver that waits for its verdict has (1, 2); the old sender's own priority contains the verdict.
        return {(2, 0): 3, (2, 1): 3, (1, 2): 2, (0, 1): 1, (0, 2): 0}[own, other]

    def step(self, token_id: int, seq_len: int) -> tuple[list[Tensor], list[Tensor]]:
        """Logits [1, V] and hits [L, 1] on both ranks."""
        for rank in self.ranks:
            if self.is_new and rank.speculation.recall is not None:
                rank.publish_lists()
        self.is_new = False
        for rank in self.ranks:
            rank.buffers.token_ids.fill_(token_id)
            rank.buffers.seq_lens.fill_(seq_len)
            rank.embed()
        for layer in range(self.model.num_layers):
            for rank in self.ranks:
                rank.pre_attention(layer)
            for rank in self.in_order():
                rank.attention(layer)
            for rank in self.ranks:
                rank.post_attention(layer)
        for rank in self.in_order():
            rank.finish_layers()
        for rank in self.ranks:
            rank.logits()
        self.epoch += 1
        return [rank.buffers.logits for rank in self.ranks], [rank.speculation.hits.bool() for rank in self.ranks]


class OneRank:
    """What two groups with these verdicts have to compute, by the same kernels: each layer goes on with `A~` or `A`."""

    def __init__(self, model: Llama, verdicts: tuple[int, ...]) -> None:
        config, self.verdicts = model.config, verdicts
        transport = Transport(Placement(), CPU, "gloo", None)
        self.cache = _cache(config, "bf16")
        prefill(model, self.cache, transport, 0, PROMPT, no_hook)
        epoch, fault = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self.buffers = DecodeBuffers.allocate(config, 1, 1, torch.float32, CPU)
        self.decoder = Decoder(
            config, model.weights, model.rotary, self.cache, self.buffers,
            Exchange(torch.zeros(1, config.hidden_size), epoch, fault),
            LogitExchange(torch.zeros(1, config.vocab_size), epoch, fault), transport.all_reduce,
            transport.all_gather_world,
        )  # fmt: skip

    def step(self, token_id: int, seq_len: int) -> Tensor:
        """Logits [1, V]."""
        buffers, decoder = self.buffers, self.decoder
        buffers.token_ids.fill_(token_id)
        buffers.seq_lens.fill_(seq_len)
        sums = torch.empty(1, num_sums(*buffers.q.shape), 2)
        speculation = SpecOutput(S, torch.empty_like(buffers.attn_out), sums)
        decoder.embed()
        for layer, accepted in enumerate(self.verdicts):
            decoder.pre_attention(layer)
            cache = decoder.cache
            attend(
                buffers.q, cache.layers[layer], buffers.seq_lens, cache.sm_scale, cache.workspace(layer),
                buffers.attn_out, buffers.lse, speculation,
            )  # fmt: skip
            assert not torch.equal(buffers.attn_out, speculation.spec_out)
            if accepted:
                buffers.attn_out.copy_(speculation.spec_out)
            decoder.post_attention(layer)
        decoder.logits()
        return buffers.logits


def _cache(config: LlamaConfig, codec: str, prompt: list[int] = PROMPT) -> Cache:
    return new_cache(codec, config, 1, 1, len(prompt) + STEPS + 2, torch.float32, CPU, keeps_context=True)


def _recall(config: LlamaConfig, cache: Cache, recall_blocks: int) -> RecallState | None:
    if not recall_blocks:
        return None
    return RecallState.allocate(
        config.num_layers, 1, config.num_qo_heads, config.num_kv_heads, cache.max_context, recall_blocks, 1, CPU,
        config.windows(cache.max_context),
    )  # fmt: skip


def _tensors(cache: Cache) -> dict[str, Tensor]:
    if isinstance(cache.layers, KVLayer):
        return {"k": cache.layers.k, "v": cache.layers.v}
    return cache.layers.tensors


CASES = [(codec, threshold) for codec in ("bf16", "turbo-mixed") for threshold in (0.0, 0.35, math.inf)]


@pytest.mark.parametrize(("codec", "threshold"), fast(CASES, [("bf16", math.inf), ("turbo-mixed", 0.35)]))
def test_both_ranks_compute_the_simulated_step(codec: str, threshold: float, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue("small_folder" if codec == "bf16" else "turbo_folder")
    config = LlamaConfig.from_folder(folder)
    weights = load_weights(Checkpoint.open(folder, config), config, Placement().shard, torch.float32, CPU)
    transport = Transport(Placement(), CPU, "gloo", None)
    model = Llama(config, weights, transport)
    cache = _cache(config, codec)
    prefill(model, cache, transport, 0, PROMPT, no_hook)
    eager = EagerStep(
        model,
        cache,
        transport,
        "simulated",
        SpeculationConfig(threshold=threshold, chunk_size=S, predictor="window"),
        no_hook,
    )
    pair = Pair(model, threshold, codec)
    token_id, verdicts = 5, set()
    for step in range(1, STEPS + 1):
        seq_len = len(PROMPT) + step
        state = DecodeState(
            torch.tensor([token_id]), torch.tensor([seq_len], dtype=torch.int32), torch.ones(1, dtype=torch.bool)
        )
        expected = eager.run(state)
        assert expected.hits is not None
        logits, hits = pair.step(token_id, seq_len)
        for found, found_hits in zip(logits, hits, strict=True):
            assert torch.equal(found_hits, expected.hits)
            assert (found - expected.logits).norm() < (1e-4 if codec == "bf16" else 5e-3) * expected.logits.norm()
        assert torch.equal(*logits)
        for name, tensor in _tensors(pair.caches[0]).items():
            assert torch.equal(tensor, _tensors(pair.caches[1])[name]), name
        verdicts |= set(expected.hits.flatten().tolist())
        token_id = int(expected.logits.argmax())
    assert verdicts == {0.0: {False}, math.inf: {True}}.get(threshold, {False, True})


RECALLING = [("bf16", "small_folder"), ("turbo-mixed", "turbo_folder"), ("bf16", "window_folder")]
RECALLING += [("bf16", "mixed_folder"), ("turbo-mixed", "mixed_folder"), ("turbo4", "mixed_folder")]


@pytest.mark.parametrize(("codec", "model_folder"), fast(RECALLING, keep=[RECALLING[0], RECALLING[2]]))
def test_both_ranks_recall_the_blocks_of_the_simulated_step(
    codec: str, model_folder: str, request: pytest.FixtureRequest
) -> None:
    """Groups change roles, and a group reads lists that the other one chose. Also with a sliding window."""
    folder = request.getfixturevalue(model_folder)
    config = LlamaConfig.from_folder(folder)
    weights = load_weights(Checkpoint.open(folder, config), config, Placement().shard, torch.float32, CPU)
    transport = Transport(Placement(), CPU, "gloo", None)
    model, prompt = Llama(config, weights, transport), [*PROMPT, *PROMPT[:250]]
    cache = _cache(config, codec, prompt)
    prefill(model, cache, transport, 0, prompt, no_hook)
    threshold = 0.2
    speculation = SpeculationConfig(threshold=threshold, chunk_size=S, predictor="recall", recall_blocks=2)
    eager = EagerStep(model, cache, transport, "simulated", speculation, no_hook)
    pair = Pair(model, threshold, codec, recall_blocks=2, prompt=prompt)
    token_id, verdicts = 5, set()
    for step in range(1, STEPS + 2):
        seq_len = len(prompt) + step
        state = DecodeState(
            torch.tensor([token_id]), torch.tensor([seq_len], dtype=torch.int32), torch.ones(1, dtype=torch.bool)
        )
        expected = eager.run(state)
        logits, hits = pair.step(token_id, seq_len)
        assert eager._recall is not None
        for rank, found, found_hits in zip(pair.ranks, logits, hits, strict=True):
            assert torch.equal(found_hits, expected.hits)
            assert (found - expected.logits).norm() < (1e-4 if codec == "bf16" else 5e-3) * expected.logits.norm()
            assert torch.equal(rank.next_lists(), eager._recall.lists)
        assert (eager._recall.lists >= 0).all()
        verdicts |= set(expected.hits.flatten().tolist())
        token_id = int(expected.logits.argmax())
    assert verdicts == {False, True}


VERDICTS = [((1, 1, 1, 1, 1), True), ((0, 0, 0, 0, 0), True), ((1, 0, 0, 1, 1), True), ((0, 1, 0, 1, 0), True)]
VERDICTS += [((1, 0, 0, 1, 1), False), ((0, 0, 1, 1, 0), False)]


@pytest.mark.parametrize(
    ("verdicts", "stops_early"), fast(VERDICTS, [((1, 0, 0, 1, 1), True), ((0, 0, 1, 1, 0), False)]), ids=str
)
def test_forced_verdicts_give_the_bits_of_one_group(
    small_folder: Path, verdicts: tuple[int, ...], stops_early: bool
) -> None:
    """Each sequence of roles. If an odd number of layers accepts, the other group sends first in the second step."""
    config = LlamaConfig.from_folder(small_folder)
    weights = load_weights(Checkpoint.open(small_folder, config), config, Placement().shard, torch.float32, CPU)
    layers = (weights.layers * 2)[: len(verdicts)]
    model = Llama(
        config.model_copy(update={"num_layers": len(layers)}),
        replace(weights, layers=layers),
        Transport(Placement(), CPU, "gloo", None),
    )
    pair = Pair(model, 0.1, "bf16", torch.tensor(verdicts, dtype=torch.int32), stops_early)
    one = OneRank(model, verdicts)
    for step, token_id in enumerate((5, 77), 1):
        expected = one.step(token_id, len(PROMPT) + step)
        logits, hits = pair.step(token_id, len(PROMPT) + step)
        for rank, cache, found, found_hits in zip(pair.ranks, pair.caches, logits, hits, strict=True):
            assert torch.equal(found, expected)
            assert torch.equal(rank.buffers.x, one.buffers.x)
            assert found_hits.flatten().tolist() == list(map(bool, verdicts))
            for name, tensor in _tensors(one.cache).items():
                assert torch.equal(_tensors(cache)[name], tensor), name
