"""The readers against the packages that write the formats: each package's own packing and dequantisation."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from family_models import greedy
from quantised_folders import FORMATS, SHAPE, Stored, save_quantised
from safetensors.torch import load_file
from torch import Tensor

from alspec import Engine
from alspec.config import EngineConfig
from alspec.models.checkpoint.quantised.quantised_checkpoint import QuantisedCheckpoint
from alspec.models.checkpoint.source import model_config, open_checkpoint

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj"


def module_of(package: str, path: str) -> ModuleType:
    """One file of a package, whose other files need more than is installed; skips the test without the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    file = Path(spec.submodule_search_locations[0]) / path
    file_spec = importlib.util.spec_from_file_location(f"reference_{package}_{file.stem}", file)
    assert file_spec is not None
    assert file_spec.loader is not None
    module = importlib.util.module_from_spec(file_spec)
    file_spec.loader.exec_module(module)
    return module


def functions_of(package: str, path: str, names: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Functions and methods of one file of a package, by name, without the imports of that file.

    given: the globals that they use. Skips the test without the package.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    file = Path(spec.submodule_search_locations[0]) / path
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes: list[ast.stmt] = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert sorted(node.name for node in nodes if isinstance(node, ast.FunctionDef)) == sorted(names)
    code = compile(ast.Module(nodes, []), str(file), "exec", flags=annotations.compiler_flag, dont_inherit=True)
    exec(code, given)
    return {name: given[name] for name in names}


def open_folder(folder: Path) -> QuantisedCheckpoint:
    settings = EngineConfig(model=folder)
    checkpoint = open_checkpoint(settings, model_config(settings))
    assert isinstance(checkpoint, QuantisedCheckpoint)
    return checkpoint


def stored_of(folder: Path, module: str) -> Stored:
    tensors = load_file(folder / "model.safetensors")
    return {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] == module}


def in_fp32(stored: Stored) -> Stored:
    """The same tensors with scales in fp32, in which packages then calculate."""
    return {name: tensor.float() if "scale" in name else tensor for name, tensor in stored.items()}


@pytest.mark.parametrize("name", ["awq", "awq-row"])
def test_awq(name: str, tmp_path: Path) -> None:
    """AutoAWQ's dequantisation, in fp32 and in fp16 as it runs."""
    reference = module_of("awq", "utils/packing_utils.py").dequantize_gemm
    model = save_quantised(tmp_path, name)
    checkpoint, stored = open_folder(tmp_path), stored_of(tmp_path, DOWN)
    size = len(stored["qweight"]) // len(stored["scales"])
    exact = reference(stored["qweight"], stored["qzeros"], stored["scales"].float(), 4, size)
    assert torch.equal(checkpoint.tensor_slice(f"{DOWN}.weight"), exact.T)
    half = reference(stored["qweight"], stored["qzeros"], stored["scales"], 4, size)
    assert torch.equal(checkpoint.load(f"{DOWN}.weight", CPU, torch.float16), half.T)
    for module in {entry.removesuffix(".weight") for entry in checkpoint.entries if entry.endswith("_proj.weight")}:
        packed = stored_of(tmp_path, module)
        if "qweight" in packed:
            arguments = packed["qweight"], packed["qzeros"], packed["scales"].float()
            model.get_submodule(module).weight.data = reference(
                *arguments, 4, len(packed["qweight"]) // len(packed["scales"])
            ).T
    check_tokens(tmp_path, model)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_gptq(bits: int, is_ordered: bool, tmp_path: Path) -> None:
    """AutoGPTQ packs a weight with its quantised module, which then multiplies by the identity."""
    kind = module_of("auto_gptq", "nn_modules/qlinear/qlinear_cuda.py").QuantLinear
    save_quantised(tmp_path, "gptq-ordered" if is_ordered else "gptq")
    edit_config(tmp_path, bits=bits)
    tensors, rng = load_file(tmp_path / "model.safetensors"), np.random.default_rng(3)
    expected = {}
    for module in {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}:
        rows, columns = tensors[f"{module}.qweight"].shape[1], len(tensors[f"{module}.g_idx"])
        linear = torch.nn.Linear(columns, rows, bias=False)
        quantised = kind(bits, 32, columns, rows, False)
        scales = torch.from_numpy(rng.uniform(0.01, 0.03, (rows, columns // 32))).half().float()
        zeros = torch.from_numpy(rng.integers(1, 2**bits, (rows, columns // 32))).float()
        order = tensors[f"{module}.g_idx"]
        codes = torch.from_numpy(rng.integers(0, 2**bits, (rows, columns))).float()
        linear.weight.data = (codes - zeros[:, order.long()]) * scales[:, order.long()]
        quantised.pack(linear, scales, zeros.clone(), order)
        parts = {"qweight": quantised.qweight, "qzeros": quantised.qzeros, "g_idx": quantised.g_idx}
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        tensors[f"{module}.scales"] = quantised.scales.half().contiguous()
        expected[module] = quantised(torch.eye(columns)).T
        assert torch.equal(expected[module], linear.weight)
    save(tensors, tmp_path)
    checkpoint = open_folder(tmp_path)
    for module, weight in expected.items():
        assert torch.equal(checkpoint.tensor_slice(f"{module}.weight"), weight), module


@pytest.fixture
def gptqmodel() -> type[torch.nn.Module]:
    """GPTQModel's module as far as it packs and unpacks 4 and 8 bits; importing the package needs many others."""
    import transformers

    class Module(torch.nn.Module):
        planar, pack_dtype, pack_dtype_bits = False, torch.int32, 32
        pack_np_math_dtype, pack_np_dtype, enable_wf_unsqueeze = np.uint32, np.int32, True

        def __init__(self, bits: int, columns: int) -> None:
            super().__init__()
            self.bits, self.in_features, self.maxq, self.pack_factor = bits, columns, 2**bits - 1, 32 // bits
            self.dequant_dtype = torch.int16 if bits == 8 else torch.int8

        def _wf_device(self) -> torch.device:
            return CPU

        def qzero_format(self, format: int) -> None:
            """The version of the zero points, which the settings of a folder tell."""

    limits = SimpleNamespace(threadpool_limits=lambda _: nullcontext())
    given = {"t": torch, "np": np, "nn": torch.nn, "math": math, "transformers": transformers, "THREADPOOLCTL": limits}
    given |= {"_ConvNd": torch.nn.modules.conv._ConvNd, "_torch_right_shift": torch.bitwise_right_shift}
    methods = ("pack_original", "dequantize_weight", "_dequantize_from_codes", "_init_wf_unsqueeze_buffers")
    found = functions_of("gptqmodel", "nn_modules/qlinear/__init__.py", methods, given)
    log = SimpleNamespace(info=SimpleNamespace(once=lambda _: None))
    convert = "convert_gptq_v2_to_v1_format_module"
    given = {"torch": torch, "BaseQuantLinear": Module, "log": log}
    found |= functions_of("gptqmodel", "utils/model.py", (convert,), given)
    for name, function in found.items():
        setattr(Module, "to_version_1" if name == convert else name, function)
    return Module


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_gptqmodel(bits: int, stored: str, is_ordered: bool, tmp_path: Path, gptqmodel: Any) -> None:
    """GPTQModel packs, zero points of 0 included, and converts to version 1; expected is what it dequantises."""
    model = save_quantised(tmp_path, "gptq-ordered" if is_ordered else "gptq")
    edit_config(tmp_path, bits=bits, checkpoint_format=stored)
    tensors, rng = load_file(tmp_path / "model.safetensors"), np.random.default_rng(4)
    expected = {}
    for module in {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}:
        rows, columns = tensors[f"{module}.qweight"].shape[1], len(tensors[f"{module}.g_idx"])
        linear, quantised = torch.nn.Linear(columns, rows, bias=False), gptqmodel(bits, columns)
        scales = torch.from_numpy(rng.uniform(0.01, 0.03, (rows, columns // 32))).half().float()
        zeros = torch.from_numpy(rng.integers(0, 2**bits, (rows, columns // 32))).float()
        order = tensors[f"{module}.g_idx"].long()
        codes = torch.from_numpy(rng.integers(0, 2**bits, (rows, columns))).float()
        linear.weight.data = (codes - zeros[:, order]) * scales[:, order]
        quantised.pack_original(linear, scales, zeros, order)
        tensors[f"{module}.scales"] = quantised.scales.contiguous()
        quantised.scales = scales.T
        expected[module] = quantised.dequantize_weight().T
        assert torch.equal(expected[module], linear.weight)
        if stored == "gptq":
            quantised.to_version_1(quantised)
        tensors |= {f"{module}.{part}": getattr(quantised, part).contiguous() for part in ("qweight", "qzeros")}
    save(tensors, tmp_path)
    checkpoint = open_folder(tmp_path)
    for module, weight in expected.items():
        assert torch.equal(checkpoint.tensor_slice(f"{module}.weight"), weight), module
        model.get_submodule(module).weight.data = weight.float()
    check_tokens(tmp_path, model)


def check_tokens(folder: Path, model: Any) -> None:
    """The engine's greedy tokens in fp32 are those of a model of transformers."""
    with Engine.from_pretrained(folder, dtype="fp32", transport="gloo") as engine:
        for length in (7, 40):
            ids = torch.randint(1, SHAPE["vocab_size"], (length,), generator=torch.Generator().manual_seed(length))
            answer = engine.generate(ids.tolist(), max_new_tokens=24, ignore_eos=True)
            assert answer.token_ids == greedy(model, ids.tolist(), 24)  # type: ignore[union-attr]


def test_a_zero_point_of_zero_in_gptq_v1(tmp_path: Path) -> None:
    """GPTQModel subtracts 1 from whole words, also if a zero point is 0, and adds it again."""
    save_quantised(tmp_path, "gptq-v2-ordered")
    expected = open_folder(tmp_path).packed_slice(f"{DOWN}.weight", CPU)
    assert expected.zeros is not None
    assert (expected.zeros == 0).any()
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("qzeros")]:
        tensors[name] -= 0b00010001000100010001000100010001
    save(tensors, tmp_path)
    edit_config(tmp_path, checkpoint_format="gptq")
    found = open_folder(tmp_path).packed_slice(f"{DOWN}.weight", CPU)
    assert found.zeros is not None
    assert torch.equal(found.zeros, expected.zeros)


CT_FORMATS = [name for name, (settings, _) in FORMATS.items() if settings["quant_method"] == "compressed-tensors"]


@pytest.mark.parametrize("name", [name for name in CT_FORMATS if name != "int4-ordered"])  # its order is not read there
def test_compressed_tensors(name: str, tmp_path: Path) -> None:
    """`decompress` of compressed-tensors, with scales in fp32 and in bf16."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    save_quantised(tmp_path, name)
    checkpoint, stored = open_folder(tmp_path), stored_of(tmp_path, DOWN)
    settings = FORMATS[name][0]
    scheme = QuantizationScheme(**settings["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    exact = compressor.decompress(in_fp32(stored), scheme)["weight"]
    assert torch.equal(checkpoint.tensor_slice(f"{DOWN}.weight"), exact)
    if stored["weight_scale"].dtype == torch.bfloat16:
        half = compressor.decompress(stored, scheme)["weight"]
        assert torch.equal(checkpoint.load(f"{DOWN}.weight", CPU, torch.bfloat16), half)


@pytest.mark.parametrize("name", ["fp8-block", "fp8-inverse"])
def test_fp8_blocks(name: str, tmp_path: Path) -> None:
    """The package's converter of `weight_scale_inv`."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer

    save_quantised(tmp_path, name)
    checkpoint, stored = open_folder(tmp_path), stored_of(tmp_path, DOWN)
    scales = stored.get("weight_scale_inv", stored.get("weight_scale"))
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {f"{DOWN}.weight": stored["weight"], f"{DOWN}.weight_scale_inv": scales}
        exact = FP8BlockDequantizer(dtype=dtype).process(tensors)[f"{DOWN}.weight"]
        assert torch.equal(checkpoint.load(f"{DOWN}.weight", CPU, dtype), exact)


SCHEMES: dict[str, dict[str, Any]] = {
    "tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "group": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "zeros": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    "row": {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
}


@pytest.mark.parametrize(
    ("scheme", "has_inputs"), [(name, False) for name in SCHEMES] + [(name, True) for name in ("tensor", "block")]
)
@torch.no_grad()
def test_a_folder_that_compressed_tensors_wrote(scheme: str, has_inputs: bool, tmp_path: Path) -> None:
    """A whole model, quantised, compressed and saved by the package, with a plain layer among those that it ignores."""
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True} if has_inputs else None
    model, compressor = write_compressed(tmp_path, SCHEMES[scheme], inputs)
    compressor.decompress_model(model)
    checkpoint, expected = open_folder(tmp_path), model.state_dict()
    assert len(checkpoint.readers) == 13
    for name in checkpoint.entries:
        assert torch.equal(checkpoint.load(name, CPU, torch.bfloat16), expected[name]), name


def write_compressed(folder: Path, weights: dict[str, Any], inputs: dict[str, Any] | None) -> tuple[Any, Any]:
    """Save a model that the package has compressed; returns it, and what decompresses it."""
    pytest.importorskip("compressed_tensors")
    import transformers
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).bfloat16()
    ignore = ["lm_head", "re:.*layers.0.*up_proj"]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": group}, ignore=ignore))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            _calibrate(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return model, compressor


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_tokens_of_a_folder_that_compressed_tensors_wrote(scheme: str, tmp_path: Path) -> None:
    """Those of the model that the package decompresses in fp32."""
    model, compressor = write_compressed(tmp_path, SCHEMES[scheme], None)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight_scale.data.float()
    compressor.decompress_model(model)
    check_tokens(tmp_path, model.float().eval())


def _calibrate(module: Any) -> None:
    """Scales and zero points from the least and largest weights of each group."""
    from compressed_tensors.quantization.utils import calculate_qparams

    args, weight = module.quantization_scheme.weights, module.weight.float()
    rows, columns = weight.shape
    size = {"tensor": (rows, columns), "channel": (1, columns), "group": (1, args.group_size), "block": (128, 128)}
    height, width = size[args.strategy]
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    groups = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    scales, zeros = calculate_qparams(groups.amin((1, 3)), groups.amax((1, 3)), args)
    module.weight_scale.data = scales.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
    if not args.symmetric:
        module.weight_zero_point.data = zeros.reshape(module.weight_zero_point.shape)


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
