"""Output to pipes, devices and standard output, and one file for two flags."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from paths import ROOT

from alspec.config import EvaluateConfig, GenerateConfig
from alspec.errors import UserError
from alspec.launch import bench_kernels, doctor, evaluate, generate, latency
from alspec.launch.terminal.flags import check_distinct, check_writable
from alspec.launch.terminal.output import append_rows, is_special, write_text

DESCRIPTORS = Path("/dev/fd")

needs_descriptors = pytest.mark.skipif(not DESCRIPTORS.exists(), reason="needs /dev/fd")


@pytest.fixture
def pipe() -> Iterator[tuple[int, Path]]:
    """A descriptor to read from, and the path that writes there, like the shell's `>(...)`."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, DESCRIPTORS / str(write)
    os.close(read)
    os.close(write)


@needs_descriptors
def test_a_pipe_is_written_directly(pipe: tuple[int, Path]) -> None:
    read, path = pipe
    check_writable("flags: --json", path)
    write_text(path, "text\n")
    append_rows(path, [{"a": 1}, {"a": 2}])
    assert os.read(read, 100) == b'text\n{"a": 1}\n{"a": 2}\n'


@needs_descriptors
def test_an_open_file_is_appended_to(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        file.write("header\n")
        file.flush()
        write_text(DESCRIPTORS / str(file.fileno()), "text\n")
    assert (tmp_path / "out").read_text() == "header\ntext\n"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_an_open_file_is_not_replaced_under_any_name(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        for folder in ("/dev/fd", "/proc/self/fd"):
            assert is_special(Path(folder) / str(file.fileno())), folder
    assert not is_special(tmp_path / "out")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_standard_stream_stays_in_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file may have any path; what is printed before and after is kept."""
    path = tmp_path / "out"
    with path.open("w") as stream, monkeypatch.context() as patch:
        patch.setattr(f"sys.{name}", stream)
        stream.write("before\n")  # buffered
        write_text(path, "text\n")
        append_rows(path, [{"a": 1}])
        stream.write("after\n")
    assert path.read_text() == 'before\ntext\n{"a": 1}\nafter\n'
    assert not is_special(path)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["a pipe", pytest.param("a file", marks=pytest.mark.full)])
def test_json_follows_the_text_on_standard_output(target: str, checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--model", checkpoint, "--transport", "gloo", "--prompt", "abc", "--max-new-tokens", "3", "--ignore-eos"]
    command = [sys.executable, ROOT / "launch" / "generate.py", *flags, "--json", "/dev/stdout"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "out").open("w+b") as file:
        stdout = file if target == "a file" else subprocess.PIPE
        done = subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.STDOUT, timeout=120)
        out = done.stdout or (tmp_path / "out").read_bytes()
    assert done.returncode == 0, out
    before, end = out.decode().split('{"requests"')
    found, end_of_json = json.JSONDecoder().raw_decode('{"requests"' + end)
    # The panel comes last, on standard error: it must not lie over the JSON.
    assert ('{"requests"' + end)[end_of_json:].count("memory: ") == 1
    assert found["requests"][0]["text"] in before


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (generate, ["--prompt", "abc", "--max-new-tokens", "3", "--ignore-eos"]),
        (latency, ["--contexts", "16", "--steps", "1"]),
    ],
    ids=["generate", "latency"],
)
def test_a_trace_on_standard_output_leaves_the_rest(
    command: ModuleType, flags: list[str], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    with path.open("w") as stream, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        stream.write("before\n")
        given = ["--model", str(checkpoint), "--transport", "gloo", "--trace", str(path)]
        assert command.main([*given, *flags]) == 0
    out = path.read_text()
    begin = out.index('{"traceEvents"')
    trace, end = json.JSONDecoder().raw_decode(out, begin)
    assert len(trace["traceEvents"]) > 1
    assert out[:begin].startswith("before\n")
    if command is latency:
        assert " off " in out[end:], "the table comes last"
    else:
        assert len(out[:begin]) > len("before\n"), "the text comes first"


def test_a_named_pipe_keeps_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    ready = select.poll()
    ready.register(read, select.POLLIN)
    check_writable("flags: --json", path)
    assert not ready.poll(0), "checking must not open the pipe"
    write_text(path, "text")
    append_rows(path, [{"a": 1}])
    assert os.read(read, 100) == b'text{"a": 1}\n'
    assert not ready.poll(0), "more rows may come"
    os.close(read)
    with pytest.raises(UserError, match=f"cannot write {path}: Broken pipe"):
        append_rows(path, [{"a": 2}])
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match=f"flags: --json: cannot write {path}: Permission denied"):
        check_writable("flags: --json", path)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"flags: --json: cannot write {tmp_path}: Is a directory"):
        check_writable("flags: --json", tmp_path)


@needs_descriptors
def test_doctor_writes_its_outcomes_to_a_pipe_once(
    pipe: tuple[int, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    read, path = pipe
    assert doctor.main(["--transport", "gloo", "--json", str(path)]) == 0
    written = json.loads(os.read(read, 1 << 16))
    assert (written["world_size"], len(written["checks"])) == (1, len(capsys.readouterr().out.splitlines()))


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (generate, ["--json", "a.png", "--trace", "./a.png"]),
        (generate, ["--prompt-file", "a.png", "--json", "link"]),
        (latency, ["--json", "a.png", "--rows", "a.png"]),
        (latency, ["--rows", "new.png", "--plot", "new.png"]),
        (latency, ["--prompt-file", "a.png", "--trace", "a.png"]),
        (evaluate, ["--text", "a.png", "--plot", "a.png"]),
        (evaluate, ["--records", "a.png", "--rows", "a.png"]),
        (bench_kernels, ["--config", "a.png", "--rows", "a.png"]),
        (doctor, ["--config", "a.png", "--json", "a.png"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.__name__.rsplit(".", 1)[1],
)
def test_one_file_for_two_flags(
    command: ModuleType,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_text("debug: false\n")
    (tmp_path / "link").symlink_to("a.png")
    assert command.main(flags) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("alspec: exit 2: flags: ")
    assert "; give each a file of its own" in err
    first, path, second, other = flags
    assert any(f"{one} and {two} both name " in err for one, two in ((first, second), (second, first)))
    assert f"both name {path}; " in err or f"both name {Path(other)}; " in err
    assert (tmp_path / "a.png").read_text() == "debug: false\n"


def test_files_that_two_flags_may_share(tmp_path: Path) -> None:
    check_distinct(GenerateConfig(json=Path(os.devnull), trace=Path(os.devnull)), None)
    check_distinct(GenerateConfig(json=Path("/dev/stdout"), trace=Path("/dev/stdout")), None)
    read_twice = tmp_path / "cases.jsonl.gz"
    check_distinct(EvaluateConfig(text=read_twice, records=read_twice, rows=tmp_path / "rows"), None)
