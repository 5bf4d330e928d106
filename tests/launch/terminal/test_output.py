"""Full disks, readers that are gone, closed streams and Ctrl-C: one line and an exit code."""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from tiers import fast

from alspec.config import CommandConfig
from alspec.errors import BadNumbersError, InterruptedJobError, RankFailureError, UserError
from alspec.launch import bench_kernels, doctor, evaluate, generate, latency, plot_trace
from alspec.launch.terminal.flags import Parser, parse_command
from alspec.launch.terminal.output import append_rows, exit_code, exit_on_interrupt, write_text
from alspec.runtime.engine.engine import Engine
from alspec.runtime.engine.generation import Token

FULL = Path("/dev/full")
NO_SPACE = "No space left on device"
SMALL = ("--transport", "gloo", "--prompt", "abc", "--max-new-tokens", 3, "--ignore-eos")

Run = Callable[..., tuple[int, str, str]]

needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def run_with(work: Callable[[], object]) -> int:
    """The exit code of a command that does this."""

    with exit_code([]) as outcome:
        parse_command(Parser(prog="some"), CommandConfig, [], outcome)
        work()
    return outcome.code


@needs_full
@pytest.mark.parametrize("flag", ["--json", "--trace"])
def test_a_full_disk_leaves_the_panel(flag: str, run: Run, checkpoint: Path, tmp_path: Path) -> None:
    code, out, err = run("--model", checkpoint, *SMALL, flag, FULL)
    assert code == 2
    assert len(out) > 1
    assert "\nmemory: " in err
    assert err.splitlines()[-1] == f"alspec: exit 2: cannot write {FULL}: {NO_SPACE}"


def test_json_is_written_before_the_panel(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(summary: dict[str, Any]) -> None:
        raise UserError("no panel")

    monkeypatch.setattr(generate, "print_panel", fail)
    assert run("--model", checkpoint, *SMALL, "--json", tmp_path / "out.json")[0] == 2
    assert len(json.loads((tmp_path / "out.json").read_text())["requests"][0]["token_ids"]) == 3


@needs_full
@pytest.mark.parametrize("flag", ["--json", "--rows", "--trace"])
def test_latency_on_a_full_disk(flag: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(checkpoint), "--transport", "gloo", "--contexts", "16", "--steps", "1"]
    assert latency.main([*flags, flag, str(FULL)]) == 2
    out, err = capsys.readouterr()
    assert err == f"alspec: exit 2: cannot write {FULL}: {NO_SPACE}\n"
    assert out.count(" off ") == 1, "the measured rows are shown"


@needs_full
def test_standard_output_that_is_full(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on, so that the files are written."""
    flags = ["--model", str(checkpoint), *map(str, SMALL), "--json", str(tmp_path / "out.json")]
    for command in (lambda: generate.main(flags), lambda: doctor.main(["--transport", "gloo"])):
        with FULL.open("w", encoding="utf-8") as full:
            monkeypatch.setattr("sys.stdout", full)
            assert command() == 2
            assert sys.stdout is full
        err = capsys.readouterr().err
        assert err.splitlines()[-1] == f"alspec: exit 2: cannot write standard output: {NO_SPACE}"
        assert "Traceback" not in err
    assert len(json.loads((tmp_path / "out.json").read_text())["requests"]) == 1


@needs_full
@pytest.mark.parametrize("main", [generate.main, latency.main, evaluate.main, bench_kernels.main, plot_trace.main])
def test_help_that_is_lost(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FULL.open("w", encoding="utf-8") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        assert main(["--help"]) == 2
    assert capsys.readouterr().err == f"alspec: exit 2: cannot write standard output: {NO_SPACE}\n"


@pytest.mark.parametrize("when", ["while it writes", "at its end"])
def test_a_reader_that_is_gone(when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert run_with(lambda: print("text", flush=when == "while it writes")) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_closed_streams(
    name: str, run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run("--model", checkpoint, *SMALL)
    monkeypatch.setattr(f"sys.{name}", None)
    code, out, err = run("--model", checkpoint, *SMALL)
    assert code == 0
    if name == "stdout":
        assert (out, err.split("TTFT")[0]) == ("", expected[2].split("TTFT")[0])
    else:
        assert (out, err) == (expected[1], "")


@pytest.mark.slow
@pytest.mark.parametrize("closed", fast([">&-", "2>&-", "<&- >&- 2>&-"], keep=["<&- >&- 2>&-"]))
def test_closed_streams_of_a_process(closed: str, checkpoint: Path) -> None:
    flags = " ".join(map(str, ("--model", checkpoint, *SMALL)))
    command = f"exec {sys.executable} {ROOT / 'launch' / 'generate.py'} {flags} {closed}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "Error" not in done.stderr
    assert (len(done.stdout) > 1, "memory: " in done.stderr) == (closed == "2>&-", closed == ">&-")


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "out.json", tmp_path / "link.json"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    write_text(link, "new")
    assert (path.read_text(), link.is_symlink(), stat.S_IMODE(path.stat().st_mode)) == ("new", True, 0o640)

    def fill(self: Path, text: str, **options: Any) -> int:
        with self.open("w") as file:
            file.write(text[:1])
        raise OSError(28, NO_SPACE)

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(UserError, match=f"cannot write {link}: {NO_SPACE}"):
        write_text(link, "newer")
    assert path.read_text() == "new"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link.json", "out.json"]
    path.unlink()
    path.symlink_to(link)
    with pytest.raises(UserError, match=f"cannot write {link}: Too many levels of symbolic links"):
        write_text(link, "newest")
    assert path.is_symlink()


def test_a_file_that_is_interrupted_leaves_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Path, text: str, **options: Any) -> int:
        self.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stop)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "out.json", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_a_folder_that_cannot_be_written_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file itself may be writable. Root may write everywhere, so `os.access` is replaced."""
    path = tmp_path / "out.json"
    path.write_text("old")
    before = path.stat().st_ino
    monkeypatch.setattr(os, "access", lambda *_: False)
    write_text(path, "new")
    assert (path.read_text(), path.stat().st_ino) == ("new", before)


@needs_full
def test_a_failure_keeps_its_exit_code_if_standard_output_is_lost_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code of doctor says what has failed."""
    with FULL.open("w", encoding="utf-8") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        with exit_code([]) as outcome:
            print("table")
            outcome.code = 5
    assert outcome.code == 5
    assert capsys.readouterr().err == ""


@needs_full
def test_rows_on_a_full_disk() -> None:
    append_rows(None, [{"a": 1}])
    with pytest.raises(UserError, match=f"cannot write {FULL}: {NO_SPACE}"):
        append_rows(FULL, [{"a": 1}])


def test_every_top_level_file_is_a_command() -> None:
    for path in (ROOT / "launch").glob("*.py"):
        has_main = "__main__" in path.read_text(encoding="utf-8")
        parts = {"__init__", "commands", "latency_rounds"}
        assert has_main == (path.stem not in parts), path


@pytest.mark.parametrize(
    ("main", "flags", "advice"),
    [
        (generate.main, ["--prompt", "a"], "Use more ranks, fewer or shorter prompts, or a lower --max-context"),
        (latency.main, ["--contexts", "16", "--steps", "1"], "Lower --contexts or --batch, or use more ranks"),
        (evaluate.main, ["--contexts", "16", "--windows", "1"], "Lower --contexts, or use more ranks"),
    ],
    ids=["generate", "latency", "evaluate"],
)
def test_out_of_memory_names_the_flags_of_the_command(
    main: Callable[..., int],
    flags: list[str],
    advice: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    monkeypatch.setattr(Engine, "load", no_memory)
    (tmp_path / "text.txt").write_text("The road was long. " * 9, encoding="utf-8")
    text = ["--text", str(tmp_path / "text.txt")] if main is evaluate.main else []
    assert main(["--model", str(checkpoint), "--transport", "gloo", *flags, *text]) == 3
    expected = f"alspec: exit 3: out of memory: CUDA out of memory. {advice}\n"
    assert capsys.readouterr() == ("", expected)


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(interrupt) == 130
    assert capsys.readouterr() == ("", "alspec: exit 130: interrupted\n")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert run_with(interrupt) == 130
    assert capsys.readouterr() == ("", "\nalspec: exit 130: interrupted\n")
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    with monkeypatch.context() as job:
        ended: list[int] = []
        job.setenv("WORLD_SIZE", "2")
        job.setattr("os._exit", ended.append)
        run_with(interrupt)
        assert (ended, capsys.readouterr().err) == ([130], "alspec: exit 130: interrupted\n")
    monkeypatch.setattr(plot_trace, "check_picture", interrupt)
    assert plot_trace.main(["trace.json", "picture.png", "--step", "1"]) == 130
    assert capsys.readouterr() == ("", "alspec: exit 130: interrupted\n")


def lost(engine: Engine) -> None:
    """Another thread ends the process, while this one may be blocked; `ctrl_c` does the same."""
    engine.heartbeat.end_process(RankFailureError("rank 1 died"))


def bad(engine: Engine) -> None:
    raise BadNumbersError("NaN")


def ctrl_c(engine: Engine) -> None:
    engine.heartbeat.end_process(InterruptedJobError("interrupted"))


@pytest.mark.parametrize(
    ("texts", "line_end"),
    [(("half ", "a line", ""), "\n"), (("a line\n", ""), ""), (("",), "")],
    ids=["half a line", "a line", "none"],
)
@pytest.mark.parametrize(
    ("end", "said"),
    [(lost, "exit 5: rank 1 died"), (bad, "exit 4: NaN"), (ctrl_c, "exit 130: interrupted")],
    ids=["lost", "bad", "ctrl-c"],
)
def test_an_error_after_a_text_gets_its_own_line(
    end: Callable[[Engine], None],
    said: str,
    texts: tuple[str, ...],
    line_end: str,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both go to the same terminal, which shows ^C after the text: one line end then serves both."""

    def stream(engine: Engine, *_: object, **options: object) -> Iterator[Token]:
        yield from (Token(0, 1, text, None, None) for text in texts)
        end(engine)

    shown = io.StringIO()
    monkeypatch.setattr(Engine, "stream", stream)
    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr("sys.stdout", shown)
    monkeypatch.setattr("sys.stderr", shown)
    with pytest.raises(SystemExit):
        sys.exit(generate.main(["--model", str(checkpoint), *map(str, SMALL)]))
    assert shown.getvalue() == "".join(texts) + ("\n" if end is ctrl_c else line_end) + f"alspec: {said}\n"


SCRIPTS = ("bench_kernels", "doctor", "evaluate", "generate", "latency", "plot_trace")
INSTALLED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]


def installed(name: str) -> str:
    """The code that pip generates for an installed command."""
    module, function = INSTALLED[name].split(":")
    return f"import sys; from {module} import {function}; sys.exit({function}())"


@pytest.mark.slow
@pytest.mark.parametrize("name", fast([*SCRIPTS, *INSTALLED], keep=["generate", "plot_trace", next(iter(INSTALLED))]))
def test_interrupted_while_modules_are_imported(name: str, tmp_path: Path) -> None:
    """As from a terminal: the tests themselves may run with SIGINT ignored, as under `nohup`."""
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, *(["-c", installed(name)] if name in INSTALLED else [ROOT / "launch" / f"{name}.py"])],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "alspec: exit 130: interrupted\n")
    assert process.returncode == 130


def test_a_command_handles_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    # Importing the commands has not changed the handler; under `nohup` SIGINT is ignored.
    assert before in (signal.default_int_handler, signal.SIG_IGN)
    seen: list[object] = []
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exit_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        run_with(lambda: seen.append(signal.getsignal(signal.SIGINT)))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `nohup` leaves it
        exit_on_interrupt()
        run_with(lambda: seen.append(signal.getsignal(signal.SIGINT)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.default_int_handler, signal.SIG_IGN]


@contextmanager
def ending_in(action: Callable[..., object]) -> Iterator[None]:
    yield
    action()


@pytest.mark.parametrize("when", ["in a mode", "between modes"])
def test_interrupted_latency_shows_what_it_measured(
    when: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = latency.measure
    if when == "in a mode":
        monkeypatch.setattr(latency, "measure", lambda *args: (interrupt if args[1] == 24 else measure)(*args))
        monkeypatch.setattr(latency, "guarded", lambda heartbeat, advice: nullcontext())
    else:
        monkeypatch.setattr(latency, "guarded", lambda heartbeat, advice: ending_in(interrupt))
    flags = ["--model", str(checkpoint), "--transport", "gloo", "--contexts", "16,24", "--steps", "1"]
    assert latency.main(flags) == 130
    out, err = capsys.readouterr()
    assert err == "alspec: exit 130: interrupted\n"
    rows = [line.split()[1] for line in out.splitlines() if " off " in line]
    assert rows == (["16"] if when == "in a mode" else ["16", "24"])
