"""The four matrices of a layer and the LM head, and the form in which a rank keeps each: in the dtype of the model, or
quantised.

`--weights fp8` and `int4` quantise every layer as it is read. `auto` leaves weights as the checkpoint has them. Fused
steps on GPUs keep quantised matrices packed, as `DecodeWeight`. Everywhere else, and where the kernels have no layout
for a format, a matrix has the same values in the dtype of the model.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from alspec.errors import UserError
from alspec.kernels.linear.decode_weight import DecodeWeight, WeightFormat, fits, pack_weight, packed_bytes
from alspec.models.checkpoint.quantised.packed_weight import PackedWeight, join_rows
from alspec.models.checkpoint.quantised.quantisation_config import WeightScheme
from alspec.models.checkpoint.quantised.quantisers import quantise_fp8_channel, quantise_int4
from alspec.models.llama_config import LlamaConfig

__all__ = [
    "MATRICES",
    "PIECE_NUMBERS",
    "KeptFormat",
    "Matrix",
    "kept_format",
    "largest_product",
    "head_bytes",
    "matrices_of",
    "num_dequantised",
    "num_packed",
    "packed",
    "packs_head",
    "quantised",
    "quantised_head",
    "unpacked_numbers",
    "weights_bytes",
    "weights_name",
]

MATRICES = ("qkv", "o", "gate_up", "down")
_GROUPS = (128, 64, 32)  # inputs of a group of int4: the largest that divides the inputs of a rank
PIECE_NUMBERS = 1 << 24  # numbers that are quantised, or of the LM head unpacked, at once


class Matrix(NamedTuple):
    """The shape of one matrix on one rank, and the stride of its `DecodeWeight`."""

    rows: int
    columns: int
    stride: int


class KeptFormat(NamedTuple):
    """How a matrix is quantised."""

    format: WeightFormat
    group_size: int  # inputs


def matrices_of(config: LlamaConfig, tp_size: int) -> dict[str, Matrix]:
    """The matrices of a layer on one rank of a group, by name."""
    q_heads, kv_heads = config.local_heads(tp_size)
    intermediate, head_dim = config.intermediate_size // tp_size, config.head_dim
    return {
        "qkv": Matrix((q_heads + 2 * kv_heads) * head_dim, config.hidden_size, head_dim // 2),
        "o": Matrix(config.hidden_size, q_heads * head_dim, 8),
        "gate_up": Matrix(2 * intermediate, config.hidden_size, intermediate),
        "down": Matrix(config.hidden_size, intermediate, 8),
    }


def quantised_format(config: LlamaConfig, tp_size: int, name: str) -> KeptFormat | None:
    """How `--weights` quantises a matrix; None: it does not.

    Raises:
        UserError: the inputs cannot be divided into groups.
    """
    columns = matrices_of(config, tp_size)[name].columns
    if config.weights == "fp8":
        return KeptFormat("fp8", columns)
    if config.weights == "auto":
        return None
    allowed = _GROUPS[-1:] if config.weights == "int4-g32" else _GROUPS
    sizes = [size for size in allowed if columns % size == 0]
    if not sizes:
        fitting = [size for size in config.valid_tp_sizes if _divides_into_groups(config, size)]
        others = f"valid sizes of one group: {', '.join(map(str, fitting))}; or " if fitting else ""
        owner = "a rank" if tp_size == 1 else f"each of {tp_size} ranks"
        raise UserError(
            f"weights: int4 needs inputs in groups of {_GROUPS[-1]}, {owner} has {columns} of {name}; {others}use fp8"
        )
    return KeptFormat("int4", sizes[0])


def _divides_into_groups(config: LlamaConfig, tp_size: int) -> bool:
    return all(matrix.columns % _GROUPS[-1] == 0 for matrix in matrices_of(config, tp_size).values())


def stored_format(config: LlamaConfig, tp_size: int, layer: int, name: str) -> KeptFormat | None:
    """How the checkpoint holds a matrix, if a `DecodeWeight` can hold it as well; else None.

    It cannot hold codes of 8 bits, groups in another order, parts in several formats, and heads that change when read.
    """
    if name in ("qkv", "o") and config.changes_heads:
        return None
    schemes = _stored_schemes(config, layer, name)
    scheme, columns = schemes[0], matrices_of(config, tp_size)[name].columns
    if scheme is None or any(other != scheme for other in schemes) or scheme.has_order:
        return None
    if scheme.layout != "fp8" and scheme.bits != 4:
        return None
    size = columns if scheme.group_size == -1 else min(scheme.group_size, columns)
    return KeptFormat("fp8" if scheme.layout == "fp8" else "int4", size)


def _stored_schemes(config: LlamaConfig, layer: int, name: str) -> list[WeightScheme | None]:
    """How the checkpoint holds the parts of a matrix; None: not quantised."""
    if config.quantisation is None:
        return [None]
    parts = {
        "qkv": ["self_attn.qkv_proj"] if config.fused_tensors else [f"self_attn.{part}_proj" for part in "qkv"],
        "o": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_up_proj"] if config.fused_tensors else ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }
    return [config.quantisation.scheme_of(f"model.layers.{layer}.{part}") for part in parts[name]]


def weights_name(config: LlamaConfig, tp_size: int, dtype_name: str) -> str:
    """What the weights are: how files hold them or `--weights` quantises them, and the dtype in which they are used."""
    name, head = config.quantised_as, "" if config.lm_head == "auto" else f", LM head {config.lm_head}"
    if name is None and not head:
        return dtype_name
    if name == "fp8" and config.quantisation is None:
        name = "fp8 (a scale for each row)"
    elif name is not None and config.quantisation is None:
        formats = [quantised_format(config, tp_size, matrix) for matrix in MATRICES]
        sizes = sorted({kept.group_size for kept in formats if kept is not None})
        name = f"int4 (groups of {' and '.join(map(str, sizes))})"
    name = f"{name or dtype_name}{head}"
    if not config.packs_weights:
        return f"{name}, dequantised to {dtype_name}"
    unpacked, total = num_dequantised(config, tp_size)
    return f"{name}, {unpacked} of {total} matrices dequantised to {dtype_name}" if unpacked else name


def kept_format(config: LlamaConfig, tp_size: int, layer: int, name: str) -> KeptFormat | None:
    """The format in which a matrix is kept packed; None: it is kept in the dtype of the model."""
    if not config.packs_weights:
        return None
    kept = quantised_format(config, tp_size, name) or stored_format(config, tp_size, layer, name)
    matrix = matrices_of(config, tp_size)[name]
    return kept if kept and fits((matrix.rows, matrix.columns), matrix.stride, kept.group_size) else None


@functools.lru_cache(maxsize=256)
def num_packed(config: LlamaConfig, tp_size: int) -> int:
    """Matrices of all layers that are kept packed."""
    layers = range(config.num_layers)
    return sum(kept_format(config, tp_size, layer, name) is not None for layer in layers for name in MATRICES)


@functools.lru_cache(maxsize=256)
def num_dequantised(config: LlamaConfig, tp_size: int) -> tuple[int, int]:
    """Matrices of all layers that are quantised, in files or as they are read, but not kept packed; and all of them."""
    matrices = [(layer, name) for layer in range(config.num_layers) for name in MATRICES]
    quantised_ones = [each for each in matrices if config.weights != "auto" or any(_stored_schemes(config, *each))]
    return sum(kept_format(config, tp_size, *each) is None for each in quantised_ones), len(matrices)


@functools.lru_cache(maxsize=256)
def weights_bytes(config: LlamaConfig, tp_size: int, dtype: torch.dtype) -> int:
    """Bytes of the matrices of all layers on one rank."""
    matrices, total = matrices_of(config, tp_size), 0
    for layer in range(config.num_layers):
        for name, matrix in matrices.items():
            kept = kept_format(config, tp_size, layer, name)
            if kept is None:
                total += matrix.rows * matrix.columns * dtype.itemsize
            else:
                total += packed_bytes((matrix.rows, matrix.columns), matrix.stride, *kept)
    return total


def packs_head(config: LlamaConfig) -> bool:
    """Whether the LM head is kept packed."""
    return config.packs_weights and config.lm_head != "auto" and fits((1, config.hidden_size), 8, config.hidden_size)


def head_bytes(config: LlamaConfig, num_rows: int, dtype: torch.dtype) -> int:
    """Bytes of a rank's rows of the LM head, beside the embedding."""
    if packs_head(config) and num_rows:
        return packed_bytes((num_rows, config.hidden_size), 8, "fp8", config.hidden_size)
    is_embedding = config.tie_word_embeddings and config.lm_head == "auto"
    return 0 if is_embedding else num_rows * config.hidden_size * dtype.itemsize


def unpacked_numbers(config: LlamaConfig, tp_size: int) -> int:
    """Most numbers of a packed matrix that are unpacked at once."""
    layers = max(matrix.rows * matrix.columns for matrix in matrices_of(config, tp_size).values())
    return max(layers, PIECE_NUMBERS if packs_head(config) else 0)


def largest_product(config: LlamaConfig, tp_size: int, head_rows: int) -> int:
    """Most rows of a rank's matrices, with its `head_rows` of the LM head: numbers of the widest product of a token."""
    return max(head_rows, *(matrix.rows for matrix in matrices_of(config, tp_size).values()))


def quantised_head(weight: Tensor, config: LlamaConfig) -> Tensor | DecodeWeight:
    """Quantise rows of the LM head as `config.lm_head` says: packed, or their new values in the same dtype."""
    if config.lm_head == "auto" or not len(weight):
        return weight
    parts = [quantise_fp8_channel(rows) for rows in _pieces(weight)]
    if packs_head(config):
        return packed(join_rows(parts), 8)
    return torch.cat([part.dequantise(weight.dtype) for part in parts])


def packed(weight: PackedWeight, stride: int) -> DecodeWeight:
    """Bring a quantised matrix into the order of the decode kernels."""
    assert weight.format != "int8"
    assert weight.perm is None
    assert weight.column_groups is None
    return pack_weight(weight.codes(), weight.scales, weight.zeros, weight.format, weight.group_size, stride)


def quantised(weight: Tensor, config: LlamaConfig, tp_size: int, name: str) -> Tensor | DecodeWeight:
    """Quantise a matrix as `--weights` says: packed, or its new values in the same dtype."""
    wanted = quantised_format(config, tp_size, name)
    if wanted is None:
        return weight
    keeps = kept_format(config, tp_size, 0, name) is not None
    parts = []
    for rows in _pieces(weight):
        if wanted.format == "fp8":
            part = quantise_fp8_channel(rows)
        else:  # scales of 16 bits, whatever the dtype of the model, so that its values do not depend on it
            part = quantise_int4(rows, wanted.group_size, scale_dtype=torch.bfloat16)
        parts.append(part if keeps else part.dequantise(weight.dtype))
    if not keeps:
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    whole = join_rows([part for part in parts if isinstance(part, PackedWeight)])
    return packed(whole, matrices_of(config, tp_size)[name].stride)


def _pieces(weight: Tensor) -> list[Tensor]:
    """Rows that are quantised at once: they take memory in fp32 several times."""
    return list(weight.split(max(1, PIECE_NUMBERS // weight.shape[1])))
