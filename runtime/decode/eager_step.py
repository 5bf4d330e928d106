"""The eager decode step: plain operations, launched one by one, with tokens and verdicts on the host.

It runs every mode on any device, and it is the program that reads like the method: `_paired` is ALSpec's Algorithm 2.
For each layer: `pre_attention` (gated), speculative attention (never gated), `post_attention` (gated). A gated
operation is skipped on the ranks of a group with priority 0, because the other group holds the right `x`.

Shapes: B requests, Hq and Hkv query and KV heads of this rank, D head_dim, L layers, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alspec.config import SamplingConfig, SpeculationConfig
from alspec.kernels.attention.dispatch import CacheLayer, DecodeAttention, KVLayer
from alspec.kernels.sampling.adjustment import count_newest
from alspec.kernels.sampling.logprobs import Logprobs, logprobs_ref
from alspec.models.llama import Llama
from alspec.priority import INITIAL_PRIORITY, after_handover, after_verdict, sender, skips_compute
from alspec.runtime.cache.codecs import Cache
from alspec.runtime.cache.recall_state import new_recall_state
from alspec.runtime.decode.decode_step import StepRecord, warm_up_steps
from alspec.runtime.decode.eager_sampling import sample, starting_counts
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.distributed.transport import PairMessage, Transport
from alspec.runtime.faults.bad_steps import bad_logits_error
from alspec.verdict import accepts, combine_sums, layer_verdict

__all__ = ["DecodeState", "EagerStep", "ForwardResult", "choose_tokens", "gather_logits"]


@dataclass(frozen=True)
class DecodeState:
    """Inputs of a step: each request's newest token, its length with this token, and whether it is still generating."""

    token_ids: Tensor  # [B] int64, on the device
    seq_lens: Tensor  # [B] int32, on the device
    live: Tensor  # [B] bool, on the host


@dataclass(frozen=True)
class ForwardResult:
    """Results of the layers and the LM head of one step."""

    logits: Tensor  # [B, V] fp32, the same bits on every rank
    hits: Tensor | None  # [L, B] bool on the host; False for a request that has ended; None without speculation
    layer_sums: Tensor  # [L] fp32 on the device: not finite where this rank's activations were not


def gather_logits(model: Llama, transport: Transport, x: Tensor) -> Tensor:
    """LM head over all shards of the vocabulary: x [n, hidden] fp32 -> [n, V] fp32, the same on every rank."""
    vocab_size = model.config.vocab_size
    rows = -(-vocab_size // transport.placement.shard.vocab_shards)
    shard = model.lm_head(x)
    padded = torch.nn.functional.pad(shard, (0, rows - shard.shape[1]))
    return transport.all_gather_peers(padded).movedim(0, 1).flatten(1)[:, :vocab_size]


def choose_tokens(
    logits: Tensor,
    layer_sums: Tensor,
    sampling: SamplingConfig,
    seq_lens: list[int],
    seen: Tensor | None,
    step: int,
    transport: Transport,
) -> tuple[list[int], Logprobs | None]:
    """Choose each request's next token on the device and bring it to the host.

    Args:
        logits: [B, V] fp32.
        layer_sums: [L] fp32, see `ForwardResult`; they locate bad numbers.
        seq_lens: B lengths, the positions of the new tokens.
        seen: [B, V] int32, see `tokens_seen`; needed for penalties.
        step: number of the decode step; 0 is the prompt's.
    Returns:
        The tokens, and their log probabilities if `sampling` asks for them.
    Raises:
        BadNumbersError: logits are NaN or Inf; names rank, layer and step.
    """
    request = torch.arange(len(seq_lens), device=logits.device)
    tokens = sample(logits, sampling, request, torch.tensor(seq_lens, device=logits.device), seen)
    finite = torch.isfinite(logits).all().to(tokens.dtype)
    *chosen, is_finite = torch.cat([tokens, finite[None]]).tolist()
    if not is_finite:
        raise bad_logits_error(logits, layer_sums, step, transport)
    return chosen, None if sampling.logprobs is None else logprobs_ref(logits, tokens, sampling.logprobs)


class EagerStep:
    """Decode steps of one rank in one mode: `off`, `simulated` or `paired`."""

    is_fused = False
    uses_graph = False
    launched = 0  # the host waits for every step
    recent_kinds = ""

    def __init__(
        self,
        model: Llama,
        cache: Cache,
        transport: Transport,
        mode: str,
        speculation: SpeculationConfig,
        operation: OperationHook,
    ) -> None:
        self._model = model.for_decoding()
        self._cache = cache
        self._transport = transport
        self.threshold = speculation.threshold
        config, tp_size = model.config, transport.placement.tp_size
        num_qo_heads = config.num_qo_heads // tp_size
        layers = [cache.layer(layer) for layer in range(cache.num_layers)]
        self._recall = new_recall_state(cache, num_qo_heads, 0 if mode == "off" else speculation.recalled)
        self.prompt_queries: Tensor | None = None
        if self._recall is not None:
            shape = (cache.num_layers, cache.batch_size, num_qo_heads, cache.head_dim)
            self.prompt_queries = torch.zeros(shape, dtype=model.weights.embedding.dtype, device=cache.device)
        self._attention = DecodeAttention(
            layers, num_qo_heads, speculation.chunk_size, model.sm_scale, cache.device, self._recall
        )
        self._operation = operation
        self._group = transport.placement.group
        self._priority = INITIAL_PRIORITY
        self._verdict: PairMessage | None = None
        self._hits: list[Tensor] = []
        self._is_paired = mode == "paired"
        # Plain functions: a bound method would be a reference cycle, which keeps weights and cache until garbage is
        # collected.
        attentions = {"off": EagerStep._full, "simulated": EagerStep._simulated, "paired": EagerStep._paired}
        self._attend = attentions[mode]
        self._sampling = SamplingConfig()
        self._seen: Tensor | None = None  # with penalties: see `tokens_seen`
        self._is_warm = cache.device.type != "cuda"
        self._steps = 0
        self._token_ids: list[int] = []
        self._seq_lens: list[int] = []

    @property
    def next_step(self) -> int:
        """Number of the running step: eager steps are never launched ahead. See `DecodeStep.next_step`."""
        return self._steps

    def set_verdict_rule(self, threshold: float, forced: Tensor | None = None) -> None:
        """Change the threshold. Eager steps cannot force verdicts. See `DecodeStep.speculate`."""
        assert forced is None, "verdicts of an eager step are not forced"
        self.threshold = threshold

    def prepare(self, sampling: SamplingConfig, kept: Sequence[int] | None = None) -> int:
        """On a GPU, run one step the first time, to compile its kernels. See `DecodeStep.prepare`."""
        self._sampling = sampling
        if not self._is_warm:
            warm_up_steps(self, kept or [0] * self._cache.batch_size, 1)
            self._is_warm = True
        return 0

    def begin(
        self,
        token_ids: list[int],
        seq_lens: list[int],
        seen: Tensor | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
        continued: Sequence[int] = (),
    ) -> None:
        """Set tokens and lengths, and make group 0 the first sender. See `DecodeStep.begin`."""
        self._token_ids, self._seq_lens = list(token_ids), list(seq_lens)
        self._seen = starting_counts(
            self._sampling, seen, len(token_ids), self._model.config.vocab_size, self._cache.device
        )
        self._priority = INITIAL_PRIORITY
        self._steps = 0
        if self._recall is not None:
            if prompts is None:
                self._recall.lists.fill_(-1)
            else:
                assert self.prompt_queries is not None
                prompt_lens = torch.tensor(seq_lens, dtype=torch.int32, device=self._cache.device) - 1
                self._attention.recall_prompts(self.prompt_queries, prompt_lens, continued)

    def step(self, remaining: int, live: list[bool] | None = None) -> StepRecord:
        """Run one step; a request that has ended keeps its newest token. See `DecodeStep.step`.

        Raises:
            BadNumbersError: logits are NaN or Inf; no token of this step is returned.
        """
        started = time.perf_counter()
        self._steps += 1
        live = live or [True] * len(self._token_ids)
        token_ids = torch.tensor(self._token_ids, device=self._cache.device)
        if self._seen is not None:
            count_newest(self._seen, token_ids)
        result = self.run(
            DecodeState(
                token_ids=token_ids,
                seq_lens=torch.tensor(self._seq_lens, dtype=torch.int32, device=self._cache.device),
                live=torch.tensor(live),
            )
        )
        chosen, logprobs = choose_tokens(
            result.logits, result.layer_sums, self._sampling, self._seq_lens, self._seen, self._steps, self._transport
        )
        self._token_ids = [new if on else old for new, old, on in zip(chosen, self._token_ids, live, strict=True)]
        self._seq_lens = [length + on for length, on in zip(self._seq_lens, live, strict=True)]
        tokens = [[token] for token in self._token_ids]
        return StepRecord(tokens, result.hits, (time.perf_counter() - started) * 1e6, 0, logprobs)

    def launch_missing(self, launched: int, kinds: str) -> None:
        """Do nothing: no eager step is ever in flight. See `DecodeStep.launch_missing`."""

    def release(self) -> None:
        """Do nothing: there is no graph. See `DecodeStep.release`."""

    def run(self, state: DecodeState) -> ForwardResult:
        """The layers and the LM head of one step."""
        self._state = state
        self._positions = state.seq_lens - 1
        self._hits = []
        x, partial = self._model.embed(state.token_ids), None
        qkv: tuple[Tensor, ...] = ()
        layer_sums = torch.zeros(self._model.num_layers, device=x.device)
        for layer in range(self._model.num_layers):
            if not self._skip_compute():
                with self._operation("pre_attention", layer):
                    x, *qkv_list = self._model.pre_attention(layer, x, partial, self._positions)
                    qkv = tuple(qkv_list)
            x, attn_out = self._attend(self, layer, x, qkv)
            if not self._skip_compute():
                with self._operation("post_attention", layer):
                    x, partial = self._model.post_attention(layer, x, attn_out)
                    layer_sums[layer] = x.sum() + partial.sum(dtype=torch.float32)
        x = self._agree(x, partial)
        with self._operation("lm_head", self._model.num_layers):
            logits = gather_logits(self._model, self._transport, x)
        hits = torch.stack(self._hits).cpu() & state.live if self._hits else None
        return ForwardResult(logits, hits, layer_sums)

    def _skip_compute(self) -> bool:
        """Return whether this rank skips gated operations, because its group does not hold the right `x`."""
        return self._is_paired and skips_compute(self._priority, self._group)

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._cache.append(layer, k, v, self._state.seq_lens)

    def _layer_cache(self, layer: int) -> tuple[CacheLayer, Tensor]:
        cache, seq_lens = self._cache.layer(layer), self._state.seq_lens
        return cache, cache.lengths(seq_lens) if isinstance(cache, KVLayer) else seq_lens

    def _full(self, layer: int, x: Tensor, qkv: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Append k and v, then full attention, without speculation."""
        q, k, v = qkv
        with self._operation("attention", layer):
            self._append(layer, k, v)
            out = self._attention.full(q, *self._layer_cache(layer))
        return x, out

    def _predict(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with self._operation("predictor", layer):
            self._append(layer, k, v)
            return self._attention.predict(q, *self._layer_cache(layer), layer)

    def _verify(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Full attention, and each request's verdict [B], the same on every rank of the group."""
        with self._operation("full_attention", layer):
            full_out, sums = self._attention.verify(q, *self._layer_cache(layer), layer)
            self._attention.recall(self._state.seq_lens, layer)
        with self._operation("verdict", layer):
            sums = combine_sums(self._transport.all_gather_group(sums))
            return full_out, accepts(sums, self.threshold)

    def _simulated(self, layer: int, x: Tensor, qkv: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Compute `A~`, then `A`, in one group. The next layer gets `A~` if it is accepted, else `A`."""
        spec_out = self._predict(layer, *qkv)
        full_out, hits = self._verify(layer, qkv[0])
        self._hits.append(hits)
        accepted = layer_verdict(hits, self._state.live.to(hits.device))
        return x, torch.where(accepted, spec_out, full_out)

    def _paired(self, layer: int, x: Tensor, qkv: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Two groups: the sender speculates, hands over and verifies; the receiver continues on `A~`.

        Source: Attention-Level Speculation, Algorithm 2 (priority gating).
        """
        self._read_verdict()
        if self._group == sender(self._priority):
            spec_out = self._predict(layer, *qkv)
            # The message has its own stream (or Gloo's thread), so the full attention below does not wait for it.
            self._transport.send(_pack(x, *qkv[1:], spec_out))
            self._priority = after_handover(self._priority)
            full_out, hits = self._verify(layer, qkv[0])
            self._transport.send(_pack(hits, *self._lists(layer)))
            with self._operation("verdict", layer):
                self._record_verdict(hits.cpu())
            return x, full_out
        with self._operation("handover", layer):
            x, k, v, spec_out = self._receive_handover(x)
            self._append(layer, k, v)
        self._verdict = self._transport.receive((sum(self._verdict_sizes()),))
        self._priority = after_handover(self._priority)
        return x, spec_out

    def _receive_handover(self, x: Tensor) -> tuple[Tensor, ...]:
        config, tp_size = self._model.config, self._transport.placement.tp_size
        batch = self._cache.batch_size
        num_qo_heads, num_kv_heads = config.local_heads(tp_size)
        kv_shape = (batch, num_kv_heads, config.head_dim)
        shapes = [tuple(x.shape), kv_shape, kv_shape, (batch, num_qo_heads, config.head_dim)]
        packed = self._transport.receive((sum(map(math.prod, shapes)),)).wait()
        parts = packed.split([math.prod(shape) for shape in shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))

    def _read_verdict(self) -> None:
        """On the receiver of the previous layer, wait for the verdict on that layer's `A~`."""
        if self._verdict is not None:
            layer = len(self._hits)  # every layer so far has one verdict
            with self._operation("verdict", layer):
                hits, lists = self._verdict.wait().split_with_sizes(self._verdict_sizes())
                for own in self._lists(layer):
                    own.copy_(lists.view(own.shape))
                self._record_verdict(hits.cpu() > 0)
            self._verdict = None

    def _lists(self, layer: int) -> list[Tensor]:
        """The recall lists of a layer, [B, Hkv, M] int32, which the sender's verdict brings; none without recall."""
        return [] if self._recall is None else [self._recall.lists[layer]]

    def _verdict_sizes(self) -> list[int]:
        """Values in the message with a verdict: each request's hit, then the layer's recall lists."""
        return [self._cache.batch_size, sum(lists.numel() for lists in self._lists(0))]

    def _record_verdict(self, hits: Tensor) -> None:
        self._hits.append(hits)
        accepted = bool(layer_verdict(hits, self._state.live))
        self._priority = after_verdict(self._priority, accepted)

    def _agree(self, x: Tensor, partial: Tensor | None) -> Tensor:
        """Finish the last all-reduce and give the right `x` to both groups."""
        if not self._is_paired:
            return self._model.reduce_residual(x, partial)
        self._read_verdict()
        with self._operation("agree", self._model.num_layers):
            if self._group == sender(self._priority):
                x = self._model.reduce_residual(x, partial)
                self._transport.send(x)
            else:
                x = self._transport.receive(x.shape).wait()
            self._transport.flush()
        return x


def _pack(*tensors: Tensor) -> Tensor:
    """Concatenate tensors to one flat fp32 message. The conversion keeps bf16 and fp16 values exactly."""
    return torch.cat([tensor.float().flatten() for tensor in tensors])
