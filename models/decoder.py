"""One decode step of Llama as data flow over the fused decode kernels: what a captured graph consists of.

The same weights as `Llama`, which does prefill; here every operation is one launch, in place on buffers that stay
where they are. Eight launches make a layer: QKV with RoPE and append, attention and its merge, o, all-reduce with
residual and norm, gate and up with SiLU, down, all-reduce with residual and norm.

Shapes: B requests, Hq and Hkv this rank's query and KV heads, D head_dim, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..kernels.decode_attention import CacheLayer
from ..kernels.exchange import Exchange, LogitExchange
from ..kernels.handover import receive_handover, receive_residual, send_handover, send_residual
from ..kernels.lean_attention import Phase
from ..kernels.mailbox import GATE_MLP, GATE_O, GATE_PRE_ATTENTION, Handover
from ..kernels.next_token import collect_logits, num_candidates
from ..kernels.projections import gate_up_silu, qkv_rope_append
from ..kernels.push import lm_head, push_partial
from ..kernels.residual import embed_norm, num_square_sums, reduce_norm
from ..kernels.roles import decide, meet, take_turn
from ..kernels.swap import Swap, pack_handover, pack_residual, settle, unpack_handover, unpack_residual
from ..operation import OperationHook
from .config import LlamaConfig
from .decode_cache import DecodeCache
from .llama import LlamaWeights

__all__ = ["SPARE_SMS", "DecodeBuffers", "Decoder", "Pairing"]

# Left free by the attention of a pair that talks by collectives, for the kernels of those beside it: attention takes
# nearly all shared memory of each SM that it runs on. Over a quantised cache it takes nearly all registers instead, and
# its small programs spread over all SMs: there a collective waits for some of them to end.
SPARE_SMS = 4

# Longest waits of a kernel for its peers. The first one of a step, a pair's meeting or the first all-reduce, also
# covers a peer whose host is late (a full pipe, a debugger, ...), which the heartbeat judges.
STEP_PATIENCE_NS = 600 * 10**9
PATIENCE_NS = 5 * 10**9


@dataclass(frozen=True)
class DecodeBuffers:
    """Activations of a step on one rank."""

    token_ids: Tensor  # [B] int64: newest token of each request
    seq_lens: Tensor  # [B] int32, with that token
    rope: Tensor  # [B, 2, D / 2] fp32
    x: Tensor  # [B, hidden] fp32
    x_norm: Tensor  # [B, hidden]: x * gamma of the next RMSNorm
    square_sums: Tensor  # [B, S] fp32
    q: Tensor  # [B, Hq, D]
    attn_out: Tensor  # [B, Hq, D]
    lse: Tensor  # [B, Hq] fp32
    mlp: Tensor  # [B, I / T]
    logits: Tensor  # [B, V] fp32
    best: Tensor  # [B, C] fp32
    best_token: Tensor  # [B, C] int32

    @classmethod
    def allocate(
        cls, config: LlamaConfig, tp_size: int, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> DecodeBuffers:
        """Buffers of one rank of `tp_size`."""

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(batch_size, *shape, dtype=dtype, device=device)

        heads, candidates = config.num_qo_heads // tp_size, num_candidates(config.vocab_size)
        return cls(
            token_ids=new(dtype=torch.int64),
            seq_lens=new(dtype=torch.int32) + 1,
            rope=new(2, config.head_dim // 2),
            x=new(config.hidden_size),
            x_norm=new(config.hidden_size, dtype=dtype),
            square_sums=new(num_square_sums(config.hidden_size)),
            q=new(heads, config.head_dim, dtype=dtype),
            attn_out=new(heads, config.head_dim, dtype=dtype),
            lse=new(heads),
            mlp=new(config.intermediate_size // tp_size, dtype=dtype),
            logits=new(config.vocab_size),
            best=new(candidates),
            best_token=new(candidates, dtype=torch.int32),
        )


@dataclass(frozen=True)
class Pairing:
    """What a rank of two paired groups needs beside the rest."""

    handover: Handover | Swap  # how it reaches the other group: words in its memory, or collectives
    threshold: float
    chunk_size: int
    sums: Tensor  # [B, S, 2] fp32; of a `Swap`, its own
    hits: Tensor  # [L, B] int32: this step's verdicts, on every rank
    live: Tensor  # [B] int32: 1 while a request is generating
    forced: Tensor | None = None  # [L] int32: verdicts that do not look at the sums, for profiling


@dataclass(frozen=True)
class Branch:
    """Where a layer's post-attention, and the pre-attention after it, sum up over the group; and what opens them."""

    exchange: Exchange
    all_reduce: Callable[[Tensor], Tensor]  # of `exchange.partial`, where no words travel
    gates: tuple[Tensor | None, ...] = (None, None, None)  # by GATE_O, GATE_MLP, GATE_PRE_ATTENTION
    verdict: Tensor | None = None  # [1] int64: the word whose rejection closes each gate for the next, or None


class Decoder:
    """Launches the operations of a step, in order, on the current stream and what forks off it.

    With `pairing`, the ranks of two groups launch the same list; words on the devices decide what each skips.

    Args:
        cache_layers: the cache of all layers, stacked, of any codec.
        all_reduce: sums `exchange.partial` over the group where no words travel.
        all_gather: [B, rows] of each rank -> [world, B, rows], likewise.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        inv_freq: Tensor,
        cache_layers: CacheLayer,
        buffers: DecodeBuffers,
        exchange: Exchange,
        logit_exchange: LogitExchange,
        all_reduce: Callable[[Tensor], Tensor],
        all_gather: Callable[[Tensor], Tensor],
        pairing: Pairing | None = None,
    ) -> None:
        self.config = config
        self.pairing = pairing
        self.buffers = buffers
        self._weights = weights
        self._inv_freq = inv_freq
        self._exchange, self._logit_exchange = exchange, logit_exchange
        self._all_reduce, self._all_gather = all_reduce, all_gather
        swaps = pairing is not None and isinstance(pairing.handover, Swap)
        self._cache = DecodeCache(
            cache_layers, buffers.seq_lens, buffers.q.shape[1], buffers.q.dtype, SPARE_SMS if swaps else 0
        )
        layers = weights.layers
        # The norm that follows each all-reduce: after attention this layer's second, after the MLP the next layer's.
        self._gammas = [(layer.post_norm, following.input_norm) for layer, following in pairwise(layers)]
        self._gammas.append((layers[-1].post_norm, weights.final_norm))

    def layers(self, operation: OperationHook) -> None:
        """Between `embed` and `logits`, each operation launched within the hook."""
        num_layers, pairing = self.config.num_layers, self.pairing
        if pairing is not None and isinstance(pairing.handover, Swap):
            with operation("pre_attention", 0):
                self.pre_attention(0)
            for layer in range(num_layers):
                self._swapped_layer(layer, operation)
        else:
            for layer in range(num_layers):
                with operation("pre_attention", layer):
                    self.pre_attention(layer)
                with operation("attention", layer):
                    self.attention(layer)
                with operation("post_attention", layer):
                    self.post_attention(layer)
        if pairing is not None:
            with operation("agree", num_layers):
                self.finish_layers()

    def embed(self) -> None:
        """Token embeddings into the residual stream; groups paired by words meet first."""
        at = self.buffers
        embed_norm(
            at.token_ids, at.seq_lens, self._weights.embedding, self._weights.layers[0].input_norm, self._inv_freq,
            at.x, at.x_norm, at.square_sums, at.rope,
        )  # fmt: skip
        if self.pairing is not None and isinstance(self.pairing.handover, Handover):
            meet(self.pairing.handover, STEP_PATIENCE_NS)

    def _branch(self, layer: int) -> Branch:
        """The only one, except between the fork and the join of a `Swap`."""
        main = Branch(self._exchange, self._all_reduce)
        if self.pairing is None:
            return main
        handover = self.pairing.handover
        if isinstance(handover, Swap):
            # Both groups begin a step with the right x, and the one that sends first goes on with it.
            return replace(main, gates=(handover.gates(layer).sends,) * 3)
        gates = tuple(handover.gate(which) for which in (GATE_O, GATE_MLP, GATE_PRE_ATTENTION))
        return replace(main, gates=gates, verdict=handover.verdict(layer))

    def pre_attention(self, layer: int, branch: Branch | None = None) -> None:
        """QKV, RoPE, append. The all-reduce before it belongs to `post_attention` here."""
        at, branch = self.buffers, branch or self._branch(layer)
        k, v, _ = self._cache.newest(layer)
        qkv_rope_append(
            at.x_norm, at.square_sums, self._weights.layers[layer].qkv, at.rope, at.seq_lens, at.q, k, v,
            self.config.rms_norm_eps, branch.gates[GATE_PRE_ATTENTION], self._cache.quantised(layer),
        )  # fmt: skip

    def attention(self, layer: int) -> None:
        """Attention over the cache."""
        if self.pairing is not None:
            assert isinstance(self.pairing.handover, Handover)
            self._paired_attention(layer, self.pairing, self.pairing.handover)
            return
        # The projection ahead has written q and the newest token, and nothing else that attention reads.
        self._cache.attend(layer, self.buffers.q, self.buffers.attn_out, self.buffers.lse, newest_only=True)

    def _paired_attention(self, layer: int, pairing: Pairing, handover: Handover) -> None:
        """The sender hands over, attends and decides; the receiver takes the guess. Neither waits for the other's end.

        Source: Attention-Level Speculation, Algorithm 2.
        """
        at, cache = self.buffers, self._cache
        take_turn(handover, layer, pairing.hits, PATIENCE_NS)
        send_handover(handover, layer, at.x, *cache.newest(layer))
        speculation = handover.speculation(layer, pairing.chunk_size, pairing.sums)
        cache.attend(layer, at.q, at.attn_out, at.lse, speculation, gate=handover.sends)
        decide(
            handover, layer, pairing.sums, pairing.live, pairing.threshold, pairing.hits, PATIENCE_NS,
            pairing.forced,
        )  # fmt: skip
        receive_handover(handover, layer, at.x, *cache.newest(layer), at.attn_out, PATIENCE_NS)
        cache.append(layer, handover.receives)

    def _swapped_layer(self, layer: int, operation: OperationHook) -> None:
        """The same by collectives, from attention to the next pre-attention: what a receiver does on one stream, beside
        what a sender does on the other. Every rank launches both, and skips what is not its own.

        Source: Attention-Level Speculation, Algorithm 2.
        """
        swap = self._swap
        gates = swap.gates(layer)
        with operation("predictor", layer):
            self._guess(layer)
        with swap.beside():
            with operation("handover", layer):
                self._receive(layer)
            branch = Branch(swap.aside, swap.calls.all_reduce_aside, (gates.receives,) * 3)
            self._go_on(layer, branch, operation)
        with operation("full_attention", layer):
            self._swapped_attention(layer, "rest")
        with operation("verdict", layer):
            self._settle(layer)
        self._go_on(layer, Branch(self._exchange, self._all_reduce, (gates.redoes,) * 3), operation)
        swap.join()

    def _go_on(self, layer: int, branch: Branch, operation: OperationHook) -> None:
        with operation("post_attention", layer):
            self.post_attention(layer, branch)
        if layer + 1 < self.config.num_layers:
            with operation("pre_attention", layer + 1):
                self.pre_attention(layer + 1, branch)

    @property
    def _swap(self) -> Swap:
        assert self.pairing is not None
        assert isinstance(self.pairing.handover, Swap)
        return self.pairing.handover

    def _guess(self, layer: int) -> None:
        """The sender's `A~`, with all that its receiver needs."""
        self._swapped_attention(layer, "predictor")
        pack_handover(self._swap, layer, self.buffers.x, *self._cache.newest(layer))

    def _swapped_attention(self, layer: int, phase: Phase) -> None:
        assert self.pairing is not None
        at, swap = self.buffers, self._swap
        speculation = swap.speculation(self.pairing.chunk_size)
        self._cache.attend(layer, at.q, at.attn_out, at.lse, speculation, phase, swap.gates(layer).sends)

    def _receive(self, layer: int) -> None:
        at, swap = self.buffers, self._swap
        swap.calls.swap_aside(swap.boxes)
        unpack_handover(swap, layer, at.x, *self._cache.newest(layer), at.attn_out)
        self._cache.append(layer, swap.gates(layer).receives)

    def _settle(self, layer: int) -> None:
        assert self.pairing is not None
        swap, pairing = self._swap, self.pairing
        swap.calls.swap_sums(swap.sums)
        settle(swap, layer, pairing.live, pairing.threshold, pairing.hits, pairing.forced)

    def finish_layers(self) -> None:
        """After the last layer: the right x in both groups."""
        assert self.pairing is not None
        at, handover, gamma = self.buffers, self.pairing.handover, self._weights.final_norm
        if isinstance(handover, Swap):
            pack_residual(handover, at.x)
            handover.calls.swap_aside(handover.residuals)
            unpack_residual(handover, at.x, gamma, at.x_norm, at.square_sums)
            handover.next_step()
            return
        take_turn(handover, self.config.num_layers, self.pairing.hits, PATIENCE_NS)
        send_residual(handover, at.x)
        receive_residual(handover, at.x, gamma, at.x_norm, at.square_sums, PATIENCE_NS)

    def post_attention(self, layer: int, branch: Branch | None = None) -> None:
        """o, all-reduce, MLP, all-reduce."""
        at, weights, branch = self.buffers, self._weights.layers[layer], branch or self._branch(layer)
        mlp_gate = branch.gates[GATE_MLP]
        self._row_parallel(2 * layer, at.attn_out.flatten(1), weights.o, self._gammas[layer][0], branch, GATE_O)
        gate_up_silu(at.x_norm, at.square_sums, weights.gate_up, at.mlp, self.config.rms_norm_eps, mlp_gate)
        self._row_parallel(2 * layer + 1, at.mlp, weights.down, self._gammas[layer][1], branch, GATE_MLP)

    def _row_parallel(
        self, slot: int, act: Tensor, weight: Tensor, gamma: Tensor, branch: Branch, which_gate: int
    ) -> None:
        """Product of a layer's first (o) or second (down) row-parallel weight, summed over the group."""
        at, exchange, gate = self.buffers, branch.exchange, branch.gates[which_gate]
        following = {GATE_O: GATE_MLP, GATE_MLP: GATE_PRE_ATTENTION}[which_gate]
        push_partial(act, weight, exchange, slot, gate)
        if exchange.words is None:
            branch.all_reduce(exchange.partial)
        patience = STEP_PATIENCE_NS if slot == 0 and self.pairing is None else PATIENCE_NS
        next_gate = None if branch.verdict is None else branch.gates[following]
        reduce_norm(
            exchange, slot, patience, at.x, gamma, at.x_norm, at.square_sums, gate, next_gate, branch.verdict,
        )  # fmt: skip

    def logits(self) -> None:
        """Records of full tails, LM head over the vocabulary shards of all ranks, and the most likely tokens."""
        self._cache.compact()
        at, exchange, slot = self.buffers, self._logit_exchange, 2 * self.config.num_layers
        lm_head(at.x_norm, at.square_sums, self._weights.lm_head, exchange, self.config.rms_norm_eps, slot)
        gathered = exchange.shard if exchange.words is not None else self._all_gather(exchange.shard)
        collect_logits(exchange, gathered, PATIENCE_NS, slot, at.logits, at.best, at.best_token)
