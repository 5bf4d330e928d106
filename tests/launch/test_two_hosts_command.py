"""launch/two_hosts.py: two torchruns, each with GPUs of its own, and how they end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from paths import ROOT

from alspec.launch import two_hosts

GENERATE = str(ROOT / "launch" / "generate.py")


@pytest.mark.parametrize(
    ("flags", "num_gpus", "message"),
    [
        ([], 0, "flags: expected a script and its flags, such as launch/latency.py, found nothing"),
        (["launch/nothing.py"], 0, "flags: expected a script and its flags, such as launch/latency.py, found"),
        (["--nproc-per-node", "0", GENERATE], 0, "flags: --nproc-per-node: expected at least 1, found 0"),
        (["--nproc-per-node", "2", GENERATE], 3, "flags: --nproc-per-node: 2 hosts of 2 ranks need 4 GPUs, found 3;"),
        ([GENERATE], 1, "flags: --nproc-per-node: 2 hosts of 1 ranks need 2 GPUs, found 1; CUDA_VISIBLE_DEVICES= runs"),
        (["--nproc", "1", GENERATE], 0, "flags: unknown flag --nproc; the nearest valid name is --nproc-per-node"),
    ],
)
def test_mistakes(
    flags: list[str], num_gpus: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(subprocess, "Popen", mock.Mock(side_effect=AssertionError))
    assert two_hosts.main(flags) == 2
    assert capsys.readouterr().err.startswith(f"alspec: exit 2: {message}")


@pytest.mark.parametrize(
    ("visible", "ranks", "expected"),
    [(None, [], ["0,1", "2,3"]), ("3,5,6,7", [], ["3,5", "6,7"]), ("3,5,6,7", ["--nproc-per-node", "1"], ["3", "5"])],
)
def test_each_host_sees_its_own_gpus(
    visible: str | None, ranks: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    started = mock.Mock(return_value=mock.Mock(wait=lambda: 0, poll=lambda: 0))
    monkeypatch.setattr(subprocess, "Popen", started)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert two_hosts.main([*ranks, GENERATE, "--model", "x"]) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    variables = [call.kwargs["env"] for call in started.call_args_list]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in variables] == expected
    assert [each["NCCL_HOSTID"] for each in variables] == ["host-0", "host-1"]
    commands = [call.args[0] for call in started.call_args_list]
    assert [command[command.index("--node-rank") + 1] for command in commands] == ["0", "1"]
    assert len({command[command.index("--master-port") + 1] for command in commands}) == 1
    each = str(len(expected[0].split(",")))
    assert all(command[command.index("--nproc-per-node") + 1] == each for command in commands)
    assert all(command[-3:] == [GENERATE, "--model", "x"] for command in commands)


def start(flags: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "launch" / "two_hosts.py"), GENERATE, "--transport", "gloo", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.full
def test_a_pair_of_hosts_writes_the_text_of_simulated(checkpoint: Path, tmp_path: Path) -> None:
    prompt = ["--model", str(checkpoint), "--prompt", "The road was long.", "--max-new-tokens", "12", "--ignore-eos"]

    def run(name: str, flags: list[str], program: list[str]) -> dict[str, Any]:
        out = tmp_path / f"{name}.json"
        command = [sys.executable, *program, GENERATE, "--transport", "gloo", *prompt, "--json", str(out), *flags]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        written: dict[str, Any] = json.loads(out.read_text())
        return written

    one = run("one", ["--speculation", "simulated"], [])
    two = run("two", ["--speculation", "paired"], [str(ROOT / "launch" / "two_hosts.py")])
    assert two["requests"][0]["token_ids"] == one["requests"][0]["token_ids"]
    assert two["summary"]["world_size"] == 2


@pytest.mark.full
def test_a_mistake_in_the_command_ends_both_hosts() -> None:
    process = start(["--promt", "x"])
    _, errors = process.communicate(timeout=90)
    assert process.returncode != 0
    assert errors.count("alspec: exit 2: flags: unknown flag --promt; the nearest valid name is --prompt\n") >= 2


@pytest.mark.full
def test_a_signal_ends_both_hosts(checkpoint: Path) -> None:
    flags = ["--speculation", "paired", "--model", str(checkpoint), "--prompt", "a", "--max-new-tokens", "400"]
    process = start([*flags, "--ignore-eos"])
    assert process.stdout is not None
    process.stdout.read(1)  # the first token
    process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    process.communicate(timeout=60)
    assert time.monotonic() - begun < 30
    assert process.returncode == 128 + signal.SIGTERM
