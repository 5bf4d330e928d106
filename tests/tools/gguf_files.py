"""Small GGUF files for tests, written with the gguf package, and the weights that they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 512, 2, 4, 2, 32, 300
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
TYPES = ("F32", "F16", "BF16", *QUANTISED)
# Bytes of a block of the K types that hold fp16 scales: random ones could be NaN.
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}

Pairs = dict[str, tuple[str, tuple[int, ...]]]


def names_and_shapes(tied: bool, biases: tuple[str, ...] = (), has_norms: bool = False) -> Pairs:
    """Hugging Face name without `.weight` -> name in the file and shape.

    Args:
        biases: projections with biases, by their Hugging Face names, such as `self_attn.q_proj`.
        has_norms: q and k of each head are normalised.
    """
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    pairs: Pairs = {"model.embed_tokens": ("token_embd", (VOCAB, HIDDEN)), "model.norm": ("output_norm", (HIDDEN,))}
    if not tied:
        pairs["lm_head"] = ("output", (VOCAB, HIDDEN))
    for layer in range(LAYERS):
        hf, own = f"model.layers.{layer}.", f"blk.{layer}."
        pairs |= {
            hf + "input_layernorm": (own + "attn_norm", (HIDDEN,)),
            hf + "self_attn.q_proj": (own + "attn_q", (q, HIDDEN)),
            hf + "self_attn.k_proj": (own + "attn_k", (kv, HIDDEN)),
            hf + "self_attn.v_proj": (own + "attn_v", (kv, HIDDEN)),
            hf + "self_attn.o_proj": (own + "attn_output", (HIDDEN, q)),
            hf + "post_attention_layernorm": (own + "ffn_norm", (HIDDEN,)),
            hf + "mlp.gate_proj": (own + "ffn_gate", (MLP, HIDDEN)),
            hf + "mlp.up_proj": (own + "ffn_up", (MLP, HIDDEN)),
            hf + "mlp.down_proj": (own + "ffn_down", (HIDDEN, MLP)),
        }
        for part in biases:
            name, shape = pairs[hf + part]
            pairs[f"{hf}{part}.bias"] = (f"{name}.bias", shape[:1])
        if has_norms:
            for part in "qk":
                pairs[f"{hf}self_attn.{part}_norm"] = (f"{own}attn_{part}_norm", (HEAD_DIM,))
    return pairs


def _with_kind(name: str) -> str:
    """A tensor's name with `.weight`, unless it is a bias."""
    return name if name.endswith(".bias") else f"{name}.weight"


def stored(values: np.ndarray, kind: str, random: np.random.Generator) -> np.ndarray:
    """`values` in a type of the format; for the K types, which the package cannot write, random blocks instead."""
    if kind in _SCALES:
        elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        blocks = random.integers(0, 256, (*values.shape[:-1], values.shape[-1] // elements, size), np.uint8)
        for at in _SCALES[kind]:
            scale = random.uniform(1e-4, 2e-3, blocks.shape[:-1]).astype(np.float16)
            blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
        return blocks.reshape(*values.shape[:-1], -1)
    return gguf.quantize(values, gguf.GGMLQuantizationType[kind])


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in the order that llama.cpp's converter stores (its `permute`)."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    kind: str = "Q4_0",
    tied: bool = False,
    metadata: dict[str, Any] | None = None,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tensors: dict[str, tuple[np.ndarray, str] | None] | None = None,
    parts: int = 0,
    arch: str = "llama",
    biases: tuple[str, ...] = (),
) -> dict[str, torch.Tensor]:
    """Write a tiny random model; returns its weights in fp32 under Hugging Face names.

    Args:
        kind: type of the matrices whose rows are whole blocks; others are Q8_0, vectors F32.
        metadata: values under the architecture that replace the usual ones; None leaves one out.
        edit: adds to the file.
        tensors: values and types that replace tensors or are added, by the file's names; None leaves one out.
        parts: tensors of each part, if the file is split.
        arch: `general.architecture`; `qwen3` has norms of heads, and only `llama` stores q and k interleaved.
        biases: as `names_and_shapes`.
    """
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=parts)
    usual: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "rope.dimension_count": HEAD_DIM,
        "rope.freq_base": 10_000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": VOCAB,
    }
    for name, value in (usual | (metadata or {})).items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{name}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{name}", value)
    edit(writer)
    weights, replaced = {}, dict(tensors or {})
    for hf, (own, shape) in names_and_shapes(tied, biases, arch == "qwen3").items():
        values = random.standard_normal(shape, np.float32) * 0.2
        own_kind = kind
        if len(shape) == 1:
            values, own_kind = values + 1, "F32"
        elif shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
            own_kind = "Q8_0"
        data, quant = stored(values, own_kind, random), gguf.GGMLQuantizationType[own_kind]
        weights[_with_kind(hf)] = torch.from_numpy(np.array(gguf.dequantize(data, quant), np.float32))
        if arch == "llama" and ("q_proj" in hf or "k_proj" in hf):
            data = interleaved(data, HEADS if "q_proj" in hf else KV_HEADS)
        if _with_kind(own) not in replaced:
            writer.add_tensor(_with_kind(own), data, raw_dtype=quant)
    for name, replacement in replaced.items():
        if replacement is not None:
            quant = gguf.GGMLQuantizationType[replacement[1]]
            writer.add_tensor(name, replacement[0], raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
