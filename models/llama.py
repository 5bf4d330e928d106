"""Llama on one tensor-parallel rank: its weights, and the operations before and after attention.

Shapes: n tokens (prefill) or requests (decode), Hq and Hkv this rank's query and KV heads, D head_dim, T group size.
The residual stream `x` is fp32 and replicated over the group. Every other activation has the dtype of the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from alspec.kernels.prompt.elementwise import add_parts, add_rms_norm, rms_norm, rope_cos_sin, rotate_heads, silu_mul
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.llama_config import LlamaConfig

__all__ = ["LayerWeights", "Llama", "LlamaWeights", "Shard", "load_weights", "random_weights", "rotate_values"]


@dataclass(frozen=True)
class Shard:
    """The part of the weights that one rank holds.

    The `tp_size` ranks of a group split QKV and gate/up by rows of the weight (columns of the product), and o and down
    by columns. All ranks of the job split the LM head by vocabulary.
    """

    tp_rank: int = 0
    tp_size: int = 1
    vocab_rank: int = 0
    vocab_shards: int = 1

    def vocab_range(self, vocab_size: int) -> tuple[int, int]:
        """`[start, stop)` of this rank's rows: `ceil(V / shards)` per shard, fewer or none in the last ones."""
        rows = -(-vocab_size // self.vocab_shards)
        return min(self.vocab_rank * rows, vocab_size), min((self.vocab_rank + 1) * rows, vocab_size)


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer's weights on one rank, in the execution dtype."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(Hq + 2 Hkv) D, hidden]
    o: Tensor  # [hidden, Hq D]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 I / T, hidden], gate first
    down: Tensor  # [hidden, I / T]


@dataclass(frozen=True)
class LlamaWeights:
    """All weights of one rank."""

    embedding: Tensor  # [V, hidden], replicated
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [rows of this vocabulary shard, hidden]


def load_weights(
    checkpoint: Checkpoint, config: LlamaConfig, shard: Shard, dtype: torch.dtype, device: torch.device
) -> LlamaWeights:
    """Read only this rank's slices from a checkpoint that `Checkpoint.open` has verified."""

    def read(name: str, dim: int | None = None) -> Tensor:
        if dim is None:
            return checkpoint.tensor_slice(name).to(device, dtype)
        size = checkpoint.entries[name].shape[dim] // shard.tp_size
        part = checkpoint.tensor_slice(name, dim, shard.tp_rank * size, (shard.tp_rank + 1) * size)
        return part.to(device, dtype).contiguous()

    def read_layer(layer: int) -> LayerWeights:
        prefix = f"model.layers.{layer}."
        rows = {part: read(f"{prefix}{part}_proj.weight", 0) for part in _COLUMN_PARALLEL}
        return LayerWeights(
            input_norm=read(prefix + "input_layernorm.weight"),
            qkv=torch.cat([rows["self_attn.q"], rows["self_attn.k"], rows["self_attn.v"]]),
            o=read(prefix + "self_attn.o_proj.weight", 1),
            post_norm=read(prefix + "post_attention_layernorm.weight"),
            gate_up=torch.cat([rows["mlp.gate"], rows["mlp.up"]]),
            down=read(prefix + "mlp.down_proj.weight", 1),
        )

    embedding = read("model.embed_tokens.weight")
    start, stop = shard.vocab_range(config.vocab_size)
    # The last shards of a small vocabulary can be empty; `tensor_slice` refuses an empty range.
    if config.tie_word_embeddings or start == stop:
        lm_head = embedding[start:stop]
    else:
        lm_head = checkpoint.tensor_slice("lm_head.weight", 0, start, stop).to(device, dtype)
    layers = tuple(read_layer(layer) for layer in range(config.num_layers))
    return LlamaWeights(embedding, layers, read("model.norm.weight"), lm_head)


_COLUMN_PARALLEL = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")


def random_weights(config: LlamaConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> LlamaWeights:
    """Draw random weights of `config`'s shape on the device, N(0, 1/fan_in), so that activations stay near unit size.

    Ranks with the same `tp_rank` draw the same numbers (paired ranks hold replicas). Embedding and LM head do not
    depend on the number of ranks; each rank keeps its own rows of the LM head. Layers depend on `tp_size`, because each
    `tp_rank` draws its own part.
    """
    generator = torch.Generator(device)
    heads = (config.num_qo_heads + 2 * config.num_kv_heads) // shard.tp_size
    intermediate = config.intermediate_size // shard.tp_size
    attn_width = config.num_qo_heads // shard.tp_size * config.head_dim

    def draw(rows: int, columns: int, fan_in: int, seed: int) -> Tensor:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return weight.normal_(0.0, 1 / math.sqrt(fan_in), generator=generator.manual_seed(seed))

    def draw_layer(layer: int) -> LayerWeights:
        seed = 4 * (layer * shard.tp_size + shard.tp_rank) + 2
        ones = torch.ones(config.hidden_size, dtype=dtype, device=device)
        return LayerWeights(
            input_norm=ones,
            qkv=draw(heads * config.head_dim, config.hidden_size, config.hidden_size, seed),
            o=draw(config.hidden_size, attn_width, attn_width * shard.tp_size, seed + 1),
            post_norm=ones,
            gate_up=draw(2 * intermediate, config.hidden_size, config.hidden_size, seed + 2),
            down=draw(config.hidden_size, intermediate, config.intermediate_size, seed + 3),
        )

    embedding = draw(config.vocab_size, config.hidden_size, 1, 0)
    start, stop = shard.vocab_range(config.vocab_size)
    # Draw the whole LM head, then slice it, so that it does not depend on the number of ranks.
    head = (
        embedding if config.tie_word_embeddings else draw(config.vocab_size, config.hidden_size, config.hidden_size, 1)
    )
    lm_head = head[start:stop] if config.tie_word_embeddings else head[start:stop].clone()
    del head
    layers = tuple(draw_layer(layer) for layer in range(config.num_layers))
    return LlamaWeights(embedding, layers, torch.ones_like(layers[0].input_norm), lm_head)


def rotate_values(weights: LlamaWeights, config: LlamaConfig, rotation: Tensor) -> None:
    """Rotate the values of every KV head, in place: `v' = R v` by the rows of W_v, and back by W_o, `W_o' = W_o R^T`.

    Attention outputs are then rotated too, and everything after W_o stays as it was. Products are computed in fp32.

    Args:
        rotation: R, [D, D] fp32, orthonormal.
    """
    for layer in weights.layers:
        values = layer.qkv.unflatten(0, (-1, config.head_dim))
        heads_per_kv = config.num_qo_heads // config.num_kv_heads
        values = values[values.shape[0] * (heads_per_kv + 1) // (heads_per_kv + 2) :]  # [Hkv, D, hidden]
        values.copy_(rotation @ values.float())
        out = layer.o.unflatten(1, (-1, config.head_dim))  # [hidden, Hq, D]
        out.copy_(out.float() @ rotation.T)


class Group(Protocol):
    """Collectives of one tensor-parallel group."""

    def gather_partials(self, partial: Tensor) -> Tensor:
        """[n, hidden] on each rank -> [P, n, hidden], P = 1 or T; the sum over P is the sum over the ranks."""

    def scatter_partials(self, partial: Tensor) -> Tensor:
        """[n, hidden] on each rank -> [T, m, hidden]: the partials of all T ranks for the m tokens of this rank."""

    def gather_tokens(self, own: Tensor, num_tokens: int) -> Tensor:
        """[m, hidden] on each rank, for that rank's tokens -> [n, hidden], all tokens on every rank."""


class Llama:
    """The operations before and after attention on one rank, for prompts and for eager steps.

    `Decoder` (runtime/decode/decoder.py) has the operations of captured steps.

    In a long prompt each rank keeps the residual stream of only m of the n tokens; otherwise m = n.
    """

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, group: Group) -> None:
        self.config = config
        self.weights = weights
        self._group = group
        self.inv_freq = config.inv_freq().to(weights.embedding.device)
        self.sm_scale = config.head_dim**-0.5

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.config.num_layers

    def first_layers(self, num_layers: int) -> Llama:
        """Return a model of the first `num_layers` layers (or all, if there are fewer) that shares these weights."""
        layers = self.weights.layers[:num_layers]
        config = self.config.model_copy(update={"num_layers": len(layers)})
        return Llama(config, replace(self.weights, layers=layers), self._group)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n] integers -> x [n, hidden] fp32."""
        return F.embedding(token_ids, self.weights.embedding).float()

    def reduce_residual(self, x: Tensor, partial: Tensor | None) -> Tensor:
        """Finish an all-reduce: `x + sum over ranks of partial`, [n, hidden] fp32. None adds nothing."""
        return x if partial is None else add_parts(x, self._group.gather_partials(partial))

    def _add_norm(self, x: Tensor, partial: Tensor | None, weight: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Finish an all-reduce as `reduce_residual` does, then RMSNorm: x [m, hidden] and its norm [n, hidden]."""
        if len(x) == num_tokens:
            parts = None if partial is None else self._group.gather_partials(partial)
            return add_rms_norm(x, parts, weight, self.config.rms_norm_eps)
        parts = None if partial is None else self._group.scatter_partials(partial)
        x, y = add_rms_norm(x, parts, weight, self.config.rms_norm_eps)
        return x, self._group.gather_tokens(y, num_tokens)

    def pre_attention(
        self, layer: int, x: Tensor, partial: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Finish the previous all-reduce, then RMSNorm, QKV projection and RoPE.

        Args:
            x: [m, hidden] fp32.  partial: of the previous layer's `post_attention`, or None.  positions: [n] integers.
        Returns:
            x [m, hidden] fp32, q [n, Hq, D], k [n, Hkv, D], v [n, Hkv, D].
        """
        weights, head_dim = self.weights.layers[layer], self.config.head_dim
        x, y = self._add_norm(x, partial, weights.input_norm, len(positions))
        qkv = F.linear(y, weights.qkv).view(len(y), -1, head_dim)
        heads_per_kv = self.config.num_qo_heads // self.config.num_kv_heads
        return x, *rotate_heads(qkv, qkv.shape[1] // (heads_per_kv + 2), *rope_cos_sin(positions, self.inv_freq))

    def post_attention(self, layer: int, x: Tensor, attn_out: Tensor) -> tuple[Tensor, Tensor]:
        """o_proj, all-reduce and residual, RMSNorm, gate/up with SiLU, down.

        The next `pre_attention` or `reduce_residual` finishes the all-reduce of the MLP output.

        Args:
            x: [m, hidden] fp32.  attn_out: [n, Hq, D].
        Returns:
            x [m, hidden] fp32 after attention, and this rank's partial of the MLP output [n, hidden].
        """
        weights = self.weights.layers[layer]
        attn = attn_out.to(weights.o.dtype).flatten(1)
        x, y = self._add_norm(x, F.linear(attn, weights.o), weights.post_norm, len(attn))
        return x, F.linear(silu_mul(F.linear(y, weights.gate_up)), weights.down)

    def lm_head(self, x: Tensor) -> Tensor:
        """Final norm and this rank's vocabulary shard: x [n, hidden] fp32 -> [n, rows of the shard] fp32."""
        return F.linear(rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps), self.weights.lm_head).float()
