"""The configuration schema: one line for each mistake, YAML as data, flags over file over defaults."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel, ValidationError

from alspec.config import (
    BenchConfig,
    DoctorConfig,
    EngineConfig,
    EvaluateConfig,
    GenerateConfig,
    LatencyConfig,
    SamplingConfig,
    SpeculationConfig,
    validate,
)
from alspec.errors import UserError
from alspec.launch.terminal.flags import Parser, parse, print_config
from alspec.yaml_file import load_yaml


def refused(values: dict[str, Any], schema: type[BaseModel] = GenerateConfig) -> str:
    """The one line that refuses `values`."""
    with pytest.raises(UserError) as caught:
        validate(schema, values, "source")
    message = str(caught.value)
    assert message.startswith("source: ")
    assert "\n" not in message
    return message


def fields(schema: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, field in schema.model_fields.items():
        yield (*path, name), field
        if isinstance(field.default, BaseModel):
            yield from fields(type(field.default), (*path, name))


COMMANDS = (GenerateConfig, LatencyConfig, EvaluateConfig, DoctorConfig, BenchConfig)


@pytest.mark.parametrize("schema", COMMANDS)
def test_every_field_has_a_description_and_a_default(schema: type[BaseModel]) -> None:
    for path, field in fields(schema):
        assert field.description, path
        assert len(field.description) > 5, path
        assert not field.is_required(), path


@pytest.mark.parametrize("schema", COMMANDS)
def test_written_defaults_are_accepted(schema: type[BaseModel]) -> None:
    assert validate(schema, schema().model_dump(by_alias=True), "source") == schema()


def test_defaults_are_valid() -> None:
    config = validate(GenerateConfig, {}, "source")
    assert config == GenerateConfig()
    assert config.speculation == SpeculationConfig(mode="auto", threshold=0.10, chunk_size=128)
    assert (config.max_new_tokens, config.temperature, config.kv_cache) == (128, 0.0, "bf16")


@pytest.mark.parametrize(
    ("values", "unknown", "nearest"),
    [
        ({"promt": "x"}, "promt", "prompt"),
        ({"temprature": 1}, "temprature", "temperature"),
        ({"max-new-tokens": 1}, "max-new-tokens", "max_new_tokens"),
        ({"json_fil": "x"}, "json_fil", "json"),
        ({"speculation": {"treshold": 1}}, "speculation.treshold", "threshold"),
        ({"speculation": {"chunk": 128}}, "speculation.chunk", "chunk_size"),
        ({"speculation": {"prompt": "x"}}, "speculation.prompt", None),
        ({"zzz": 1}, "zzz", None),
        ({"threshold": 1}, "threshold", "speculation.threshold"),
        ({"chunksize": 128}, "chunksize", "speculation.chunk_size"),
        ({"mode": "off"}, "mode", "speculation.mode"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(values: dict[str, Any], unknown: str, nearest: str | None) -> None:
    message = refused(values)
    assert f"unknown key {unknown!r}" in message
    hint = "see --help" if nearest is None else f"the nearest valid name is {nearest!r}"
    assert message.endswith(f"unknown key {unknown!r}; {hint}")


@pytest.mark.parametrize("schema", [GenerateConfig, LatencyConfig, DoctorConfig])
def test_a_file_uses_the_name_of_the_flag(schema: type[BaseModel]) -> None:
    """The name of the field is an unknown key."""
    message = refused({"json_file": "out.json"}, schema)
    assert message == "source: unknown key 'json_file'; the nearest valid name is 'json'"


def test_an_unknown_option_from_python_lists_the_valid_ones() -> None:
    """Python has no --help. `prompt` is a key of commands only."""
    expected = f"valid names: {', '.join(SamplingConfig.model_fields)}"
    assert refused({"prompt": "x"}, SamplingConfig) == f"source: unknown key 'prompt'; {expected}"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"model": 3}, "model"),
        ({"random_weights": ["x"]}, "random_weights"),
        ({"speculation": "pared"}, "speculation.mode"),
        ({"speculation": {"mode": "pared"}}, "speculation.mode"),
        ({"speculation": {"mode": None}}, "speculation.mode"),
        ({"speculation": {"threshold": -0.01}}, "speculation.threshold"),
        ({"speculation": {"threshold": math.nan}}, "speculation.threshold"),
        ({"speculation": {"threshold": "high"}}, "speculation.threshold"),
        ({"speculation": {"chunk_size": 64}}, "speculation.chunk_size"),
        ({"speculation": {"chunk_size": "129"}}, "speculation.chunk_size"),
        ({"speculation": {"chunk_size": None}}, "speculation.chunk_size"),
        (
            {"speculation": {"chunk_size": [128]}},
            "speculation.chunk_size: expected one of 128, 256, 512, 1024, found [128]",
        ),
        ({"speculation": {"chunk_size": {"a": 1}}}, "speculation.chunk_size"),
        ({"speculation": {"chunk_size": True}}, "speculation.chunk_size"),
        ({"speculation": {"threshold": True}}, "speculation.threshold: expected a number, found True"),
        ({"kv_cache": "int8"}, "kv_cache"),
        ({"softmax": "fast"}, "softmax"),
        ({"transport": "mpi"}, "transport"),
        ({"cuda_graph": True}, "cuda_graph"),
        ({"dtype": "float64"}, "dtype"),
        ({"max_context": 0}, "max_context"),
        ({"max_context": 1.5}, "max_context"),
        ({"max_context": True}, "max_context: expected a number, found True"),
        ({"max_context": 2**63}, "max_context: expected less than"),
        ({"verify_checksums": "maybe"}, "verify_checksums"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": "ten"}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens: expected a number, found True"),
        ({"max_new_tokens": "9" * 4300}, "max_new_tokens: expected less than"),
        ({"temperature": False}, "temperature: expected a number, found False"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"ignore_eos": "perhaps"}, "ignore_eos"),
        ({"prompt": 3}, "prompt"),
        ({"prompt_file": 3}, "prompt_file"),
        ({"prompt_ids": "1,x"}, "prompt_ids"),
        ({"prompt_ids": "1,,2"}, "prompt_ids"),
        ({"prompt_ids": "1,\u00b2"}, "prompt_ids: expected token ids"),
        ({"prompt_ids": "-1"}, "prompt_ids"),
        ({"prompt_ids": [1.5]}, "prompt_ids"),
        ({"prompt_ids": [True]}, "prompt_ids: expected a number, found True"),
        ({"prompt_ids": "1," + "9" * 5000}, "prompt_ids: expected a smaller integer, found '999"),
        ({"chat": 2}, "chat"),
        ({"system": 3, "chat": True}, "system"),
        ({"json": 3}, "json"),
        ({"trace": 3}, "trace"),
        ({"color": "red"}, "color"),
        ({"debug": "very"}, "debug"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_value_names_the_field(values: dict[str, Any], field: str) -> None:
    message = refused(values)
    assert message.startswith(f"source: {field}"), message


@pytest.mark.parametrize("sign", [1, -1])
def test_an_integer_that_python_does_not_print_is_refused(sign: int) -> None:
    """It has too many digits. The message leaves out the found value only."""
    number = sign * 10**5000
    for path, field in (*fields(EngineConfig), *fields(SamplingConfig)):
        if isinstance(field.default, BaseModel):
            continue
        message = refused({path[0]: number if len(path) == 1 else {path[1]: number}})
        assert message.startswith(f"source: {'.'.join(path)}: "), message
        assert message.endswith(", found an integer too long to show"), message
        assert "4300" not in message
    assert refused({"stop": [number]}) == "source: stop: expected a text, found an integer too long to show"
    message = refused({"max_new_tokens": number}, SamplingConfig)
    assert message.startswith("source: max_new_tokens: expected ")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"speculation": {"threshold": 0.0}}, {"speculation": SpeculationConfig(threshold=0.0)}),
        ({"speculation": {"threshold": "inf"}}, {"speculation": SpeculationConfig(threshold=math.inf)}),
        ({"speculation": {"chunk_size": 512}}, {"speculation": SpeculationConfig(chunk_size=512)}),
        ({"speculation": {"chunk_size": "256"}}, {"speculation": SpeculationConfig(chunk_size=256)}),
        ({"max_context": 1}, {"max_context": 1}),
        ({"max_new_tokens": "1"}, {"max_new_tokens": 1}),
        ({"temperature": "0"}, {"temperature": 0.0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_p": "1"}, {"top_p": 1.0}),
        ({"top_p": 1e-6}, {"top_p": 1e-6}),
        ({"seed": 0}, {"seed": 0}),
        ({"seed": str(2**63 - 1)}, {"seed": 2**63 - 1}),
        ({"prompt_ids": "1, 2,3"}, {"prompt_ids": (1, 2, 3)}),
        ({"prompt_ids": [1, 2, 3]}, {"prompt_ids": (1, 2, 3)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": None, "stop_ids": None, "logit_bias": None}, {"stop": (), "stop_ids": None, "logit_bias": {}}),
        ({"json": "out.json"}, {"json_file": Path("out.json")}),
    ],
    ids=str,
)
def test_bounds_are_valid_values(values: dict[str, Any], expected: dict[str, Any]) -> None:
    config = validate(GenerateConfig, values, "source")
    left = {name: value for name, value in vars(config).items() if value != getattr(GenerateConfig(), name)}
    default = {name: value for name, value in expected.items() if value == getattr(GenerateConfig(), name)}
    assert left | default == expected


@pytest.mark.parametrize(
    ("schema", "values", "expected"),
    [
        (LatencyConfig, {"contexts": "1k, 4096,8K"}, (1024, 4096, 8192)),
        (LatencyConfig, {"contexts": 64}, (64,)),
        (LatencyConfig, {"contexts": ["2k", 2]}, (2048, 2)),
        (LatencyConfig, {"contexts": None}, None),
        (LatencyConfig, {"modes": "off,paired,off"}, ("off", "paired", "off")),
        (LatencyConfig, {"hit_rates": "real, 0.5,1"}, ("real", 0.5, 1.0)),
        (LatencyConfig, {"hit_rates": [0, "real"]}, (0.0, "real")),
        (LatencyConfig, {"hit_rates": 0.875}, (0.875,)),
        (EvaluateConfig, {"thresholds": "0,1e-1,inf"}, (0.0, 0.1, math.inf)),
        (EvaluateConfig, {"thresholds": [0.2, "inf", math.inf]}, (0.2, math.inf, math.inf)),
        (EvaluateConfig, {"depths": "0,1"}, (0.0, 1.0)),
        (EvaluateConfig, {"codecs": "int8"}, ("int8",)),
        (EvaluateConfig, {"low_heads": "0,3"}, (0, 3)),
        (EvaluateConfig, {"block_sizes": "32,128"}, (32, 128)),
    ],
    ids=str,
)
def test_lists_are_read(schema: type[BaseModel], values: dict[str, Any], expected: object) -> None:
    """In the form of a flag, in the form of YAML, and one value alone."""
    found = getattr(validate(schema, values, "source"), next(iter(values)))
    assert found == expected
    assert [type(item) for item in found or ()] == [type(item) for item in expected or ()]


@pytest.mark.parametrize(
    ("schema", "values", "message"),
    [
        (LatencyConfig, {"contexts": "1k,x"}, "contexts: expected lengths such as 1k,8k or 4096, found 'x'"),
        (LatencyConfig, {"contexts": ""}, "contexts: expected lengths such as 1k,8k or 4096, found ''"),
        (LatencyConfig, {"contexts": [64, 1]}, "contexts: expected lengths such as 1k,8k or 4096, found 1"),
        (LatencyConfig, {"contexts": 1.5}, "contexts: expected lengths such as 1k,8k or 4096, found '1.5'"),
        (LatencyConfig, {"contexts": [True]}, "contexts: expected lengths such as 1k,8k or 4096, found True"),
        (LatencyConfig, {"contexts": "9" * 4299 + "k"}, "contexts: expected lengths such as 1k,8k or 4096, found '999"),
        (LatencyConfig, {"contexts": []}, "contexts: expected at least one value, found []"),
        (LatencyConfig, {"contexts": {"a": 1}}, "contexts: expected a list, found {'a': 1}"),
        (LatencyConfig, {"modes": "simulated"}, "modes: expected off or paired, found 'simulated'"),
        (
            LatencyConfig,
            {"hit_rates": "real,nan"},
            "hit_rates: expected real, numbers from 0 to 1, or a file of rows that evaluate wrote, found 'nan'",
        ),
        (
            LatencyConfig,
            {"hit_rates": [None]},
            "hit_rates: expected real, numbers from 0 to 1, or a file of rows that evaluate wrote, found None",
        ),
        (
            LatencyConfig,
            {"hit_rates": [10**400]},
            "hit_rates: expected real, numbers from 0 to 1, or a file of rows that evaluate wrote, found 1000",
        ),
        (
            LatencyConfig,
            {"hit_rates": [True]},
            "hit_rates: expected real, numbers from 0 to 1, or a file of rows that evaluate wrote, found True",
        ),
        (LatencyConfig, {"steps": True}, "steps: expected a number, found True"),
        (EvaluateConfig, {"depths": [True]}, "depths: expected a number, found True"),
        (EvaluateConfig, {"low_heads": [True]}, "low_heads: expected a number, found True"),
        (EvaluateConfig, {"thresholds": "0,nan"}, "thresholds: expected 0 or more, found 'nan'"),
        (EvaluateConfig, {"thresholds": "low"}, "thresholds: expected a number, found 'low'"),
        (EvaluateConfig, {"low_heads": "-1"}, "low_heads: expected 0 or more, found '-1'"),
        (EvaluateConfig, {"windows": -1}, "windows: expected 0 or more, found -1"),
        (
            BenchConfig,
            {"bench": "fast"},
            "bench: expected allreduce, decode, linear, prefill, prompt, ready, recall, shapes, turbo",
        ),
        (DoctorConfig, {"deadline": "inf"}, "deadline: expected a finite number, found 'inf'"),
        (DoctorConfig, {"deadline": "1e10"}, "deadline: expected 86400 or less, found '1e10'"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_values_of_other_commands_are_refused(
    schema: type[BaseModel], values: dict[str, Any], message: str
) -> None:
    assert refused(values, schema).startswith(f"source: {message}")


@pytest.mark.parametrize("schema", COMMANDS)
def test_impossible_paths_are_refused(schema: type[BaseModel]) -> None:
    names = [field.alias or name for name, field in schema.model_fields.items() if "Path" in str(field.annotation)]
    assert names
    for name in names:
        for value in ("a\0b", "\ud800", "a\udc7f", Path("a\0b")):
            assert refused({name: value}, schema) == f"source: {name}: expected a path, found {value!r}"
        # Python reads the byte FF of a file's name as this.
        found = validate(schema, {name: "\udcff"}, "source")
        assert getattr(found, name.replace("json", "json_file")) in (Path("\udcff"), (Path("\udcff"),))


def test_true_is_no_number() -> None:
    """In no field of any command except switches."""
    for schema in (SpeculationConfig, *COMMANDS):
        for name, field in schema.model_fields.items():
            for value in (True, [True]):
                if field.annotation is not bool:
                    refused({field.alias or name: value}, schema)


def test_json_writes_infinity_as_text() -> None:
    config = EvaluateConfig(thresholds=(0.5, math.inf), speculation=SpeculationConfig(threshold=math.inf))
    shown = json.loads(json.dumps(config.model_dump(mode="json", by_alias=True), allow_nan=False))
    assert (shown["thresholds"], shown["speculation"]["threshold"]) == ([0.5, "inf"], "inf")
    assert validate(EvaluateConfig, shown, "source") == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": "folder", "random_weights": "llama-3.1-8b"}, ("model", "random_weights")),
        ({"verify_checksums": True, "random_weights": "llama-3.1-8b"}, ("verify_checksums", "random_weights")),
        ({"prompt": "a", "prompt_file": "b"}, ("prompt and prompt_file",)),
        ({"prompt": "a", "prompt_ids": "1"}, ("prompt and prompt_ids",)),
        ({"prompt_file": "b", "prompt_ids": "1"}, ("prompt_file and prompt_ids",)),
        ({"prompt": "a", "prompt_file": "b", "prompt_ids": "1"}, ("prompt and prompt_file and prompt_ids",)),
        ({"system": "s", "prompt": "a"}, ("system", "chat")),
        ({"chat": True, "prompt_ids": "1"}, ("chat", "prompt_ids")),
    ],
)
def test_inconsistent_fields_are_refused(values: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refused(values)
    assert all(word in message for word in words)


def test_configuration_is_frozen() -> None:
    for schema in (SpeculationConfig, EngineConfig, SamplingConfig, *COMMANDS):
        with pytest.raises(ValidationError):
            schema().__setattr__(next(iter(schema.model_fields)), None)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text",
    [
        "model: !!python/object/apply:os.system ['touch {marker}']",
        "model: !!python/object/new:os.system ['touch {marker}']",
        "model: !!python/name:os.system",
        "model: !!python/module:os",
        "!!python/object/apply:subprocess.run [['touch', '{marker}']]",
    ],
)
def test_python_tags_are_refused(text: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = write(tmp_path / "config.yaml", text.replace("{marker}", str(marker)))
    with pytest.raises(UserError, match="is not YAML") as caught:
        load_yaml(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"model: [unclosed", ("is not YAML",)),
        (b"- a\n- b\n", ("expected a mapping", "list")),
        (b"just text", ("expected a mapping", "str")),
        (b"model: \xff\xfe", ("is not YAML",)),
        (b"seed: 2026-13-01", ("is not YAML", "month must be in 1..12")),
        (b"seed: !!timestamp today", ("is not YAML",)),
        (b"seed: " + b"9" * 5000, ("is not YAML", "expected a smaller integer", "seed: 99")),
        (b"a: 1\nseed: 0x" + b"1" * 5000, ("is not YAML", "expected a smaller integer", "line 2", "seed: 0x11")),
        (b"speculation:\n  threshold: 0o" + b"1" * 20_000, ("expected a smaller integer", "line 2", "threshold: 0o11")),
        (b"prompt_ids: [1, 0x" + b"f" * 1000 + b"]", ("expected a smaller integer", "line 1")),
        (b"stop: " + b"[" * 5000 + b"]" * 5000, ("is not YAML", "nested too deeply")),
        (b"temperature: " + b":".join([b"1"] * 400) + b".0", ("is not YAML", "too large")),
        (b"seed: !!int 1_0", ("is not YAML", "expected an integer, found '1_0'", "line 1")),
        (b"chat: !!bool maybe", ("is not YAML", "'maybe'")),
        (b"prompt: x\nseed: 1\n'prompt': y", ("is not YAML", "duplicate key 'prompt'", "line 3")),
        (b"speculation: {mode: off, mode: paired}", ("duplicate key 'mode'", "line 1")),
    ],
    ids=range(16),
)
def test_broken_yaml_is_refused(content: bytes, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_yaml(path)
    assert all(word in str(caught.value) for word in (*words, str(path)))
    assert "\n" not in str(caught.value)


def test_merged_keys_are_no_duplicates(tmp_path: Path) -> None:
    """A mapping may override keys of `<<`, and other mappings may merge it again, at any depth."""
    text = "a: &a {x: 1}\nlist: [[&b {<<: *a, x: 2}]]\nb: {<<: *b, y: 3}\nlong: " + "9" * 1000
    found = load_yaml(write(tmp_path / "config.yaml", text))
    assert (found["list"], found["b"], found["long"]) == ([[{"x": 2}]], {"x": 2, "y": 3}, 10**1000 - 1)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UserError, match="cannot read") as caught:
            load_yaml(path)
        assert str(path) in str(caught.value)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load_yaml(write(tmp_path / "config.yaml", "# nothing\n")) == {}


def parse_generate(*argv: str) -> GenerateConfig:
    config, _ = parse(Parser(prog="generate"), GenerateConfig, list(argv))
    return config


@pytest.mark.parametrize(
    "config",
    [
        GenerateConfig(),
        GenerateConfig(
            model=Path("some/folder"),
            speculation=SpeculationConfig(mode="paired", threshold=math.inf, chunk_size=512),
            dtype="fp32",
            max_context=9,
            max_new_tokens=3,
            temperature=0.25,
            top_p=1e-5,
            seed=2**63 - 1,
            logit_bias={50: -100.0, 7: 0.5},
            stop_ids=(2, 13),
            logprobs=0,
            stop=("\n\n", "yes", "1e3", "- x", "08", "0o17", "1:30", "0b1"),
            ignore_eos=True,
            prompt="null: '\xe4' \t\n\"b\"",
            json=Path("out.json"),
            trace=Path("trace.json"),
            color=True,
        ),
        GenerateConfig(random_weights="llama-3.1-8b", prompt_ids=(1, 2, 3)),
        GenerateConfig(prompt_file=Path("x.jsonl"), chat=True, system="be brief", verify_checksums=True),
    ],
    ids=["default", "text", "ids", "chat"],
)
def test_a_printed_configuration_is_read_back(
    config: GenerateConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_config(config)
    printed = capsys.readouterr().out
    assert list(yaml.safe_load(printed)) == [field.alias or name for name, field in GenerateConfig.model_fields.items()]
    assert parse_generate("--config", str(write(tmp_path / "config.yaml", printed))) == config


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path: Path) -> None:
    path = write(
        tmp_path / "config.yaml",
        "max_new_tokens: 5\ntemperature: 0.5\nstop: [a]\nspeculation: {threshold: 0.2, chunk_size: 256}\n",
    )
    config = parse_generate("--config", str(path), "--max-new-tokens", "7", "--threshold", "inf", "--stop", "b")
    assert config.max_new_tokens == 7
    assert config.temperature == 0.5
    assert config.stop == ("b",)
    assert config.speculation == SpeculationConfig(threshold=math.inf, chunk_size=256)
    assert config.top_k == GenerateConfig().top_k


def test_every_field_has_a_flag() -> None:
    argv = {
        "model": "dir",
        "speculation": "simulated",
        "threshold": "0.2",
        "chunk": "512",
        "draft": "self",
        "draft-tokens": "7",
        "draft-weights": "fp8",
        "kv-cache": "turbo4",
        "kv-protect": "2",
        "softmax": "sas",
        "transport": "gloo",
        "pair-transport": "nccl",
        "cuda-graph": "off",
        "dtype": "fp16",
        "max-context": "77",
        "max-new-tokens": "5",
        "temperature": "0.5",
        "weights": "int4",
        "lm-head": "fp8",
        "top-k": "3",
        "top-p": "0.5",
        "min-p": "0.1",
        "repetition-penalty": "1.2",
        "frequency-penalty": "-0.5",
        "presence-penalty": "2",
        "logit-bias": "50=-100,17=2.5",
        "seed": "4",
        "stop": "end",
        "stop-ids": "2,13",
        "answers": "3",
        "logprobs": "5",
        "prompt": "text",
        "json": "out",
        "trace": "trace",
        "system": "brief",
    }
    switches = ("draft-always", "verify-checksums", "ignore-eos", "chat", "color", "debug")
    flags = [f"--{name}={value}" for name, value in argv.items()] + [f"--{name}" for name in switches]
    config = parse_generate(*flags)
    default = GenerateConfig()
    left = {name for name in GenerateConfig.model_fields if getattr(config, name) == getattr(default, name)}
    assert left == {"random_weights", "prompt_file", "prompt_ids"}
    assert config.speculation == SpeculationConfig(mode="simulated", threshold=0.2, chunk_size=512)
    assert parse_generate("--random-weights=llama-3.2-1b", "--prompt-ids=3").prompt_ids == (3,)
    assert parse_generate("--prompt-file=f").prompt_file == Path("f")


@pytest.mark.parametrize("mode", ["off", "paired", "simulated"])
def test_speculation_may_be_given_as_its_mode(mode: str, tmp_path: Path) -> None:
    """In a file and from Python. Flags are added to it."""
    path = write(tmp_path / "config.yaml", f"speculation: {mode}\n")
    assert parse_generate("--config", str(path)).speculation == SpeculationConfig(mode=mode)
    both = parse_generate("--config", str(path), "--threshold", "0.2").speculation
    assert both == SpeculationConfig(mode=mode, threshold=0.2)
    assert validate(EngineConfig, {"speculation": mode}, "source").speculation == SpeculationConfig(mode=mode)


@pytest.mark.parametrize(
    ("spelt", "expected"),
    [
        *(("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), ("bf16", "bf16"), (None, None)),
        *((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")),
    ],
    ids=str,
)
def test_dtype_has_several_spellings(spelt: Any, expected: str | None) -> None:
    assert validate(EngineConfig, {"dtype": spelt}, "source").dtype == expected
    assert refused({"dtype": torch.int8}).startswith("source: dtype: ")
    if isinstance(spelt, str):
        assert parse_generate("--dtype", spelt).dtype == expected


def test_off_and_on_in_a_file_are_text_unless_the_field_is_a_switch(tmp_path: Path) -> None:
    """A switch takes every spelling of true and false."""
    text = "speculation: {mode: off}\ncuda_graph: on\nchat: on\ncolor: true\ndebug: off\nsystem: yes\nprompt: trueish\n"
    config = parse_generate("--config", str(write(tmp_path / "config.yaml", text)))
    assert (config.speculation.mode, config.cuda_graph) == ("off", "on")
    assert (config.chat, config.color, config.debug) == (True, True, False)
    assert (config.system, config.prompt) == ("yes", "trueish")
    assert load_yaml(write(tmp_path / "config.yaml", "a: [true, FALSE, no]")) == {"a": [True, False, "no"]}
    assert yaml.safe_load("off") is False, "other readers of YAML do not change"


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", 10), ("-7", -7), ("+3", 3), ("0o17", 15), ("0x1f", 31), ("1:30", "1:30"), ("1_0", "1_0")],
)
def test_a_file_has_integers_of_yaml_1_2(text: str, value: int, tmp_path: Path) -> None:
    assert load_yaml(write(tmp_path / "config.yaml", f"seed: {text}")) == {"seed": value}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("promt: x", ("unknown key 'promt'", "'prompt'")),
        ("speculation: {treshold: 1}", ("unknown key 'speculation.treshold'", "'threshold'")),
        ("top_p: 3", ("top_p", "found 3")),
        ("speculation: pared", ("speculation.mode: expected auto, off, paired or simulated, found 'pared'",)),
        ("speculation: [paired]", ("speculation: expected a mapping of names, found ['paired']",)),
        ("max_context: 8m", ("max_context: expected a number of tokens such as 4096 or 128k, found '8m'",)),
        ("chat: 2", ("chat: expected true or false, found 2",)),
        ("1: 2", ("1",)),
    ],
)
def test_a_wrong_file_is_named(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", text)
    with pytest.raises(UserError) as caught:
        parse_generate("--config", str(path), "--top-p", "0.5", "--speculation", "off")
    message = str(caught.value)
    assert message.startswith(f"config: {path}: ")
    assert all(word in message for word in words)


def test_short_forms_are_accepted() -> None:
    assert validate(EngineConfig, {"max_context": "128k"}, "here").max_context == 131072
    assert parse_generate("--max-context", "8K").max_context == 8192
    assert validate(SamplingConfig, {"stop": "day"}, "here").stop == ("day",)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((), ("a", None, None)),
        (("--prompt", "b"), ("b", None, None)),
        (("--prompt-ids", "1,2"), (None, None, (1, 2))),
        (("--prompt-file", "F"), (None, Path("F"), None)),
    ],
)
def test_a_prompt_flag_replaces_the_prompt_of_the_file(
    flags: tuple[str, ...], found: tuple[object, ...], tmp_path: Path
) -> None:
    path = write(tmp_path / "config.yaml", "prompt: a\nseed: 3")
    config = parse_generate("--config", str(path), *flags)
    assert (config.prompt, config.prompt_file, config.prompt_ids) == found
    assert config.seed == 3
    with pytest.raises(UserError, match="prompt and prompt_ids exclude each other"):
        parse_generate("--prompt", "a", "--prompt-ids", "1")


def test_help_shows_every_description(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="generate")
    with pytest.raises(SystemExit) as caught:
        parse(parser, GenerateConfig, ["--help"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for _, field in fields(GenerateConfig):
        if not isinstance(field.default, BaseModel):
            assert " ".join(field.description.split()) in shown
    for text in ("0: greedy (default: 0.0)", "0: all (default: 0)", "token's position (default: 0)"):
        assert text in shown
    assert not any(text in shown for text in ("(default: None)", "(default: ())", "(default: False)"))
