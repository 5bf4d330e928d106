"""Weights of a GGUF file: checked from the headers, dequantised slice by slice as they are read."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from alspec.errors import UserError, show
from alspec.models.checkpoint.checkpoint import Checkpoint, expected_tensors
from alspec.models.checkpoint.gguf_header import BLOCKS, GgufModel
from alspec.models.llama_config import LlamaConfig

__all__ = ["GgufCheckpoint", "gguf_name"]

_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNUSED = ("rope_freqs.weight",)  # tells the RoPE scaling, which the configuration has
_PIECE_BYTES = 1 << 24  # quantised bytes that are dequantised at once
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return a tensor's name in GGUF files for its Hugging Face name."""
    stem, _, kind = name.rpartition(".")  # weight or bias
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """The weights of a GGUF file under their Hugging Face names, to be read slice by slice.

    `tensor_slice` returns F32, F16 and BF16 as stored and quantised tensors in fp32. If the family's files hold the
    rows of each head of q and k in the interleaved rotary order, they are put back into the order of two halves.
    """

    head_dim: int = 2
    interleaved: bool = False

    @classmethod
    def of_model(cls, model: GgufModel, config: LlamaConfig, interleaved: bool) -> Self:
        """Check names and shapes of a file's tensors against its configuration; reads no weights.

        Args:
            interleaved: order of the rows of q and k.
        Raises:
            UserError: a tensor is missing, left over, or of the wrong shape; a quantised tensor without the gguf
                package.
        """
        expected = {name: (gguf_name(name), shape) for name, shape in expected_tensors(config).items()}
        stored = {stored for stored, _ in expected.values()}
        for name, shape in expected.values():
            if name not in model.entries:
                raise UserError(
                    f"{model.path}: tensor {show(name)}: missing: expected shape {list(shape)}, found none; "
                    "download or convert the model again"
                )
            if model.entries[name].shape != shape:
                raise UserError(
                    f"{model.files[name]}: tensor {show(name)}: wrong shape: expected {list(shape)} by the metadata, "
                    f"found {list(model.entries[name].shape)}; download or convert the model again"
                )
        left_over = [name for name in model.entries if name not in stored and name not in _UNUSED]
        if left_over:
            raise UserError(
                f"{model.files[left_over[0]]}: tensor {show(left_over[0])}: left over: expected the {len(stored)} "
                f"tensors of the metadata, found {len(left_over)} more; this variant is not supported"
            )
        quantised = next((name for name in stored if model.entries[name].dtype not in _STORED), None)
        if quantised is not None and importlib.util.find_spec("gguf") is None:
            raise UserError(
                f"{model.path}: quantised tensors ({model.entries[quantised].dtype}) need the package gguf; "
                "pip install gguf"
            )
        return cls(
            {name: model.entries[stored] for name, (stored, _) in expected.items()},
            {name: model.files[stored] for name, (stored, _) in expected.items()},
            {name: stored for name, (stored, _) in expected.items()},
            head_dim=config.head_dim,
            interleaved=interleaved,
        )

    def _read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        if not self.interleaved or name.rpartition(".")[0].rpartition(".")[2] not in ("q_proj", "k_proj"):
            return self._read_stored(name, dim, start, stop)
        if dim:
            return _in_halves(self._read_stored(name, dim, start, stop), self.head_dim)
        first = start // self.head_dim * self.head_dim
        last = -(-stop // self.head_dim) * self.head_dim  # whole heads
        heads = _in_halves(self._read_stored(name, 0, first, last), self.head_dim)
        return heads[start - first : stop - first]

    def _read_stored(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """`tensor[start:stop]` along `dim`, with rows in the file's order."""
        entry = self.entries[name]
        elements, size = BLOCKS[entry.dtype]
        rows = self._mapped(self.files[name])[entry.start : entry.stop].reshape(-1, entry.shape[-1] // elements * size)
        columns = entry.shape[-1]
        if len(entry.shape) > 1 and dim == 0:
            rows, start, stop = rows[start:stop], 0, columns
        # Blocks that hold the columns start .. stop.
        first, last = start // elements, -(-stop // elements)
        blocks = rows[:, first * size : last * size]
        kept = slice(start - first * elements, stop - first * elements)
        values = _as_stored(blocks, entry.dtype) if entry.dtype in _STORED else _dequantised(blocks, entry.dtype, kept)
        return values.reshape(-1) if len(entry.shape) == 1 else values

    def _mapped(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = np.memmap(path, np.uint8, mode="c")  # private to this process
        return self._handles[path]


def _as_stored(blocks: Any, dtype: str) -> torch.Tensor:
    # A tensor may begin at any multiple of the alignment; PyTorch needs a contiguous row to read it as wider numbers.
    numbers: torch.Tensor = torch.from_numpy(np.ascontiguousarray(blocks))
    return numbers.view(_STORED[dtype])


def _dequantised(blocks: Any, dtype: str, kept: slice) -> torch.Tensor:
    """Values of quantised rows in fp32, the `kept` columns of them: a few rows at a time, to need little memory."""
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType[dtype]
    values = np.empty((len(blocks), kept.stop - kept.start), np.float32)
    step = max(1, _PIECE_BYTES // blocks.shape[1])
    for row in range(0, len(blocks), step):
        piece = np.ascontiguousarray(blocks[row : row + step])
        values[row : row + step] = dequantize(piece, kind)[:, kept]
    return torch.from_numpy(values)


def _in_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head: 0, 2, 4, ... become its first half, 1, 3, 5, ... its second."""
    pairs: torch.Tensor = weight.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)
