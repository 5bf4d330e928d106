"""One decode step over the fused kernels: the launches that a captured graph consists of.

The weights are those of `Llama`, which processes prompts. Here every operation is one launch that works in place on
buffers which never move. Eight launches make a layer: QKV with RoPE and append, attention and its combine, o,
all-reduce with residual and norm, gate/up with SiLU, down, all-reduce with residual and norm.

Two paired groups extend this step: paired_decoder.py over LL packets, linked_decoders.py over a link.

Shapes: B requests, Hq and Hkv query and KV heads of this rank, D head_dim, L layers, V vocabulary, I MLP width, T ranks
of a group, S sums of squares and C candidate blocks of logits of each request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from alspec.kernels.attention.decode.lean_decode import RecallBuffers
from alspec.kernels.attention.dispatch import attend
from alspec.kernels.attention.recall import RecallState
from alspec.kernels.comm.exchange import Exchange, LogitExchange
from alspec.kernels.common.rotary import RotaryFrequencies
from alspec.kernels.linear.decode_weight import DecodeWeight
from alspec.kernels.linear.head_norm import norm_rope_append
from alspec.kernels.linear.products import FusedProducts, Products
from alspec.kernels.norm.residual import embed_norm, num_square_sums, reduce_norm
from alspec.kernels.sampling.next_token import collect_logits, num_candidates
from alspec.models.llama import LlamaWeights
from alspec.models.llama_config import LlamaConfig
from alspec.runtime.cache.codecs import Cache
from alspec.runtime.cache.decode_cache import DecodeCache
from alspec.runtime.decode.hooks import OperationHook

__all__ = ["TIMEOUT_NS", "STEP_TIMEOUT_NS", "DecodeBuffers", "Decoder", "LaunchContext", "SpeculationState"]

# Longest waits of a kernel for its peers. The first wait of a step is longer, because the host of a peer may be late
# (a full pipe, a debugger). The heartbeat detects hosts that never come.
STEP_TIMEOUT_NS = 600 * 10**9
TIMEOUT_NS = 5 * 10**9


@dataclass(frozen=True)
class DecodeBuffers:
    """Activations of a step on one rank."""

    token_ids: Tensor  # [B] int64: newest token of each request
    seq_lens: Tensor  # [B] int32, that token included
    rope: Tensor  # [B, 2, D / 2] fp32
    x: Tensor  # [B, hidden] fp32
    x_norm: Tensor  # [B, hidden]: x * gamma of the next RMSNorm
    square_sums: Tensor  # [B, S] fp32
    raw: Tensor | None  # [B, (Hq + 2 Hkv) D] fp32: q, k and v before the norms of heads, if there are any
    q: Tensor  # [B, Hq, D]
    attn_out: Tensor  # [B, Hq, D]
    lse: Tensor  # [B, Hq] fp32
    mlp: Tensor  # [B, I / T]
    logits: Tensor  # [B, V] fp32
    best: Tensor  # [B, C] fp32
    best_token: Tensor  # [B, C] int32

    @classmethod
    def allocate(
        cls,
        config: LlamaConfig,
        tp_size: int,
        batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
        vocab_size: int | None = None,
    ) -> DecodeBuffers:
        """Buffers of one rank of `tp_size`. vocab_size: V, if logits are fitted to that of another model."""

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(batch_size, *shape, dtype=dtype, device=device)

        vocab_size = vocab_size or config.vocab_size
        (heads, kv_heads), candidates = config.local_heads(tp_size), num_candidates(vocab_size)
        return cls(
            token_ids=new(dtype=torch.int64),
            seq_lens=new(dtype=torch.int32) + 1,
            rope=new(2, config.head_dim // 2),
            x=new(config.hidden_size),
            x_norm=new(config.hidden_size, dtype=dtype),
            square_sums=new(num_square_sums(config.hidden_size)),
            raw=new((heads + 2 * kv_heads) * config.head_dim) if config.qk_norm else None,
            q=new(heads, config.head_dim, dtype=dtype),
            attn_out=new(heads, config.head_dim, dtype=dtype),
            lse=new(heads),
            mlp=new(config.intermediate_size // tp_size, dtype=dtype),
            logits=new(vocab_size),
            best=new(candidates),
            best_token=new(candidates, dtype=torch.int32),
        )


@dataclass
class SpeculationState:
    """How a pair speculates and judges `A~`. A step is captured again when `threshold` or `forced` change."""

    threshold: float
    chunk_size: int
    hits: Tensor  # [L, B] int32: this step's verdicts, on every rank
    live: Tensor  # [B] int32: 1 while a request is generating
    forced: Tensor | None = None  # [L] int32: verdicts that ignore the sums, for profiling; see `decide`
    recall: RecallState | None = None  # blocks that `A~` recalls

    def recall_buffers(self, layer: int) -> RecallBuffers | None:
        """What attention over a layer reads and writes of recalled blocks."""
        return None if self.recall is None else self.recall.buffers(layer)

    def lse_out(self, layer: int, default: Tensor) -> Tensor:
        """The buffer [B, Hq] for a layer's lse: each layer has its own, because the lists are chosen at the end."""
        return default if self.recall is None else self.recall.lse[layer]


@dataclass(frozen=True)
class LaunchContext:
    """Settings of one layer's launches: its all-reduces, its gates, and where x, k and v for the paired rank go.

    A gate is [1] int32. At gate 0 a kernel returns at once; None is always open. With `verdict` a receiver stops early:
    each `reduce_norm` reads that packet, and after a reject it closes the gate of the kernels behind it.
    """

    exchange: Exchange
    all_reduce: Callable[[Tensor], Tensor]  # sums `exchange.partial` over the group if there are no packets
    o_gate: Tensor | None = None
    mlp_gate: Tensor | None = None
    pre_attention_gate: Tensor | None = None
    verdict: Tensor | None = None  # [1] int64: packet with the verdict on the A~ that this rank computes on
    # [B, M] int64: where the paired rank reads this layer's k and v, and the next layer's x; over a link, what is sent.
    inbox: Tensor | None = None
    next_inbox: Tensor | None = None
    like_gated: bool = False  # take the kernel variant of launches with gates, for the bits that the other group has


@dataclass
class Decoder:
    """Launches the operations of a step, in order, on the current stream."""

    config: LlamaConfig
    weights: LlamaWeights
    rotary: RotaryFrequencies
    kv_cache: Cache  # the rank's cache; `self.cache` is how decode steps see it
    buffers: DecodeBuffers
    exchange: Exchange
    logit_exchange: LogitExchange
    all_reduce: Callable[[Tensor], Tensor]  # sums `exchange.partial` over the group if there are no packets
    all_gather: Callable[[Tensor], Tensor]  # [B, rows] of each rank -> [world, B, rows], if there are no packets
    products: Products = field(default_factory=FusedProducts, kw_only=True)

    first_timeout_ns: ClassVar[int] = STEP_TIMEOUT_NS  # of the first all-reduce
    timeout_ns: ClassVar[int] = TIMEOUT_NS  # of the others, and of the logits
    spare_sms: ClassVar[int] = 0  # SMs that attention leaves free
    completes_blocks: ClassVar[bool] = True  # full tails of a quantised cache become records behind the layers

    @property
    def rows(self) -> int:
        """Rows of each request that a step computes: 1, or those of a round."""
        return 1

    def __post_init__(self) -> None:
        buffers, layers = self.buffers, self.weights.layers
        self.cache = DecodeCache(
            self.kv_cache, buffers.seq_lens, buffers.q.shape[1], self.config.sm_scale, buffers.q.dtype, self.spare_sms,
            self.rows,
        )  # fmt: skip
        # The norm after each all-reduce: after attention this layer's second, after the MLP the next layer's first.
        self._gammas = [(layer.post_norm, following.input_norm) for layer, following in pairwise(layers)]
        self._gammas.append((layers[-1].post_norm, self.weights.final_norm))

    @contextmanager
    def launching(self, epoch: int) -> Iterator[None]:
        """Around each launch of a step, or of its graph: launches what runs beside it. epoch: of the step."""
        yield

    def set_lead(self, lead: int) -> None:
        """By how many layers the speculator of a pair over a link is ahead, at most, from the next step on."""

    def release(self) -> None:
        """Wait for what was launched beside steps."""

    def next_lists(self) -> Tensor | None:
        """A copy of the recall lists of the next step, [L, B, Hkv, M] int32; None if blocks are not recalled."""
        return None

    def publish_lists(self) -> None:
        """Use the lists in `SpeculationState.recall`, which were written since `begin`, in the next step."""

    def begin(self, token_ids: list[int], seq_lens: list[int]) -> None:
        """Set the state: the newest token of each request, lengths that count it, and no fault."""
        buffers = self.buffers
        assert buffers.token_ids.shape == (len(token_ids),), "a batch of another size"
        buffers.token_ids.copy_(torch.tensor(token_ids))
        buffers.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        self.exchange.fault.zero_()

    def embed(self) -> None:
        """Token embeddings into the residual stream."""
        buffers = self.buffers
        embed_norm(
            buffers.token_ids, buffers.seq_lens, self.weights.embedding, self.weights.layers[0].input_norm,
            self.rotary, buffers.x, buffers.x_norm, buffers.square_sums, buffers.rope, self.config.rope_factor,
        )  # fmt: skip
        self.cache.begin_step()

    def run_layers(self, operation: OperationHook) -> None:
        """Launch all layers, each operation inside the hook. Call it between `embed` and `logits`."""
        for layer in range(self.config.num_layers):
            with operation("pre_attention", layer):
                self.pre_attention(layer)
            with operation("attention", layer):
                self.attention(layer)
            with operation("post_attention", layer):
                self.post_attention(layer)

    def _launch_context(self, layer: int) -> LaunchContext:
        """Gates, all-reduce and inboxes of a layer's launches, for subclasses to override."""
        return LaunchContext(self.exchange, self.all_reduce)

    def pre_attention(self, layer: int) -> None:
        """Launch QKV, RoPE and append; with norms of heads, these are a second launch.

        The all-reduce before them is part of `post_attention` here.
        """
        buffers, weights, context = self.buffers, self.weights.layers[layer], self._launch_context(layer)
        k, v, _ = self.cache.newest(layer)
        eps, gate, quantised = self.config.rms_norm_eps, context.pre_attention_gate, self.cache.quantised(layer)
        is_ring, epoch = self.cache.is_ring(layer), context.exchange.epoch
        self.products.qkv_rope_append(
            buffers.x_norm, buffers.square_sums, weights.qkv, buffers.rope, buffers.seq_lens, buffers.q, k, v, eps,
            gate, quantised, context.inbox, epoch, is_ring, weights.qkv_bias, buffers.raw,
        )  # fmt: skip
        if weights.q_norm is not None and weights.k_norm is not None:
            assert buffers.raw is not None
            norm_rope_append(
                buffers.raw, weights.q_norm, weights.k_norm, buffers.rope, buffers.seq_lens, buffers.q, k, v,
                self.config.hidden_size, eps, gate, quantised, context.inbox, epoch, is_ring,
            )  # fmt: skip

    def attention(self, layer: int) -> None:
        """Attention over the cache."""
        buffers, cache = self.buffers, self.cache
        # The projection before it writes only q and the newest token, so the kernel may prefetch the rest. It knows
        # where the newest token is, except in a ring.
        attend(
            buffers.q, cache.layers[layer], cache.lengths(layer), cache.sm_scale, cache.workspace(layer),
            buffers.attn_out, buffers.lse, prefetch_before_wait=not cache.is_ring(layer),
        )  # fmt: skip

    def post_attention(self, layer: int) -> None:
        """o, all-reduce, MLP, all-reduce."""
        buffers, weights, context = self.buffers, self.weights.layers[layer], self._launch_context(layer)
        o_gate, mlp_gate, next_gate = context.o_gate, context.mlp_gate, context.pre_attention_gate
        post_norm, next_norm = self._gammas[layer]
        self._row_parallel(
            2 * layer,
            buffers.attn_out.flatten(1),
            weights.o,
            weights.o_bias,
            post_norm,
            context,
            o_gate,
            mlp_gate,
            None,
        )
        self.products.gate_up_silu(
            buffers.x_norm, buffers.square_sums, weights.gate_up, buffers.mlp, self.config.rms_norm_eps, mlp_gate,
            weights.gate_up_bias, context.like_gated,
        )  # fmt: skip
        self._row_parallel(
            2 * layer + 1, buffers.mlp, weights.down, weights.down_bias, next_norm, context, mlp_gate, next_gate,
            context.next_inbox,
        )  # fmt: skip

    def _row_parallel(
        self,
        reduce_index: int,
        act: Tensor,
        weight: Tensor | DecodeWeight,
        bias: Tensor | None,
        gamma: Tensor,
        context: LaunchContext,
        gate: Tensor | None,
        next_gate: Tensor | None,
        inbox: Tensor | None,
    ) -> None:
        """Launch a row-parallel product (o or down), its all-reduce, then residual and norm."""
        buffers, exchange, verdict = self.buffers, context.exchange, context.verdict
        self.products.push_partial(act, weight, exchange, reduce_index, gate, bias)
        if exchange.packets is None:
            context.all_reduce(exchange.partial)
        timeout_ns = self.first_timeout_ns if reduce_index == 0 else self.timeout_ns
        next_gate = None if verdict is None else next_gate
        reduce_norm(
            exchange, reduce_index, timeout_ns, buffers.x, gamma, buffers.x_norm, buffers.square_sums, gate, next_gate,
            verdict, inbox,
        )  # fmt: skip

    def logits(self) -> None:
        """Complete blocks. Then compute the logits of all vocabulary shards, and the most likely tokens."""
        if self.completes_blocks:
            self.cache.compact()
        self._project_logits()

    def end_step(self) -> None:
        """Let the next step follow what runs beside this one. Call it behind the step's last launch."""

    def _project_logits(self) -> None:
        buffers, exchange, reduce_index = self.buffers, self.logit_exchange, 2 * self.config.num_layers
        self.products.lm_head(
            buffers.x_norm, buffers.square_sums, self.weights.lm_head, exchange, self.config.rms_norm_eps, reduce_index
        )
        gathered = exchange.shard if exchange.packets is not None else self.all_gather(exchange.shard)
        collect_logits(
            exchange, gathered, self.timeout_ns, reduce_index, buffers.logits, buffers.best, buffers.best_token,
            min(self.config.vocab_size, buffers.logits.shape[1]),
        )  # fmt: skip
