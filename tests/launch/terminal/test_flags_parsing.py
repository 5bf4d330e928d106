"""What all commands share: flags, files, the printed configuration and errors."""

from __future__ import annotations

import argparse
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import yaml
from paths import ROOT

from alspec.config import (
    BenchConfig,
    ChatConfig,
    CommandConfig,
    DoctorConfig,
    EvaluateConfig,
    GenerateConfig,
    LatencyConfig,
)
from alspec.errors import DoesNotFitError, UserError
from alspec.launch import bench_kernels, chat, doctor, evaluate, generate, latency
from alspec.launch.terminal.flags import Parser, check_picture, parse, parse_command
from alspec.launch.terminal.output import exit_code

SCHEMAS: dict[ModuleType, type[CommandConfig]] = {
    generate: GenerateConfig,
    chat: ChatConfig,
    latency: LatencyConfig,
    evaluate: EvaluateConfig,
    doctor: DoctorConfig,
    bench_kernels: BenchConfig,
}
every_command = pytest.mark.parametrize("command", SCHEMAS, ids=lambda command: command.__name__.rsplit(".", 1)[1])


@every_command
def test_printed_configuration_is_complete_and_read_back(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--print-config"]) == 0
    shown, err = capsys.readouterr()
    names = [field.alias or name for name, field in SCHEMAS[command].model_fields.items()]
    assert (list(yaml.safe_load(shown)), err) == (names, "")
    (tmp_path / "config.yaml").write_text(shown, encoding="utf-8")
    assert command.main(["--config", str(tmp_path / "config.yaml"), "--print-config"]) == 0
    assert capsys.readouterr() == (shown, "")


@every_command
def test_unknown_names_are_refused_with_the_nearest_name(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("debgu: true\n")
    assert command.main(["--config", str(path)]) == 2
    expected = f"config: {path}: unknown key 'debgu'; the nearest valid name is 'debug'"
    assert capsys.readouterr() == ("", f"alspec: exit 2: {expected}\n")
    assert command.main(["--debgu"]) == 2
    expected = "flags: unknown flag --debgu; the nearest valid name is --debug"
    assert capsys.readouterr() == ("", f"alspec: exit 2: {expected}\n")


@every_command
def test_debug_shows_where_a_wrong_flag_was_found(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--no-such-flag", "--debug"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("alspec: exit 2: flags: unknown flag --no-such-flag")


def run_with(argv: list[str], found: list[argparse.Namespace]) -> int:
    with exit_code(argv) as outcome:
        found.append(parse_command(Parser(prog="some"), CommandConfig, argv, outcome)[1])
        raise DoesNotFitError("too much")
    return outcome.code


def test_errors_of_a_run_end_with_their_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback is shown if a flag or the file asks for it."""
    (tmp_path / "config.yaml").write_text("debug: true\n")
    line = "alspec: exit 3: too much\n"
    assert run_with([], []) == 3
    assert capsys.readouterr() == ("", line)
    for argv in (["--debug"], ["--config", str(tmp_path / "config.yaml")]):
        assert run_with(argv, []) == 3
        out, err = capsys.readouterr()
        assert (out, err.startswith("Traceback"), err.endswith(line)) == ("", True, True)


def test_command_is_the_one_that_started_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[argparse.Namespace] = []
    run_with([], found)
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    run_with(["--debug"], found)
    monkeypatch.setattr("sys.argv", ["elsewhere/some.py", "--config", "a b"])
    assert [args.command for args in found] == [
        "launch/some.py",
        "torchrun --nnodes 2 --nproc-per-node 2 launch/some.py --debug",
    ]


def test_only_the_first_rank_shows_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for rank, shown in (("0", "debug: false\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        with exit_code(["--print-config"]) as outcome:
            parse_command(Parser(prog="some"), CommandConfig, ["--print-config"], outcome)
            raise AssertionError("the command goes on")
        assert outcome.code == 0
        assert capsys.readouterr() == (shown, "")


def test_lists_in_help_are_written_as_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evaluate.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--thresholds THRESHOLDS lambda values (default: 0,0.05,0.1,0.15,0.2,0.25,inf)" in shown
    assert "of the needle prompts; default: those of 1k,8k that the model has positions for" in shown


@every_command
def test_every_command_is_installed(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    name = command.__name__.removeprefix("alspec.launch.")
    installed = EntryPoint("", scripts[f"alspec-{name.replace('_', '-')}"], "").load()
    monkeypatch.setattr("sys.argv", [name, "--print-config"])
    assert (installed(), capsys.readouterr()) == (command.main(), capsys.readouterr())
    monkeypatch.setattr("sys.argv", [name, "--nothing-like-it"])
    assert installed() == 2


def test_every_bench_can_be_named() -> None:
    names = [value for part in get_args(BenchConfig.model_fields["bench"].annotation) for value in get_args(part)]
    assert set(names) == set(bench_kernels.BENCHES)


def test_the_extension_of_a_picture_may_be_in_capitals(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("plot.PNG", "plot.Svg", "plot.pdf"):
        check_picture("flags: --plot", tmp_path / name)


@pytest.mark.parametrize("value", ["-hello", "---", "-1", "--hello there", "-", "-x=--prompt"])
@pytest.mark.parametrize("joined", [False, True])
def test_a_value_may_begin_with_a_dash(value: str, joined: bool) -> None:
    def words(flag: str) -> list[str]:
        return [f"{flag}={value}"] if joined else [flag, value]

    argv = [*words("--prompt"), *words("--stop"), "--stop", "b", *words("--system"), "--chat", "--json", "-.json"]
    config, _ = parse(Parser(prog="generate"), GenerateConfig, argv)
    assert (config.prompt, config.system, config.stop) == (value, value, (value, "b"))
    assert config.json_file == Path("-.json")


@pytest.mark.parametrize("flag", ["--top-k", "--chat", "-h", "--temprature", "--temperature=1", "--stpo"])
def test_a_flag_is_no_value(flag: str) -> None:
    with pytest.raises(UserError, match="argument --prompt: expected one argument"):
        parse(Parser(prog="generate"), GenerateConfig, ["--prompt", flag, "3"])
