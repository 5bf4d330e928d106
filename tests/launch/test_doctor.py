"""The installation check: it finds faults, names them on one line with advice, and always ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT, WORKERS

from alspec.kernels.linear.decode_weight import WeightFormat
from alspec.launch import doctor
from alspec.models.demo import DEMO_CHECKPOINT
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.doctor import diagnostics
from alspec.runtime.doctor.checkup import CHECKS, Check, Scope

DOCTOR = ROOT / "launch" / "doctor.py"
WORKER = WORKERS / "doctor_worker.py"
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ON_CPU = ["versions", "memory rate", "demo checkpoint"]
ON_GPU = ["GPUs", "Triton", "quantised weights", "CUDA graph", "dependent launch", "pinned memory"]

Examine = Callable[..., tuple[int, dict[str, tuple[str, str]], str]]


def lines_of(stdout: str) -> dict[str, tuple[str, str]]:
    """Name -> status and text of every line; stdout has no other lines."""
    found = {}
    for line in stdout.splitlines():
        match = re.fullmatch(r"(\S.*?)  +(pass|fail|skip)  (\S.*)", line)
        assert match is not None, line
        found[match[1]] = (match[2], match[3])
    return found


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment variables that the command sets are restored."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str]) -> Examine:
    """`examine("--flag", ...)`: run the command in this process; returns exit code, lines by name, and stderr."""

    def call(*flags: object) -> tuple[int, dict[str, tuple[str, str]], str]:
        capsys.readouterr()
        code = doctor.main([str(flag) for flag in flags])
        captured = capsys.readouterr()
        return code, lines_of(captured.out), captured.err

    return call


def test_one_rank_on_the_cpu_passes_and_writes_json(examine: Examine, tmp_path: Path) -> None:
    code, lines, err = examine("--transport", "gloo", "--json", tmp_path / "out.json")
    assert (code, err) == (0, "")
    assert list(lines) == list(CHECKS)
    assert {name for name, (status, _) in lines.items() if status == "pass"} == set(ON_CPU)
    assert {status for status, _ in lines.values()} == {"pass", "skip"}
    assert f"torch {torch.__version__}" in lines["versions"][1]
    assert "start with torchrun --standalone --nproc-per-node" in lines["Gloo"][1] or NUM_GPUS == 1
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["world_size"] == 1
    assert {row["name"]: (row["status"], row["found"]) for row in written["checks"]} == lines
    assert {(row["rank"], row["exit_code"], row["advice"]) for row in written["checks"]} == {(0, 0, "")}


def test_columns_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["--transport", "gloo"])
    out = capsys.readouterr().out
    width = max(map(len, CHECKS)) + 2
    assert {line[width : width + 4] for line in out.splitlines()} == {"pass", "skip"}
    assert "\x1b" not in out


def test_multicast_is_off(examine: Examine) -> None:
    examine("--transport", "gloo")
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def broken(*args: object) -> float:
    raise RuntimeError("the copy went wrong;\nmore lines")


def test_a_failure_stops_no_other_check(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "stream_bandwidth", broken)
    code, lines, err = examine("--transport", "gloo")
    assert code == 5
    assert err == "alspec: exit 5: doctor: failed: memory rate; the table says what to do\n"
    assert lines["memory rate"] == ("fail", "the copy went wrong; another process may use the GPU; see nvidia-smi")
    assert list(lines) == list(CHECKS)
    assert lines["demo checkpoint"][0] == "pass"


def test_debug_shows_the_traceback(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "stream_bandwidth", broken)
    assert "Traceback" in examine("--transport", "gloo", "--debug")[2]


def test_an_old_torch_is_a_mistake_of_the_setup(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 2 even if another check fails too: the setup comes first."""
    monkeypatch.setitem(diagnostics.MINIMUM, "torch", "99.1")
    monkeypatch.setattr(diagnostics, "stream_bandwidth", broken)
    code, lines, err = examine("--transport", "gloo")
    assert (code, err.count("\n")) == (2, 1)
    assert "failed: versions, memory rate;" in err
    assert lines["versions"][0] == "fail"
    expected = f"torch {torch.__version__} (needs 99.1); pip install --upgrade 'torch>=99.1'"
    assert lines["versions"][1].startswith(expected)


@pytest.mark.parametrize(
    ("built_for", "driver", "status"),
    [("13.0", (12, 8), "fail"), ("13.1", (13, 0), "pass"), ("12.8", (13, 0), "pass"), (None, None, "pass")],
)
def test_a_driver_too_old_for_torch_is_found(
    built_for: str | None, driver: tuple[int, int] | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(diagnostics, "_driver_cuda", lambda: driver)
    found = CHECKS["versions"](Scope(Placement(), "auto", False, None, 0, []))
    assert found.status == status
    if status == "fail":
        assert found.exit_code == 2
        assert found.found == "torch is built for CUDA 13.0, the driver runs up to 12.8"
        assert found.advice == "update the NVIDIA driver, or install a torch for CUDA 12"


def test_a_truncated_checkpoint_is_named(examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO_CHECKPOINT, tmp_path / "checkpoint"))
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    monkeypatch.setattr(diagnostics, "DEMO_CHECKPOINT", folder)
    code, lines, _ = examine("--transport", "gloo")
    assert code == 2
    assert lines["demo checkpoint"][0] == "fail"
    assert shard.name in lines["demo checkpoint"][1]


def test_more_ranks_than_gpus_fail() -> None:
    placement = Placement(rank=3, world_size=4, local_rank=3, local_world_size=4)
    found = CHECKS["GPUs"](Scope(placement, "auto", False, None, num_gpus=2, devices=[]))
    assert (found.status, found.exit_code) == ("fail", 2)
    assert found.found == "2 GPU(s) for 4 ranks"
    assert found.advice == "start with --nproc-per-node 2, or use --transport gloo (CPU)"


def test_a_gpu_that_torch_cannot_use_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(diagnostics, "GPU_FILE", str(tmp_path))
    found = CHECKS["GPUs"](Scope(Placement(), "auto", False, None, num_gpus=0, devices=[]))
    assert (found.status, found.exit_code) == ("fail", 2)
    assert found.found == f"torch {torch.__version__} is built for CPUs and finds no GPU, but {tmp_path} is there"
    assert CHECKS["GPUs"](Scope(Placement(), "gloo", False, None, 0, [])).status == "skip"


@pytest.mark.skipif(NUM_GPUS > 0, reason="needs a machine without a GPU")
def test_nccl_without_gpus_fails(examine: Examine) -> None:
    code, lines, _ = examine("--transport", "nccl")
    assert code == 2
    assert lines["NCCL"][0] == "fail"
    assert "needs one GPU for each rank, found 0 for 1 ranks; start fewer ranks" in lines["NCCL"][1]
    assert lines["Gloo"] == ("skip", "--transport nccl")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--jsn", "x"), "unknown flag --jsn; the nearest valid name is --json"),
        (("--deadline", "0"), "--deadline: expected more than 0, found '0'"),
        (("--deadline", "nan"), "--deadline: expected a finite number, found 'nan'"),
        (("--json", "nowhere/out.json"), "--json: cannot write nowhere/out.json"),
        (("--transport", "mpi"), "'mpi'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_wrong_flag_is_one_line(flags: tuple[str, ...], message: str, examine: Examine) -> None:
    code, lines, err = examine(*flags)
    assert (code, lines, err.count("\n")) == (2, {}, 1)
    assert err.startswith("alspec: exit 2: flags: ")
    assert message in err


def test_a_missing_alspec_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "alspec.py").write_text("raise ModuleNotFoundError(\"No module named 'alspec'\")")
    done = start([sys.executable, str(DOCTOR)], PYTHONPATH=str(tmp_path))
    expected = "doctor: cannot import alspec: No module named 'alspec'; pip install -e . in its folder"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"alspec: exit 2: {expected}\n")


def test_a_broken_torch_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    done = start([sys.executable, str(DOCTOR)], PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("alspec: exit 2: doctor: cannot import what alspec needs: libcudart.so.13")


# Tests in separate processes.


def start(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)


def torchrun(world_size: int, *argv: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    return start([*command, *map(str, argv)])


def exit_lines(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The last lines of the ranks. torchrun may end the slower rank before it prints the same line."""
    return {line for line in done.stderr.splitlines() if line.startswith("alspec: exit")}


@pytest.mark.slow
def test_one_rank_that_hangs_ends_at_the_deadline(tmp_path: Path) -> None:
    flags = ["--transport", "gloo", "--deadline", "2", "--json", str(tmp_path / "out.json")]
    done = start([sys.executable, str(WORKER), "hang:0:memory rate", *flags])
    assert done.returncode == 5
    assert done.stderr.startswith("alspec: exit 5: rank 0 stalled in the check of memory rate for 2 s; ")
    before = list(CHECKS)[: list(CHECKS).index("memory rate")]
    assert list(lines_of(done.stdout)) == before
    assert [row["name"] for row in json.loads((tmp_path / "out.json").read_text())["checks"]] == before


@pytest.mark.slow
def test_two_ranks_over_gloo_pass_and_write_a_row_each(tmp_path: Path) -> None:
    done = torchrun(2, DOCTOR, "--transport", "gloo", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    lines = lines_of(done.stdout)
    assert list(lines) == list(CHECKS)
    assert {name for name, (status, _) in lines.items() if status == "pass"} == {*ON_CPU, "Gloo", "pair link"}
    assert re.search(r"48 KB to rank 1 in \d+ us, .+ GB/s", lines["pair link"][1])
    assert "all-reduce of 8 KB over 2 ranks right" in lines["Gloo"][1]
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["world_size"] == 2
    assert [(row["name"], row["rank"]) for row in written["checks"]] == [
        (name, rank) for name in CHECKS for rank in (0, 1)
    ]


@pytest.mark.full
@pytest.mark.slow
def test_ranks_that_cannot_connect_get_the_advice_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch9")
    done = torchrun(2, DOCTOR, "--transport", "gloo")
    assert done.returncode != 0
    status, text = lines_of(done.stdout)["Gloo"]
    assert status == "fail"
    assert "Unable to find address for: nosuch9; check that host names resolve; GLOO_SOCKET_IFNAME" in text
    assert text.count("check that host names resolve") == 1


def test_a_check_that_fails_on_all_ranks_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [[Check(name, "fail", "broken", "mend it", 5) for _ in range(2)] for name in ("Gloo", "NCCL")]
    assert doctor._print(outcomes, None, True, 4) == 5
    out, err = capsys.readouterr()
    assert out == "Gloo  fail  broken; mend it\nNCCL  fail  broken; mend it\n"
    assert err == "alspec: exit 5: doctor: failed: Gloo, NCCL; the table says what to do\n"


def test_a_check_that_fails_on_one_rank_names_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    passed, failed = Check("Gloo", "pass", "right", "", 0), Check("Gloo", "fail", "broken", "mend it", 5)
    assert doctor._print([[passed, failed]], None, True, 4) == 5
    out, err = capsys.readouterr()
    assert out == "Gloo  fail  rank 1: broken; mend it\n"
    assert err == "alspec: exit 5: doctor: failed: Gloo; the table says what to do\n"


@pytest.mark.full
@pytest.mark.slow
def test_a_failure_of_one_of_two_ranks_stops_no_other_check() -> None:
    done = torchrun(2, WORKER, "raise:1:memory rate", "--transport", "gloo")
    assert done.returncode != 0
    lines = lines_of(done.stdout)
    assert lines["memory rate"] == ("fail", "rank 1: made to fail; do something about it")
    assert list(lines) == list(CHECKS)
    assert lines["Gloo"][0] == "pass"
    assert exit_lines(done) == {"alspec: exit 5: doctor: failed: memory rate; the table says what to do"}


# What rank 1 does instead of a collective -> the lines that the ranks may print.
DESERTIONS = {
    "hang": r"rank 1 stalled in the check of Gloo for 6 s; .*|rank 0 stalled in the check of Gloo for 6 s; .*",
    "die": r"rank 1 died at step 0, operation check of Gloo; see its own output above for the cause",
    "raise": r"rank 1 failed in the check of Gloo: made to fail; then rank 0 stalled in the check of Gloo for 3 s",
}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("how", list(DESERTIONS))
def test_a_rank_that_leaves_a_collective_is_named(how: str) -> None:
    started = time.monotonic()
    done = torchrun(2, WORKER, f"{how}:1:Gloo", "--transport", "gloo", "--deadline", 6)
    assert time.monotonic() - started < 40
    assert done.returncode != 0
    assert list(lines_of(done.stdout)) == list(CHECKS)[: list(CHECKS).index("Gloo")]
    lines = exit_lines(done)
    assert lines
    for line in lines:
        assert re.fullmatch(rf"alspec: exit 5: ({DESERTIONS[how]})", line), line


@pytest.mark.parametrize("weight_format", ["fp8", "int4"])
def test_the_product_of_the_check_of_quantised_weights(weight_format: WeightFormat) -> None:
    """In the interpreter, whose kernel is that of the GPU."""
    found, expected = diagnostics.packed_product(weight_format, torch.device("cpu"))
    assert expected.abs().mean() > 1e-3
    assert (found - expected).norm() < diagnostics.PRODUCT_ERROR * expected.norm()


# Tests on GPUs.


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA GPU")
def test_one_rank_on_gpus_passes(examine: Examine) -> None:
    code, lines, err = examine()
    assert code == 0, (lines, err)
    capability = torch.cuda.get_device_capability(0)
    expected = {name: "pass" for name in ON_CPU + ON_GPU}
    expected["dependent launch"] = "pass" if capability >= (9, 0) else "skip"
    expected["links"] = "pass" if NUM_GPUS > 1 else "skip"
    expected |= {name: "skip" for name in ("NCCL", "symmetric memory", "host memory", "Gloo", "pair link")}
    assert {name: status for name, (status, _) in lines.items()} == expected
    assert torch.cuda.get_device_name(0) in lines["GPUs"][1]
    if NUM_GPUS > 1:
        command = f"start with torchrun --standalone --nproc-per-node {NUM_GPUS} launch/doctor.py"
        assert [lines[name][1] for name in ("NCCL", "symmetric memory", "host memory")] == [command] * 3


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, found {NUM_GPUS}")
def test_one_rank_for_each_gpu_passes(tmp_path: Path) -> None:
    done = torchrun(NUM_GPUS, DOCTOR, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = lines_of(done.stdout)
    assert {name: lines[name][0] for name in ("links", "NCCL", "host memory", "Gloo")} == {
        "links": "pass",
        "NCCL": "pass",
        "host memory": "pass",
        "Gloo": "skip",
    }
    rows: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["checks"]
    symmetric = {row["status"] for row in rows if row["name"] == "symmetric memory"}
    peers = all(torch.cuda.can_device_access_peer(a, b) for a in range(NUM_GPUS) for b in range(NUM_GPUS) if a != b)
    assert symmetric == {"pass" if peers else "skip"}


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA GPU")
def test_more_ranks_than_gpus_under_torchrun_fail_and_use_the_cpu() -> None:
    done = torchrun(NUM_GPUS + 1, DOCTOR)
    assert done.returncode != 0
    lines = lines_of(done.stdout)
    assert lines["GPUs"][0] == "fail"
    assert f"{NUM_GPUS} GPU(s) for {NUM_GPUS + 1} ranks; start with --nproc-per-node {NUM_GPUS}" in lines["GPUs"][1]
    assert list(lines) == list(CHECKS)
    assert lines["Gloo"][0] == "pass", "the ranks must fall back to the CPU, as in generate"
    assert exit_lines(done) == {"alspec: exit 2: doctor: failed: GPUs; the table says what to do"}
