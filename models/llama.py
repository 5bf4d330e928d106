"""Llama and its relatives on one tensor-parallel rank: weights, and the operations before and after attention.

What other families have beside Llama are options of `LlamaConfig`: biases, norms of heads, partly rotated heads.

Shapes: n tokens (prefill) or requests (decode), Hq and Hkv this rank's query and KV heads, D head_dim, T group size.
The residual stream `x` is fp32 and replicated over the group. Every other activation has the dtype of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from alspec.kernels.linear.decode_weight import TILE_ROWS, DecodeWeight
from alspec.kernels.linear.unpack_weight import unpack_weight
from alspec.kernels.prompt.elementwise import (
    HeadNorms,
    add_parts,
    add_rms_norm,
    rms_norm,
    rope_cos_sin,
    rotate_heads,
    silu_mul,
)
from alspec.models.checkpoint.checkpoint import Checkpoint
from alspec.models.checkpoint.quantised.packed_weight import PackedWeight, join_rows
from alspec.models.checkpoint.quantised.quantised_checkpoint import QuantisedCheckpoint
from alspec.models.llama_config import LlamaConfig
from alspec.models.matrix_formats import (
    MATRICES,
    PIECE_NUMBERS,
    kept_format,
    matrices_of,
    packed,
    quantised,
    quantised_head,
)

BIAS_SEEDS = 2**40  # added to the seeds of random biases, so that matrices do not depend on them

__all__ = [
    "LayerWeights",
    "Llama",
    "LlamaWeights",
    "Shard",
    "linear_in_pairs",
    "load_weights",
    "pad_halves",
    "quantised_copy",
    "random_weights",
    "rotate_values",
]


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

    def kv_range(self, num_kv_heads: int) -> tuple[int, int]:
        """`[start, stop)` of this rank's KV heads; with more ranks than KV heads, several ranks have the same one."""
        start = self.tp_rank * num_kv_heads // self.tp_size
        return start, start + max(1, num_kv_heads // self.tp_size)

    def vocab_range(self, vocab_size: int) -> tuple[int, int]:
        """`[start, stop)` of this rank's rows: `ceil(V / shards)` per shard, fewer or none in the last ones."""
        rows = -(-vocab_size // self.vocab_shards)
        return min(self.vocab_rank * rows, vocab_size), min((self.vocab_rank + 1) * rows, vocab_size)


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer's weights on one rank, in the execution dtype, or packed. None: the model has no such weights.

    `o_bias` and `down_bias` are on rank 0 of a group only, because the sum over the ranks adds them.
    """

    input_norm: Tensor  # [hidden]
    qkv: Tensor | DecodeWeight  # [(Hq + 2 Hkv) D, hidden]
    o: Tensor | DecodeWeight  # [hidden, Hq D]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor | DecodeWeight  # [2 I / T, hidden], gate first
    down: Tensor | DecodeWeight  # [hidden, I / T]
    qkv_bias: Tensor | None = None  # [(Hq + 2 Hkv) D]
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]
    o_bias: Tensor | None = None  # [hidden]
    gate_up_bias: Tensor | None = None  # [2 I / T]
    down_bias: Tensor | None = None  # [hidden]

    @property
    def tensors(self) -> dict[str, Tensor | DecodeWeight]:
        """The weights that the model has, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclass(frozen=True)
class LlamaWeights:
    """All weights of one rank."""

    embedding: Tensor  # [V, hidden], replicated
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor | DecodeWeight  # [rows of this vocabulary shard, hidden]


def load_weights(
    checkpoint: Checkpoint,
    config: LlamaConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    rotation: Tensor | None = None,
) -> LlamaWeights:
    """Read only this rank's slices of a checkpoint that `Checkpoint.open` has verified.

    Pads heads and quantises matrices if `config` says so. rotation: see `rotate_values`, with `config.rotates_values`.
    """
    embedding = checkpoint.load("model.embed_tokens.weight", device, dtype)
    start, stop = shard.vocab_range(config.vocab_size)
    # The last shards of a small vocabulary can be empty; `tensor_slice` refuses an empty range.
    if config.tie_word_embeddings or start == stop:
        lm_head = embedding[start:stop]
    else:
        lm_head = checkpoint.load("lm_head.weight", device, dtype, 0, start, stop)
    reader = _LayerReader(checkpoint, config.as_stored, shard, dtype, device)
    layers = tuple(_finished(reader.read(layer), config, shard, rotation) for layer in range(config.num_layers))
    final_norm = checkpoint.load("model.norm.weight", device, dtype)
    return LlamaWeights(embedding, layers, final_norm, quantised_head(lm_head, config))


class _LayerReader:
    """Reads this rank's slices of one layer after another."""

    def __init__(
        self, checkpoint: Checkpoint, config: LlamaConfig, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint, self._config, self._shard = checkpoint, config, shard
        self._dtype, self._device = dtype, device
        head_dim, q_heads = config.head_dim, config.num_qo_heads // shard.tp_size
        kv_start, kv_stop = shard.kv_range(config.num_kv_heads)
        rows = config.intermediate_size // shard.tp_size
        q = shard.tp_rank * q_heads * head_dim, (shard.tp_rank + 1) * q_heads * head_dim
        kv = kv_start * head_dim, kv_stop * head_dim
        mlp = shard.tp_rank * rows, (shard.tp_rank + 1) * rows
        q_rows, kv_rows = config.num_qo_heads * head_dim, config.num_kv_heads * head_dim
        # Projection -> (its tensor, its first row in that tensor, first and last row of this rank).
        self._rows = {
            "q": ("self_attn.q_proj", 0, *q),
            "k": ("self_attn.k_proj", 0, *kv),
            "v": ("self_attn.v_proj", 0, *kv),
            "gate": ("mlp.gate_proj", 0, *mlp),
            "up": ("mlp.up_proj", 0, *mlp),
        }
        if config.fused_tensors:
            self._rows = {
                "q": ("self_attn.qkv_proj", 0, *q),
                "k": ("self_attn.qkv_proj", q_rows, *kv),
                "v": ("self_attn.qkv_proj", q_rows + kv_rows, *kv),
                "gate": ("mlp.gate_up_proj", 0, *mlp),
                "up": ("mlp.gate_up_proj", config.intermediate_size, *mlp),
            }
        self._channels = _rotated_pairs(config, device)

    def read(self, layer: int) -> LayerWeights:
        """This rank's weights of a layer."""
        config, prefix = self._config, f"model.layers.{layer}."
        is_first = self._shard.tp_rank == 0

        def whole(name: str, exists: bool = True) -> Tensor | None:
            return self._checkpoint.load(prefix + name, self._device, self._dtype) if exists else None

        def head_norm(part: str) -> Tensor | None:
            weight = whole(f"self_attn.{part}_norm.weight", config.qk_norm)
            return weight if weight is None or self._channels is None else weight[self._channels]

        input_norm, post_norm = whole("input_layernorm.weight"), whole("post_attention_layernorm.weight")
        assert input_norm is not None
        assert post_norm is not None
        return LayerWeights(
            input_norm=input_norm,
            qkv=self._packed(layer, "qkv") or self._joined(prefix, ("q", "k", "v"), "weight"),
            o=self._packed(layer, "o") or self._columns(prefix + "self_attn.o_proj.weight"),
            post_norm=post_norm,
            gate_up=self._packed(layer, "gate_up") or self._joined(prefix, ("gate", "up"), "weight"),
            down=self._packed(layer, "down") or self._columns(prefix + "mlp.down_proj.weight"),
            qkv_bias=self._joined(prefix, ("q", "k", "v"), "bias") if config.qkv_bias else None,
            q_norm=head_norm("q"),
            k_norm=head_norm("k"),
            o_bias=whole("self_attn.o_proj.bias", config.o_bias and is_first),
            gate_up_bias=self._joined(prefix, ("gate", "up"), "bias") if config.mlp_bias else None,
            down_bias=whole("mlp.down_proj.bias", config.mlp_bias and is_first),
        )

    def _joined(self, prefix: str, parts: tuple[str, ...], kind: str) -> Tensor:
        """This rank's rows of several projections, one after the other."""
        return torch.cat([self._part(prefix, part, kind) for part in parts])

    def _part(self, prefix: str, part: str, kind: str) -> Tensor:
        name, first, start, stop = self._rows[part]
        rows = self._checkpoint.load(
            f"{prefix}{name}.{kind}", self._device, self._dtype, 0, first + start, first + stop
        )
        if part not in ("q", "k") or self._channels is None:
            return rows
        heads: Tensor = rows.unflatten(0, (-1, self._config.head_dim))[:, self._channels]
        return heads.flatten(0, 1)

    def _columns(self, name: str) -> Tensor:
        return self._checkpoint.load(name, self._device, self._dtype, 1, *self._own_columns(name))

    def _own_columns(self, name: str) -> tuple[int, int]:
        size = self._checkpoint.entries[name].shape[1] // self._shard.tp_size
        return self._shard.tp_rank * size, (self._shard.tp_rank + 1) * size

    def _packed(self, layer: int, matrix: str) -> DecodeWeight | None:
        """This rank's part of a quantised matrix, packed; None: it is not quantised, or not kept so."""
        tp_size, prefix = self._shard.tp_size, f"model.layers.{layer}."
        if self._config.weights != "auto" or kept_format(self._config, tp_size, layer, matrix) is None:
            return None
        assert isinstance(self._checkpoint, QuantisedCheckpoint)
        parts: list[PackedWeight] = []
        if matrix in ("o", "down"):
            name = prefix + {"o": "self_attn.o_proj.weight", "down": "mlp.down_proj.weight"}[matrix]
            if name not in self._checkpoint.readers:
                return None
            parts = [self._checkpoint.packed_slice(name, self._device, 1, *self._own_columns(name))]
        for part in {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}.get(matrix, ()):
            tensor, first, start, stop = self._rows[part]
            name = f"{prefix}{tensor}.weight"
            if name not in self._checkpoint.readers:
                return None
            rows = self._checkpoint.packed_slice(name, self._device, 0, first + start, first + stop)
            parts.append(rows if part not in ("q", "k") or self._channels is None else self._in_pairs(rows))
        return packed(join_rows(parts), matrices_of(self._config, tp_size)[matrix].stride)

    def _in_pairs(self, rows: PackedWeight) -> PackedWeight:
        """The rows of heads of q or k in the order of `_rotated_pairs`."""
        numbers = torch.arange(rows.shape[0], device=self._device).view(-1, self._config.head_dim)
        return rows.take_rows(numbers[:, self._channels].flatten())


def _rotated_pairs(config: LlamaConfig, device: torch.device) -> Tensor | None:
    """The order of a head's channels in which RoPE rotates pairs (c, c + D / 2), also if it rotates only some of them.

    Scores do not depend on the order of the channels of q and k, so kernels need not know of a partly rotated head:
    channels that are not rotated have frequency 0. None: the channels stay as they are.
    """
    if config.rotary_dim is None:
        return None
    rotated, kept = torch.arange(config.head_dim, device=device).split(
        [config.rotary_dim, config.head_dim - config.rotary_dim]
    )
    halves = [torch.cat([pair, rest]) for pair, rest in zip(rotated.chunk(2), kept.chunk(2), strict=True)]
    return torch.cat(halves)


def _finished(weights: LayerWeights, config: LlamaConfig, shard: Shard, rotation: Tensor | None) -> LayerWeights:
    """Pad a layer's heads, rotate their values, and quantise the matrices, each if `config` says so."""
    weights = _pad_heads(weights, config)
    if rotation is not None:
        _rotate_layer(weights, config, rotation)
    return _quantised_layer(weights, config, shard.tp_size)


def _quantised_layer(
    weights: LayerWeights, config: LlamaConfig, tp_size: int, values_of: Callable[[Any], Tensor] = lambda weight: weight
) -> LayerWeights:
    """Quantise a layer's matrices, if `config.weights` says so. values_of: of a matrix that is packed."""
    if config.weights == "auto":
        return weights
    matrices: dict[str, Any] = {}
    for name in MATRICES:
        matrices[name] = quantised(values_of(getattr(weights, name)), config, tp_size, name)
    return replace(weights, **matrices)


def quantised_copy(model: Llama, config: LlamaConfig, tp_size: int) -> LlamaWeights:
    """The same weights with quantised matrices, as `config.weights` says; everything else is shared."""
    layers = (_quantised_layer(layer, config, tp_size, model.values_of) for layer in model.weights.layers)
    return replace(model.weights, layers=tuple(layers))


def _pad_heads(weights: LayerWeights, config: LlamaConfig) -> LayerWeights:
    """Pad the heads of a layer by zeros: rows of q, k, v and their biases, columns of o."""
    head_dim, padding = config.stored_head_dim, config.head_padding
    if not padding:
        return weights
    assert isinstance(weights.qkv, Tensor)
    assert isinstance(weights.o, Tensor)
    num_qo_heads = weights.o.shape[1] // head_dim

    def padded(rows: Tensor) -> Tensor:
        heads = rows.unflatten(0, (-1, head_dim)).movedim(1, -1)  # [heads, ..., D]
        num_rotated = (len(heads) + num_qo_heads) // 2  # heads of q and k
        parts = pad_halves(heads[:num_rotated], padding), F.pad(heads[num_rotated:], (0, padding))
        return torch.cat(parts).movedim(-1, 1).flatten(0, 1)

    return replace(
        weights,
        qkv=padded(weights.qkv),
        qkv_bias=None if weights.qkv_bias is None else padded(weights.qkv_bias),
        o=F.pad(weights.o.unflatten(1, (-1, head_dim)), (0, padding)).flatten(1),
    )


def pad_halves(x: Tensor, padding: int) -> Tensor:
    """Pad the channels of heads of q or k, [..., D], by zeros: both halves, because RoPE rotates pairs of the two."""
    padded: Tensor = F.pad(x.unflatten(-1, (2, -1)), (0, padding // 2)).flatten(-2)
    return padded


def random_weights(
    config: LlamaConfig, shard: Shard, dtype: torch.dtype, device: torch.device, rotation: Tensor | None = None
) -> LlamaWeights:
    """Draw random weights of `config`'s shape on the device, N(0, 1/fan_in), so that activations stay near unit size.

    Ranks with the same `tp_rank` draw the same numbers (paired ranks hold replicas). Embedding and LM head do not
    depend on the number of ranks; each rank keeps its own rows of the LM head. Layers depend on `tp_size`, because each
    `tp_rank` draws its own part. Heads are padded and rotated, and matrices quantised, as in `load_weights`.
    """
    padded, config = config, config.as_stored
    generator = torch.Generator(device)
    q_heads, kv_heads = config.local_heads(shard.tp_size)
    heads = q_heads + 2 * kv_heads
    intermediate = config.intermediate_size // shard.tp_size
    attn_width = q_heads * config.head_dim

    def draw(rows: int, columns: int, fan_in: int, seed: int) -> Tensor:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return weight.normal_(0.0, 1 / math.sqrt(fan_in), generator=generator.manual_seed(seed))

    def draw_layer(layer: int) -> LayerWeights:
        seed = 4 * (layer * shard.tp_size + shard.tp_rank) + 2
        ones = torch.ones(config.hidden_size, dtype=dtype, device=device)
        head_norm = torch.ones(config.head_dim, dtype=dtype, device=device) if config.qk_norm else None
        is_first = shard.tp_rank == 0

        def bias(size: int, exists: bool, seed: int) -> Tensor | None:
            return draw(size, 1, config.hidden_size, BIAS_SEEDS + seed)[:, 0] if exists else None

        return LayerWeights(
            input_norm=ones,
            qkv=draw(heads * config.head_dim, config.hidden_size, config.hidden_size, seed),
            o=draw(config.hidden_size, attn_width, attn_width * shard.tp_size, seed + 1),
            post_norm=ones,
            gate_up=draw(2 * intermediate, config.hidden_size, config.hidden_size, seed + 2),
            down=draw(config.hidden_size, intermediate, config.intermediate_size, seed + 3),
            qkv_bias=bias(heads * config.head_dim, config.qkv_bias, seed),
            q_norm=head_norm,
            k_norm=head_norm,
            o_bias=bias(config.hidden_size, config.o_bias and is_first, seed + 1),
            gate_up_bias=bias(2 * intermediate, config.mlp_bias, seed + 2),
            down_bias=bias(config.hidden_size, config.mlp_bias and is_first, seed + 3),
        )

    embedding = draw(config.vocab_size, config.hidden_size, 1, 0)
    start, stop = shard.vocab_range(config.vocab_size)
    # Draw the whole LM head, then slice it, so that it does not depend on the number of ranks.
    head = (
        embedding if config.tie_word_embeddings else draw(config.vocab_size, config.hidden_size, config.hidden_size, 1)
    )
    lm_head = head[start:stop] if config.tie_word_embeddings else head[start:stop].clone()
    del head
    layers = tuple(_finished(draw_layer(layer), padded, shard, rotation) for layer in range(config.num_layers))
    return LlamaWeights(embedding, layers, torch.ones_like(layers[0].input_norm), quantised_head(lm_head, config))


def rotate_values(weights: LlamaWeights, config: LlamaConfig, rotation: Tensor) -> None:
    """Rotate the values of every KV head, in place: `v' = R v` by the rows of W_v, and back by W_o, `W_o' = W_o R^T`.

    Biases of v are rotated as rows of W_v are. Attention outputs are then rotated too, and everything after W_o stays
    as it was. Products are computed in fp32.

    Args:
        rotation: R, [D, D] fp32, orthonormal.
    """
    for layer in weights.layers:
        _rotate_layer(layer, config, rotation)


def _rotate_layer(layer: LayerWeights, config: LlamaConfig, rotation: Tensor) -> None:
    """`rotate_values` of one layer."""
    assert isinstance(layer.qkv, Tensor)
    assert isinstance(layer.o, Tensor)
    out = layer.o.unflatten(1, (-1, config.head_dim))  # [hidden, Hq, D]
    values = _value_rows(layer.qkv, out.shape[1], config.head_dim)  # [Hkv, D, hidden]
    values.copy_(rotation @ values.float())
    if layer.qkv_bias is not None:
        biases = _value_rows(layer.qkv_bias, out.shape[1], config.head_dim)  # [Hkv, D]
        biases.copy_(biases.float() @ rotation.T)
    out.copy_(out.float() @ rotation.T)


def _value_rows(qkv: Tensor, num_qo_heads: int, head_dim: int) -> Tensor:
    """The heads of v [Hkv, D, ...], a view of the rows of q, k and v [(Hq + 2 Hkv) D, ...]."""
    heads: Tensor = qkv.unflatten(0, (-1, head_dim))
    return heads[(len(heads) + num_qo_heads) // 2 :]


def _room_for_unpacked(weights: LlamaWeights) -> Tensor | None:
    """Memory for the largest packed matrix in the dtype of the model; None if none is packed."""
    matrices = [getattr(layer, name) for layer in weights.layers for name in MATRICES]
    sizes = [matrix.shape[0] * matrix.shape[1] for matrix in matrices if isinstance(matrix, DecodeWeight)]
    sizes += [PIECE_NUMBERS] if isinstance(weights.lm_head, DecodeWeight) else []
    return torch.empty(max(sizes), dtype=weights.embedding.dtype, device=weights.embedding.device) if sizes else None


def linear_in_pairs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, two rows at a time: x [n, K], weight [N, K], bias [N] -> [n, N].

    Libraries add in another order for another number of rows. Two rows on a CPU take the time of one.
    """
    pairs = F.pad(x, (0, 0, 0, len(x) % 2)).split(2)
    return torch.cat([F.linear(pair, weight, bias) for pair in pairs])[: len(x)]


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

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, group: Group, unpacked: Tensor | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self._group = group
        # Room for one packed matrix at a time, in the dtype of activations; `unpacked`: that of another model.
        self.unpacked = _room_for_unpacked(weights) if unpacked is None else unpacked
        self._linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        self.rotary = config.rotary(weights.embedding.device)
        # Factors of cosines and sines, or None; channels that are not rotated have none.
        self._rope_factors = None
        if config.rope_factor != 1.0:
            self._rope_factors = torch.where(self.rotary.inv_freq > 0, config.rope_factor, 1.0)
        self.sm_scale = config.sm_scale

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.config.num_layers

    def for_decoding(self) -> Llama:
        """Return this model for steps of few rows: on the CPU, the bits of a row do not depend on the other rows.

        So rows of a round are those of plain steps to the last bit. It shares weights and rotary frequencies.
        """
        if self.weights.embedding.device.type != "cpu":
            return self
        decoding = copy(self)
        decoding._linear = linear_in_pairs
        return decoding

    def first_layers(self, num_layers: int) -> Llama:
        """Return a model of the first `num_layers` layers (or all, if there are fewer) that shares these weights."""
        layers = self.weights.layers[:num_layers]
        config = self.config.model_copy(update={"num_layers": len(layers)})
        return Llama(config, replace(self.weights, layers=layers), self._group, self.unpacked)

    def _product(self, x: Tensor, weight: Tensor | DecodeWeight, bias: Tensor | None) -> Tensor:
        """`x W^T + bias` through the library, of a packed weight on its values in the dtype of x."""
        return self._linear(x, self.values_of(weight), bias)

    def values_of(self, weight: Tensor | DecodeWeight) -> Tensor:
        """The values of a matrix; those of a packed one lie in a buffer that the next packed one takes."""
        if isinstance(weight, Tensor):
            return weight
        assert self.unpacked is not None
        room = self.unpacked[: weight.shape[0] * weight.shape[1]].view(weight.shape)
        if room.is_cuda:
            unpack_weight(weight, room)
        else:
            room.copy_(weight.dequantise(room.dtype))
        return room

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
        self, layer: int, x: Tensor, partial: Tensor | None, positions: Tensor, text_length: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Finish the previous all-reduce, then RMSNorm, QKV projection and RoPE.

        Args:
            x: [m, hidden] fp32.  partial: of the previous layer's `post_attention`, or None.  positions: [n] integers.
            text_length: of the prompt, for rotary frequencies; None: each token is the newest one of its text.
        Returns:
            x [m, hidden] fp32, q [n, Hq, D], k [n, Hkv, D], v [n, Hkv, D].
        """
        weights, head_dim = self.weights.layers[layer], self.config.head_dim
        x, y = self._add_norm(x, partial, weights.input_norm, len(positions))
        qkv = self._product(y, weights.qkv, weights.qkv_bias).view(len(y), -1, head_dim)
        num_kv_heads = (qkv.shape[1] - weights.o.shape[1] // head_dim) // 2
        cos, sin = rope_cos_sin(positions, self.rotary.at(positions, text_length), self._rope_factors)
        norms = None
        if weights.q_norm is not None and weights.k_norm is not None:
            norms = HeadNorms(weights.q_norm, weights.k_norm, self.config.rms_norm_eps)
        return x, *rotate_heads(qkv, num_kv_heads, cos, sin, norms)

    def post_attention(self, layer: int, x: Tensor, attn_out: Tensor) -> tuple[Tensor, Tensor]:
        """o_proj, all-reduce and residual, RMSNorm, gate/up with SiLU, down.

        The next `pre_attention` or `reduce_residual` finishes the all-reduce of the MLP output.

        Args:
            x: [m, hidden] fp32.  attn_out: [n, Hq, D].
        Returns:
            x [m, hidden] fp32 after attention, and this rank's partial of the MLP output [n, hidden].
        """
        weights = self.weights.layers[layer]
        attn = attn_out.to(weights.post_norm.dtype).flatten(1)
        x, y = self._add_norm(x, self._product(attn, weights.o, weights.o_bias), weights.post_norm, len(attn))
        gate_up = self._product(y, weights.gate_up, weights.gate_up_bias)
        return x, self._product(silu_mul(gate_up), weights.down, weights.down_bias)

    def lm_head(self, x: Tensor) -> Tensor:
        """Final norm and this rank's vocabulary shard: x [n, hidden] fp32 -> [n, rows of the shard] fp32."""
        y = rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps)
        head = self.weights.lm_head
        if not isinstance(head, DecodeWeight):
            return self._linear(y, head, None).float()
        # The room for unpacked matrices holds a part of it.
        size = PIECE_NUMBERS // head.shape[1] // TILE_ROWS * TILE_ROWS
        parts = [head.row_slice(at, min(at + size, head.shape[0])) for at in range(0, head.shape[0], size)]
        return torch.cat([self._product(y, part, None) for part in parts], dim=-1).float()
