"""The demo checkpoint's network in plain torch: a Llama with stacked layer weights, and its Hugging Face files.

Shapes: B rows, T tokens, H hidden, Hq query heads, Hkv KV heads, D head_dim, L layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = [
    "DemoLlama",
    "LayerWeights",
    "Shape",
    "attend_full",
    "export",
    "layer_forward",
    "load",
    "near_mask",
    "rms_norm",
]


@dataclass(frozen=True)
class Shape:
    """Sizes of the network. Training lets `global_layers` use distant tokens."""

    vocab_size: int = 4096
    num_layers: int = 10
    hidden_size: int = 256
    intermediate_size: int = 896
    num_qo_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    rope_theta: float = 100_000.0
    max_positions: int = 8192
    global_layers: tuple[int, ...] = (3, 5, 7)


RMS_NORM_EPS = 1e-5

# Stacked parameter -> (name inside a Hugging Face layer, output and input size as Shape fields).
_MATRICES = {
    "wq": ("self_attn.q_proj", "q_size", "hidden_size"),
    "wk": ("self_attn.k_proj", "kv_size", "hidden_size"),
    "wv": ("self_attn.v_proj", "kv_size", "hidden_size"),
    "wo": ("self_attn.o_proj", "hidden_size", "q_size"),
    "w_gate": ("mlp.gate_proj", "intermediate_size", "hidden_size"),
    "w_up": ("mlp.up_proj", "intermediate_size", "hidden_size"),
    "w_down": ("mlp.down_proj", "hidden_size", "intermediate_size"),
}
_NORMS = {"norm_attention": "input_layernorm", "norm_mlp": "post_attention_layernorm"}
LayerWeights = dict[str, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class DemoLlama(nn.Module):
    """Parameters in float32: matrices [L, out, in], norms [L, H], `embed` [vocab, H] (tied), `norm_out` [H]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        sizes = {
            "q_size": shape.num_qo_heads * shape.head_dim,
            "kv_size": shape.num_kv_heads * shape.head_dim,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
        }
        for name, (_, rows, columns) in _MATRICES.items():
            std = 0.5 / math.sqrt(sizes[columns])
            scale = std / math.sqrt(2 * shape.num_layers) if name in ("wo", "w_down") else std
            weight = torch.randn(shape.num_layers, sizes[rows], sizes[columns]) * scale
            setattr(self, name, nn.Parameter(weight))
        for name in _NORMS:
            setattr(self, name, nn.Parameter(torch.ones(shape.num_layers, shape.hidden_size)))
        self.embed = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * 0.04)
        self.norm_out = nn.Parameter(torch.ones(shape.hidden_size))

    def matrices(self) -> list[nn.Parameter]:
        """The stacked weight matrices."""
        return [getattr(self, name) for name in _MATRICES]

    def layers(self) -> list[LayerWeights]:
        """The weights of each layer, as slices of the stacked parameters."""
        stacks = {name: getattr(self, name).unbind(0) for name in (*_MATRICES, *_NORMS)}
        return [{name: stack[i] for name, stack in stacks.items()} for i in range(self.shape.num_layers)]

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables [T, D] float32; channels c and c + D/2 rotate together."""
        half = torch.arange(0, self.shape.head_dim, 2, device=self.embed.device).float() / self.shape.head_dim
        angles = torch.outer(torch.arange(length, device=self.embed.device).float(), self.shape.rope_theta**-half)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32, returned in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_NORM_EPS) * weight).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def attend_full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, [B, Hq, T, D] against [B, Hkv, T, D]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def near_mask(query: Tensor, key: Tensor, chunk_size: int) -> Tensor:
    """Mask of the positions that A~ reads: the sink [0, S) and the window from floor((n - S) / 64) * 64 on.

    n = query + 1 includes the current token. Integer positions are broadcast; positions after the query are masked.
    """
    start = (query + 1 - chunk_size) // 64 * 64
    return (key <= query) & ((key < chunk_size) | (key >= start))


def layer_forward(
    x: Tensor, weights: LayerWeights, rope: tuple[Tensor, Tensor], head_dim: int, attend: Attend
) -> Tensor:
    """One Llama layer. x [B, T, H]; `attend` maps q [B, Hq, T, D], k, v [B, Hkv, T, D] to [B, Hq, T, D]."""
    w = {name: weight if name in _NORMS else weight.to(x.dtype) for name, weight in weights.items()}
    h = rms_norm(x, w["norm_attention"])
    q, k, v = (F.linear(h, w[name]).unflatten(-1, (-1, head_dim)).transpose(1, 2) for name in ("wq", "wk", "wv"))
    out = attend(_rotate(q, *rope), _rotate(k, *rope), v)
    x = x + F.linear(out.transpose(1, 2).flatten(2), w["wo"])
    h = rms_norm(x, w["norm_mlp"])
    return x + F.linear(F.silu(F.linear(h, w["w_gate"])) * F.linear(h, w["w_up"]), w["w_down"])


def _hf_name(layer: int, name: str) -> str:
    """Name in the Hugging Face files of a layer's part of a stacked parameter."""
    inner = _MATRICES[name][0] if name in _MATRICES else _NORMS[name]
    return f"model.layers.{layer}.{inner}.weight"


def _hf_tensors(model: DemoLlama) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm_out}
    for i, weights in enumerate(model.layers()):
        for name, weight in weights.items():
            tensors[_hf_name(i, name)] = weight
    return {name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in tensors.items()}


def export(model: DemoLlama, out: Path, bos_id: int, eos_ids: list[int]) -> None:
    """Write config.json, generation_config.json and two bf16 safetensors shards with their index into `out`.

    `eos_ids` begins with the end-of-text token; the others end a turn of a chat.
    """
    out.mkdir(parents=True, exist_ok=True)
    shape, tensors = model.shape, _hf_tensors(model)
    half = shape.num_layers // 2
    first = {
        "model.embed_tokens.weight",
        *(n for i in range(half) for n in tensors if n.startswith(f"model.layers.{i}.")),
    }
    weight_map: dict[str, str] = {}
    for number, names in enumerate([sorted(first), sorted(set(tensors) - first)], start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_qo_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": bos_id,
        "eos_token_id": eos_ids[0],
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": bos_id, "eos_token_id": eos_ids, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load(folder: Path, shape: Shape) -> DemoLlama:
    """Read exported weights back into the training network (float32)."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    model = DemoLlama(shape)
    with torch.no_grad():
        model.embed.copy_(tensors["model.embed_tokens.weight"])
        model.norm_out.copy_(tensors["model.norm.weight"])
        for i, weights in enumerate(model.layers()):
            for name, weight in weights.items():
                weight.copy_(tensors[_hf_name(i, name)])
    return model
