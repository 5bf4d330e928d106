"""Folders with quantised weights, written from the formats' descriptions, and the values that they stand for.

Nothing here uses the package: codes are packed with shifts of NumPy integers and values computed in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["FORMATS", "Stored", "pack_words", "save_quantised"]

Stored = dict[str, Tensor]
LINEAR = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
)  # fmt: skip
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 151,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def pack_words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack the last axis into int32 words; place i of a word holds code order[i] of its codes."""
    per_word = 32 // bits
    missing = -codes.shape[-1] % per_word
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)]).astype(np.uint64)
    words = np.zeros((*codes.shape[:-1], padded.shape[-1] // per_word), np.uint64)
    for place, source in enumerate(order or range(per_word)):
        words |= padded[..., source::per_word] << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def _scales(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float16, size: float = 0.02) -> Tensor:
    return torch.from_numpy(rng.uniform(0.5 * size, 1.5 * size, shape)).to(dtype)


def _values(codes: np.ndarray, zeros: np.ndarray, scales: Tensor, groups: np.ndarray) -> Tensor:
    """[out, in] fp32, rounded once from float64."""
    exact = (codes.astype(np.float64) - zeros[:, groups]) * scales.double().numpy()[:, groups]
    return torch.from_numpy(exact).float()


def _fp8(
    scale_name: str, block: tuple[int, int] | None, dtype: torch.dtype
) -> Callable[[np.random.Generator, int, int], tuple[Stored, Tensor]]:
    """Block None: one scale for the tensor; (1, 0): one for each row."""

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, Tensor]:
        weight = torch.from_numpy(rng.normal(0, 20, (rows, columns))).to(torch.float8_e4m3fn)
        if block is None:
            scales = _scales(rng, 1, dtype=dtype, size=0.01)
            full = scales.double().reshape(1, 1).expand(rows, columns)
        elif block == (1, 0):
            scales = _scales(rng, rows, 1, dtype=dtype, size=0.01)
            full = scales.double().expand(rows, columns)
        else:
            scales = _scales(rng, -(-rows // block[0]), -(-columns // block[1]), dtype=dtype, size=0.01)
            full = scales.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
        return {"weight": weight, scale_name: scales}, (weight.double() * full).float()

    return make


def _packed(
    bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.bfloat16, ordered: bool = False
) -> Callable[[np.random.Generator, int, int], tuple[Stored, Tensor]]:
    """compressed-tensors, pack-quantized."""

    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, Tensor]:
        size = columns if group == -1 else group
        groups = np.arange(columns) // size
        if ordered:
            groups = rng.permutation(groups)
        codes = rng.integers(0, 2**bits, (rows, columns))
        zeros = np.full((rows, columns // size), 2 ** (bits - 1))
        if not symmetric:
            zeros = rng.integers(0, 2**bits, zeros.shape)
        scales = _scales(rng, *zeros.shape, dtype=dtype, size=0.02 * 16 / 2**bits)
        stored = {
            "weight_packed": pack_words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            stored["weight_zero_point"] = pack_words(zeros.T, bits).T.contiguous()
        if ordered:
            stored["weight_g_idx"] = torch.from_numpy(groups).int()
        return stored, _values(codes, zeros, scales, groups)

    return make


def _awq(group: int) -> Callable[[np.random.Generator, int, int], tuple[Stored, Tensor]]:
    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, Tensor]:
        size = columns if group == -1 else group
        codes, zeros = rng.integers(0, 16, (rows, columns)), rng.integers(0, 16, (rows, columns // size))
        scales = _scales(rng, *zeros.shape)
        stored = {
            "qweight": pack_words(codes.T, 4, AWQ_ORDER),
            "qzeros": pack_words(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
        return stored, _values(codes, zeros, scales, np.arange(columns) // size)

    return make


def _gptq(
    group: int, bits: int = 4, version: int = 1, ordered: bool = False, has_bias: bool = False
) -> Callable[[np.random.Generator, int, int], tuple[Stored, Tensor]]:
    def make(rng: np.random.Generator, rows: int, columns: int) -> tuple[Stored, Tensor]:
        size = columns if group == -1 else group
        groups = np.arange(columns) // size
        if ordered:
            groups = rng.permutation(groups)
        codes = rng.integers(0, 2**bits, (rows, columns))
        zeros = rng.integers(version == 1, 2**bits, (rows, -(-columns // size)))
        scales = _scales(rng, *zeros.shape, size=0.02 * 16 / 2**bits)
        stored = {
            "qweight": pack_words(codes, bits).T.contiguous(),
            "qzeros": pack_words(zeros.T - (version == 1), bits),
            "scales": scales.T.contiguous(),
            "g_idx": torch.from_numpy(groups).int(),
        }
        if has_bias:
            stored["bias"] = torch.zeros(rows, dtype=torch.float16)
        return stored, _values(codes, zeros, scales, groups)

    return make


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _float(**weights: Any) -> dict[str, Any]:
    return _compressed("float-quantized", num_bits=8, type="float", symmetric=True, dynamic=False, **weights)


def _int(**weights: Any) -> dict[str, Any]:
    return _compressed("pack-quantized", type="int", dynamic=False, **weights)


_GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}
_AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
BF16, FP32 = torch.bfloat16, torch.float32
# Name -> quantization_config, and what writes one weight.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[np.random.Generator, int, int], tuple[Stored, Tensor]]]] = {
    "fp8-tensor": (_float(strategy="tensor"), _fp8("weight_scale", None, FP32)),
    "fp8-channel": (_float(strategy="channel"), _fp8("weight_scale", (1, 0), BF16)),
    "fp8-block": (_float(strategy="block", block_structure=[128, 128]), _fp8("weight_scale", (128, 128), BF16)),
    "fp8-inverse": (_BLOCK, _fp8("weight_scale_inv", (128, 128), FP32)),
    "fp8-static": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        _fp8("weight_scale", None, FP32),
    ),
    "fp8-tensor-inverse": (_BLOCK | {"weight_block_size": None}, _fp8("weight_scale_inv", None, FP32)),
    "int4-group": (
        _int(num_bits=4, symmetric=True, strategy="group", group_size=32, actorder=None), _packed(4, 32, True),
    ),
    "int4-zeros": (
        _int(num_bits=4, symmetric=False, strategy="group", group_size=32, actorder="static"), _packed(4, 32, False),
    ),
    "int4-channel": (_int(num_bits=4, symmetric=True, strategy="channel", group_size=None), _packed(4, -1, True)),
    "int4-ordered": (
        _int(num_bits=4, symmetric=False, strategy="group", group_size=32, actorder="group"),
        _packed(4, 32, False, FP32, ordered=True),
    ),
    "int8-group": (_int(num_bits=8, symmetric=False, strategy="group", group_size=32), _packed(8, 32, False)),
    "awq": (_AWQ_CONFIG | {"group_size": 32}, _awq(32)),
    "awq-row": (_AWQ_CONFIG | {"group_size": -1}, _awq(-1)),
    "gptq": (_GPTQ | {"group_size": 32}, _gptq(32, has_bias=True)),
    "gptq-row": (_GPTQ | {"group_size": -1, "checkpoint_format": "gptq_v2"}, _gptq(-1, version=2)),
    "gptq-ordered": (
        _GPTQ | {"group_size": 32, "desc_act": True, "checkpoint_format": "gptq"}, _gptq(32, ordered=True),
    ),
    "gptq-v2-ordered": (
        _GPTQ | {"group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"},
        _gptq(32, version=2, ordered=True),
    ),
    "gptq-in-order": (_GPTQ | {"group_size": 32, "desc_act": True}, _gptq(32)),  # an order that changes nothing
    "gptq-8": (_GPTQ | {"group_size": 32, "bits": 8}, _gptq(32, bits=8)),
}  # fmt: skip


def save_quantised(
    folder: Path, name: str, plain: tuple[str, ...] = (), family: str = "Llama", **overrides: Any
) -> Any:
    """Write a small random model in one of `FORMATS`; returns transformers' model with the values that it stands for.

    Args:
        plain: modules such as `model.layers.0.mlp.up_proj` that stay unquantised.
        family: transformers' name.  overrides: fields of its config.
    """
    settings, make = FORMATS[name]
    torch.manual_seed(0)
    config_type, model_type = (getattr(transformers, f"{family}{kind}") for kind in ("Config", "ForCausalLM"))
    model: Any = model_type(config_type(**(SHAPE | overrides)))
    for parameter_name, parameter in model.named_parameters():
        is_norm = "norm" in parameter_name
        parameter.data = torch.rand_like(parameter) + 0.5 if is_norm else torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    rng = np.random.default_rng(1)
    stored = load_file(folder / "model.safetensors")
    for module_name, module in model.named_modules():
        if module_name.rpartition(".")[2] not in LINEAR or module_name in plain:
            continue
        rows, columns = module.weight.shape
        tensors, values = make(rng, rows, columns)
        module.weight.data = values
        del stored[f"{module_name}.weight"]
        if module.bias is not None:
            tensors.pop("bias", None)
        stored |= {f"{module_name}.{part}": tensor for part, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}), encoding="utf-8")
    return model.eval()
