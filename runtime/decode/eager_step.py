"""The step program: one list of operations, the same on every rank, with gates and roles from the priority vector.

For each layer: `pre_attention` (gated), speculative attention (never gated), `post_attention` (gated). A gated
operation is skipped on a rank whose own priority is 0: the other group holds the right `x`.

Shapes: B requests, Hq and Hkv this rank's query and KV heads, D head_dim, L layers, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from alspec.kernels.attention.dispatch import CacheLayer, DecodeAttention
from alspec.models.llama import Llama
from alspec.priority import INITIAL_PRIORITY, after_handover, after_verdict, sender, skips_compute
from alspec.runtime.cache.codecs import Cache
from alspec.runtime.decode.hooks import OperationHook
from alspec.runtime.distributed.transport import PairMessage, Transport
from alspec.verdict import accepts, combine_sums, layer_verdict

__all__ = ["DecodeState", "EagerStep", "StepResult", "gather_logits"]


@dataclass(frozen=True)
class DecodeState:
    """What a step reads: the newest token of each request, lengths including it, and who is still generating."""

    token_ids: Tensor  # [B] int64, on the device
    seq_lens: Tensor  # [B] int32, on the device
    live: Tensor  # [B] bool, on the host


@dataclass(frozen=True)
class StepResult:
    """What a step leaves: logits, and each request's verdict in each layer (None where nothing was speculated)."""

    logits: Tensor  # [B, V] fp32, the same bits on every rank
    hits: Tensor | None  # [L, B] bool on the host; False for a request that has ended
    layer_sums: Tensor  # [L] fp32 on the device: not finite where this rank's activations were not


def gather_logits(model: Llama, transport: Transport, x: Tensor) -> Tensor:
    """LM head over the vocabulary shards of all ranks: x [n, hidden] fp32 -> [n, V] fp32, the same on every rank."""
    vocab_size = model.config.vocab_size
    rows = -(-vocab_size // transport.placement.world_size)
    shard = model.lm_head(x)
    padded = torch.nn.functional.pad(shard, (0, rows - shard.shape[1]))
    return transport.all_gather_world(padded).movedim(0, 1).flatten(1)[:, :vocab_size]


class EagerStep:
    """Decode steps of one rank in one mode: `off`, `simulated` or `paired`."""

    def __init__(
        self,
        model: Llama,
        cache: Cache,
        transport: Transport,
        mode: str,
        threshold: float,
        chunk_size: int,
        operation: OperationHook,
    ) -> None:
        self._model = model
        self._cache = cache
        self._transport = transport
        self.threshold = threshold
        config, tp_size = model.config, transport.placement.tp_size
        self._attention = DecodeAttention(
            cache.layer(0), config.num_qo_heads // tp_size, chunk_size, model.sm_scale, cache.device
        )
        self._operation = operation
        self._group = transport.placement.group
        self._priority = INITIAL_PRIORITY
        self._verdict: PairMessage | None = None
        self._hits: list[Tensor] = []
        self._is_paired = mode == "paired"
        # Plain functions: a bound method would be a reference cycle, which keeps weights and cache until garbage is
        # collected.
        ways = {"off": EagerStep._full, "simulated": EagerStep._simulated, "paired": EagerStep._paired}
        self._attend = ways[mode]

    def run(self, state: DecodeState) -> StepResult:
        """Decode one token for each request."""
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
        return StepResult(logits, hits, layer_sums)

    def _skip_compute(self) -> bool:
        """The gate: this rank's group has nothing right to compute on."""
        return self._is_paired and skips_compute(self._priority, self._group)

    def _append(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._cache.append(layer, k, v, self._state.seq_lens)

    def _layer_cache(self, layer: int) -> tuple[CacheLayer, Tensor]:
        return self._cache.layer(layer), self._state.seq_lens

    def _full(self, layer: int, x: Tensor, qkv: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """No speculation."""
        q, k, v = qkv
        with self._operation("attention", layer):
            self._append(layer, k, v)
            out = self._attention.full(q, *self._layer_cache(layer))
        return x, out

    def _predict(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with self._operation("predictor", layer):
            self._append(layer, k, v)
            return self._attention.predict(q, *self._layer_cache(layer))

    def _verify(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Full attention and each request's verdict [B], the same on every rank of the group."""
        with self._operation("full_attention", layer):
            full_out, sums = self._attention.verify(q, *self._layer_cache(layer))
        with self._operation("verdict", layer):
            sums = combine_sums(self._transport.all_gather_group(sums))
            return full_out, accepts(sums, self.threshold)

    def _simulated(self, layer: int, x: Tensor, qkv: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The reference semantics in one group: both outputs, one after the other; an accepted `A~` goes on."""
        spec_out = self._predict(layer, *qkv)
        full_out, hits = self._verify(layer, qkv[0])
        self._hits.append(hits)
        accepted = layer_verdict(hits, self._state.live.to(hits.device))
        return x, torch.where(accepted, spec_out, full_out)

    def _paired(self, layer: int, x: Tensor, qkv: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Two groups: the sender guesses, hands over and verifies; the receiver goes on with the guess.

        Source: Attention-Level SpecOutput, Algorithm 2 (priority gating).
        """
        self._read_verdict()
        if self._group == sender(self._priority):
            spec_out = self._predict(layer, *qkv)
            # Sent on its own stream (or by Gloo's thread): the full attention below does not wait for it.
            self._transport.send(_pack(x, *qkv[1:], spec_out))
            self._priority = after_handover(self._priority)
            full_out, hits = self._verify(layer, qkv[0])
            self._transport.send(hits.float())
            with self._operation("verdict", layer):
                self._decide(hits.cpu())
            return x, full_out
        with self._operation("handover", layer):
            x, k, v, spec_out = self._receive_handover(x)
            self._append(layer, k, v)
        self._verdict = self._transport.receive((self._cache.batch_size,))
        self._priority = after_handover(self._priority)
        return x, spec_out

    def _receive_handover(self, x: Tensor) -> tuple[Tensor, ...]:
        config, tp_size = self._model.config, self._transport.placement.tp_size
        batch = self._cache.batch_size
        kv_shape = (batch, config.num_kv_heads // tp_size, config.head_dim)
        shapes = [tuple(x.shape), kv_shape, kv_shape, (batch, config.num_qo_heads // tp_size, config.head_dim)]
        packed = self._transport.receive((sum(map(math.prod, shapes)),)).wait()
        parts = packed.split([math.prod(shape) for shape in shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))

    def _read_verdict(self) -> None:
        """As the receiver of the previous layer: learn whether what was computed since stands."""
        if self._verdict is not None:
            with self._operation("verdict", len(self._hits)):  # the layer: so far each has one verdict
                self._decide(self._verdict.wait().cpu() > 0)
            self._verdict = None

    def _decide(self, hits: Tensor) -> None:
        self._hits.append(hits)
        accepted = bool(layer_verdict(hits, self._state.live))
        self._priority = after_verdict(self._priority, accepted)

    def _agree(self, x: Tensor, partial: Tensor | None) -> Tensor:
        """Finish the last all-reduce and hand the right `x` to both groups."""
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
    """One flat fp32 message: bf16 and fp16 values pass through fp32 unchanged."""
    return torch.cat([tensor.float().flatten() for tensor in tensors])
