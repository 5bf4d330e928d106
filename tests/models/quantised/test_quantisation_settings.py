"""`quantization_config`: what is read of it, and each thing that is refused, by its name and with what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from quantised_folders import FORMATS, SHAPE

from alspec.errors import UserError
from alspec.models.checkpoint.quantised.quantisation_config import WeightScheme
from alspec.models.llama_config import LlamaConfig
from alspec.models.matrix_formats import weights_name
from alspec.runtime.engine.choices import choose_mode

AWQ, GPTQ = FORMATS["awq"][0], FORMATS["gptq"][0]
CT_INT4, CT_FP8 = FORMATS["int4-group"][0], FORMATS["fp8-channel"][0]
BLOCK = FORMATS["fp8-inverse"][0]


def config_of(folder: Path, quantisation: Any, **overrides: Any) -> LlamaConfig:
    """A folder that has only a config.json."""
    settings = {"model_type": "llama", **SHAPE, "torch_dtype": "bfloat16", "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(settings | overrides), encoding="utf-8")
    return LlamaConfig.from_folder(folder)


def group(**changes: Any) -> dict[str, Any]:
    """compressed-tensors INT4 with changes in its only group; `weights` changes fields of its weights."""
    content = CT_INT4["config_groups"]["group_0"]
    content = content | changes | {"weights": content["weights"] | changes.get("weights", {})}
    return CT_INT4 | {"config_groups": {"group_0": content}}


NAMES = {
    "fp8-tensor": "fp8 (compressed-tensors, one scale)",
    "fp8-channel": "fp8 (compressed-tensors, a scale for each row)",
    "fp8-block": "fp8 (compressed-tensors, blocks of 128 x 128)",
    "fp8-inverse": "fp8 (blocks of 128 x 128)",
    "fp8-static": "fp8 (one scale)",
    "int4-group": "int4 (compressed-tensors, groups of 32)",
    "int4-channel": "int4 (compressed-tensors, a scale for each row)",
    "int8-group": "int8 (compressed-tensors, groups of 32)",
    "awq": "int4 (awq, groups of 32)",
    "awq-row": "int4 (awq, a scale for each row)",
    "gptq": "int4 (gptq, groups of 32)",
    "gptq-8": "int8 (gptq, groups of 32)",
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, FORMATS[name][0])
    assert weights_name(config, 1, "bf16") == f"{NAMES[name]}, dequantised to bf16"


@pytest.mark.parametrize("quantisation", [None, {}])
def test_no_quantisation(quantisation: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path, quantisation)
    assert config.quantisation is None
    assert weights_name(config, 1, "bf16") == "bf16"


@pytest.mark.parametrize("current", [None, {}])
def test_the_old_key(current: Any, tmp_path: Path) -> None:
    """Old files of compressed-tensors, in which the method may be missing; `quantization_config` goes before it."""
    without_method = {key: value for key, value in CT_INT4.items() if key != "quant_method"}
    for settings in (CT_INT4, without_method):
        config = config_of(tmp_path, current, compression_config=settings)
        assert config.quantisation == config_of(tmp_path, CT_INT4).quantisation
    assert weights_name(config_of(tmp_path, AWQ, compression_config=CT_INT4), 1, "bf16").startswith("int4 (awq")
    assert config_of(tmp_path, current, compression_config={}).quantisation is None
    refused: list[tuple[Any, str]] = [
        ("int4", r": expected an object"),
        (CT_INT4 | {"format": "marlin-24"}, r"\.format: expected float-quantized"),
        (group(weights={"num_bits": "4"}), r"\.config_groups\.group_0\.weights: num_bits"),
        (CT_INT4 | {"ignore": ["re:("]}, ": expected regular expressions"),
    ]
    for settings, message in refused:
        with pytest.raises(UserError, match=f"config.json: compression_config{message}"):
            config_of(tmp_path, current, compression_config=settings)


def test_random_weights_are_not_quantised(tmp_path: Path) -> None:
    config_of(tmp_path, AWQ)
    assert LlamaConfig.from_shape(str(tmp_path)).quantisation is None


METHODS = [
    "bitsandbytes", "hqq", "eetq", "fbgemm_fp8", "quark", "torchao", "modelopt", "mxfp4", "marlin", "exl2",
    "auto-round", "quanto", "aqlm", None, 4,
]  # fmt: skip
# quantization_config, and what the message contains.
REFUSED: list[tuple[Any, list[str]]] = [
    *(({"quant_method": method, "bits": 4}, ["quant_method: expected compressed-tensors, fp8, awq, gptq", repr(method)])
      for method in METHODS),
    ("awq", ["quantization_config: expected an object, found 'awq'"]),
    ({"load_in_4bit": True}, ["quant_method", "found 'bitsandbytes'"]),
    # AWQ
    *((AWQ | {"version": version}, ["version: expected gemm", repr(version)])
      for version in ("gemv", "gemv_fast", "marlin", "exllama", "ipex")),
    (AWQ | {"backend": "llm-awq"}, ["version: expected gemm", "llm-awq"]),
    (AWQ | {"bits": 8}, ["bits: expected 4, found 8"]),
    (AWQ | {"bits": "4"}, ["bits", "'4'"]),
    (AWQ | {"zero_point": False}, ["zero_point: expected true, found False"]),
    (AWQ | {"group_size": 0}, ["group_size: expected an even number, or -1, found 0"]),
    (AWQ | {"group_size": -2}, ["group_size", "-2"]),
    # GPTQ
    *((GPTQ | {"bits": bits}, ["bits: expected 4 or 8", f"found {bits}"]) for bits in (2, 3)),
    ({"quant_method": "gptq"}, ["bits: field required"]),
    *((GPTQ | {"checkpoint_format": stored}, ["checkpoint_format: expected gptq or gptq_v2", repr(stored)])
      for stored in ("marlin", "bitblas", "exllama")),
    (GPTQ | {"is_marlin_format": True}, ["is_marlin_format: expected false, found True"]),
    (GPTQ | {"pack_dtype": "int16"}, ["pack_dtype: expected int32, found 'int16'"]),
    (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, ["dynamic: expected one setting", "+:.*down.*"]),
    (GPTQ | {"group_size": 33}, ["group_size", "33"]),
    # FP8
    (BLOCK | {"fmt": "e5m2"}, ["fmt: expected e4m3, found 'e5m2'"]),
    (BLOCK | {"weight_block_size": [128]}, ["weight_block_size: expected two sizes", "[128]"]),
    (BLOCK | {"weight_block_size": [128, 0]}, ["weight_block_size", "[128, 0]"]),
    # compressed-tensors
    *((group() | {"format": stored}, ["format: expected float-quantized or pack-quantized", repr(stored)])
      for stored in ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "int-quantized", "marlin-24",
                     "sparse-24-bitmask", "dense", "naive-quantized")),
    (group(format="nvfp4-pack-quantized"), ["format: expected float-quantized", "nvfp4"]),
    (group(input_activations={"num_bits": 8, "type": "int"}), ["input_activations: expected none, or FP8", "'int8'"]),
    *((group(weights={"num_bits": bits}), ["weights: expected int4 or int8", f"int{bits}"]) for bits in (2, 3, 6, 16)),
    (group(weights={"num_bits": 4, "type": "float"}), ["weights: expected int4 or int8, found 'float4'"]),
    (group(weights={"strategy": "tensor_group"}), ["strategy: expected channel or group", "tensor_group"]),
    (group(weights={"strategy": "block"}), ["strategy: expected channel or group", "block"]),
    (group(weights={"group_size": None}), ["group_size", "None"]),
    (group(weights={"num_bits": "4"}), ["num_bits", "'4'"]),
    (group() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config.format: expected dense", "24"]),
    (group() | {"transform_config": {"config_groups": {"R1": {}}}}, ["transform_config: expected none"]),
    (group() | {"config_groups": {}}, ["config_groups"]),
    (group() | {"config_groups": {"a": {"targets": ["Linear"]}}}, ["config_groups: expected a group with weights"]),
    (group() | {"config_groups": {"a": {"weights": {}}}}, ["targets: field required"]),
    (group() | {"ignore": ["re:("]}, ["regular expressions", "re:("]),
    (CT_FP8 | {"config_groups": {"a": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}}}}, ["channel or block", "group"]),
    (CT_FP8 | {"config_groups": {"a": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": False}}}}, ["symmetric", "False"]),
    (CT_FP8 | {"config_groups": {"a": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128"}}}}, ["two sizes", "128"]),
]  # fmt: skip


@pytest.mark.parametrize(("quantisation", "needles"), REFUSED)
def test_refused_by_name(quantisation: Any, needles: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        config_of(tmp_path, quantisation)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500
    assert ";" in message  # what to do
    for needle in [str(tmp_path / "config.json"), "quantization_config", *needles]:
        assert needle in message


def test_spellings_of_other_writers(tmp_path: Path) -> None:
    """Older AutoAWQ, GPTQModel's AWQ, blocks as text, a fraction of modules left out by GPTQModel."""
    old = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
    assert weights_name(config_of(tmp_path, old), 1, "bf16").startswith("int4 (awq, groups of 64)")
    new = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "format": "gemm", "sym": False}
    assert weights_name(config_of(tmp_path, new), 1, "bf16").startswith("int4 (awq, groups of 128)")
    arguments = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "64x128"}
    blocks = CT_FP8 | {"config_groups": {"a": {"targets": ["Linear"], "weights": arguments}}}
    assert "blocks of 64 x 128" in weights_name(config_of(tmp_path, blocks), 1, "bf16")
    left_out = GPTQ | {"dynamic": {"-:.*mlp.*": {}}, "meta": {"quantizer": ["gptqmodel:2.0"]}}
    assert weights_name(config_of(tmp_path, left_out), 1, "bf16").startswith("int4 (gptq")


@pytest.mark.parametrize(
    ("name", "settings", "same"),
    [
        ("quantize_config.json", {key: value for key, value in GPTQ.items() if key != "quant_method"}, GPTQ),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}, AWQ),
    ],
)
def test_settings_beside_config_json(name: str, settings: dict[str, Any], same: Any, tmp_path: Path) -> None:
    """As AutoGPTQ and AutoAWQ once wrote them; those in config.json go before them."""
    (tmp_path / name).write_text(json.dumps(settings), encoding="utf-8")
    assert config_of(tmp_path, None).quantisation == config_of(tmp_path, same).quantisation
    assert weights_name(config_of(tmp_path, CT_INT4), 1, "bf16").startswith("int4 (compressed-tensors")
    (tmp_path / name).write_text(json.dumps(settings | {"bits": 3, "w_bit": 3}), encoding="utf-8")
    with pytest.raises(UserError, match=rf"{re.escape(name)}: bits: expected 4.*found 3; give the unquantised"):
        config_of(tmp_path, None)


MODELOPT = {"quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.33"}}


def test_programs_that_name_no_method(tmp_path: Path) -> None:
    for quantisation, found in (
        ({"load_in_8bit": True}, "'bitsandbytes'"),
        ({"bits": 4}, "None"),
        (MODELOPT, "'modelopt'"),
    ):
        with pytest.raises(UserError, match=rf"quantization_config\.quant_method: expected .*, found {found}; give"):
            config_of(tmp_path, quantisation)
    mlx = {"group_size": 64, "bits": 4}
    for quantisation in (None, mlx):
        with pytest.raises(UserError, match=r"quantization: expected none, found 'MLX'; give"):
            config_of(tmp_path, quantisation, quantization=mlx)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}', encoding="utf-8")
    with pytest.raises(UserError, match=r"hf_quant_config\.json: quant_method: expected .*, found 'modelopt'; give"):
        config_of(tmp_path, None)


def scheme(group_size: int) -> WeightScheme:
    return WeightScheme(layout="pack-quantized", bits=4, group_size=group_size)


def test_targets_and_ignore(tmp_path: Path) -> None:
    """A name goes before a regular expression, which goes before `Linear`; `ignore` goes before all."""

    def part(size: int, *targets: str) -> dict[str, Any]:
        return group(targets=list(targets), weights={"group_size": size})["config_groups"]["group_0"]

    groups = {"a": part(32, "Linear"), "b": part(64, "re:.*down_proj"), "c": part(128, "model.layers.0.mlp.down_proj")}
    ignore = ["lm_head", "re:.*layers.1.self_attn.*", "model.layers.0.mlp.up_proj"]
    config = config_of(tmp_path, CT_INT4 | {"config_groups": groups, "ignore": ignore})
    found = config.quantisation
    assert found is not None
    expected: dict[str, int | None] = {
        "lm_head": None,
        "model.layers.1.self_attn.q_proj": None,
        "model.layers.0.self_attn.q_proj": 32,
        "model.layers.0.mlp.up_proj": None,
        "model.layers.10.mlp.up_proj": 32,
        "model.layers.1.mlp.down_proj": 64,
        "model.layers.0.mlp.down_proj": 128,
    }
    for module, size in expected.items():
        assert found.scheme_of(module) == (None if size is None else scheme(size)), module
    assert found.name == " and ".join(f"int4 (compressed-tensors, groups of {size})" for size in (32, 64, 128))


def test_only_modules_split_by_input_channels_limit_the_ranks(tmp_path: Path) -> None:
    """Ranks hold whole rows of q, k, v, gate and up: their groups may have any size."""

    def part(size: int, *targets: str) -> dict[str, Any]:
        return group(targets=list(targets), weights={"group_size": size})["config_groups"]["group_0"]

    groups = {"a": part(512, "Linear"), "b": part(32, "re:.*o_proj", "re:.*down_proj")}
    assert config_of(tmp_path, CT_INT4 | {"config_groups": groups}).valid_tp_sizes == (1, 2, 4, 8, 16)
    groups["b"] = part(32, "re:.*o_proj")
    config = config_of(tmp_path, CT_INT4 | {"config_groups": groups})
    assert config.valid_tp_sizes == (1,)
    with pytest.raises(UserError, match=r"must divide intermediate_size \(512\) into multiples of 512"):
        config.check_tp_size(2)


def test_formats_of_groups(tmp_path: Path) -> None:
    """`mixed-precision`: each group has its own format."""
    packed = group(format="pack-quantized", targets=["re:.*mlp.*"])["config_groups"]["group_0"]
    floats = CT_FP8["config_groups"]["group_0"] | {"format": "float-quantized"}
    groups = {"group_0": packed, "group_1": floats}
    config = config_of(tmp_path, CT_INT4 | {"format": "mixed-precision", "config_groups": groups})
    found = config.quantisation
    assert found is not None
    layouts = [found.scheme_of(f"model.layers.0.{name}") for name in ("mlp.up_proj", "self_attn.q_proj")]
    assert [each.layout for each in layouts if each is not None] == ["pack-quantized", "fp8"]


@pytest.mark.parametrize(
    ("name", "overrides", "valid", "why"),
    [
        ("awq", {}, (1, 2, 4, 8, 16), None),
        ("fp8-block", {}, (1, 2, 4), "8 ranks must divide heads x head_dim (512) into multiples of 128"),
        ("fp8-channel", {}, (1, 2, 4, 8, 16), None),
        ("int4-group", {"intermediate_size": 672}, (1,), "2 ranks must divide intermediate_size (672) into multiples"),
        ("int4-channel", {"intermediate_size": 672}, (1, 2, 4, 8, 16), None),
        ("gptq", {"intermediate_size": 672}, (1,), "groups of int4 (gptq, groups of 32) need; valid sizes"),
        ("gptq-ordered", {"intermediate_size": 672}, (1, 2, 4, 8, 16), None),
        ("gptq-row", {"intermediate_size": 656}, (1, 2, 4, 8), "16 ranks must divide intermediate_size (656)"),
    ],
)
def test_ranks_that_share_whole_groups(
    name: str, overrides: dict[str, Any], valid: tuple[int, ...], why: str | None, tmp_path: Path
) -> None:
    config = config_of(tmp_path, FORMATS[name][0], **overrides)
    assert config.valid_tp_sizes == valid
    for size in valid:
        config.check_tp_size(size)
    if why is None:
        return
    size = int(why.split()[0]) if why[0].isdigit() else 2
    with pytest.raises(UserError, match="tensor parallelism") as caught:
        config.check_tp_size(size)
    with pytest.raises(UserError, match="tensor parallelism"):
        choose_mode("auto", config, size)  # not a pair, whose A~ changes the text
    assert why in str(caught.value)
    assert str(caught.value).endswith(f"valid sizes of one group: {', '.join(map(str, valid))}")


def test_sizes_that_heads_do_not_have(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must divide num_attention_heads \(16\)"):
        config_of(tmp_path, AWQ).check_tp_size(3)
