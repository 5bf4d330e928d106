"""A dead, stopped or terminated rank ends the whole job soon and by name; bad numbers print no token."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import GONE_WITHIN_S, LONG, failed, free_port, job, write_program
from safetensors.torch import load_file, save_file

from alspec.errors import RankFailureError
from alspec.interrupts import interrupts_wait
from alspec.launch.generate import main
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.faults import heartbeat as faults

CASES = [
    (2, "paired", 0, signal.SIGKILL),
    (2, "paired", 1, signal.SIGKILL),
    (2, "paired", 0, signal.SIGSTOP),
    (2, "paired", 1, signal.SIGSTOP),
    (4, "off", 3, signal.SIGKILL),
    (4, "off", 0, signal.SIGSTOP),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "mode", "rank", "sent"), CASES, ids=[f"{mode}{n}-{s.name}-rank{rank}" for n, mode, rank, s in CASES]
)
def test_lost_rank(
    tiny_folder: Path, tmp_path: Path, world_size: int, mode: str, rank: int, sent: signal.Signals
) -> None:
    """`kill -9` or `kill -STOP` in the middle of a generation."""
    with job(tmp_path, world_size, [*LONG, "--model", str(tiny_folder), "--speculation", mode]) as running:
        running.wait_for_tokens()
        assert sorted(running.ranks) == list(range(world_size))
        os.kill(running.ranks[rank], sent)
        seconds = running.seconds_until_gone()
        assert seconds < GONE_WITHIN_S
        assert running.torchrun.returncode != 0
        lines = [line for line in running.lines if line.startswith("alspec: exit")]
        # A survivor ends a stopped rank, so another survivor may find it dead; nobody blames a survivor.
        pattern = rf"alspec: exit 5: rank {rank} (died|stalled) at step (\d+), operation \w+"
        named = [re.match(pattern, line) for line in lines]
        assert named, running.stderr
        assert all(named), running.stderr
        assert all(int(match[2]) >= 1 for match in named if match)
        assert any(match[1] == ("died" if sent == signal.SIGKILL else "stalled") for match in named if match)
        assert "Traceback (most recent call last)" not in "".join(lines)


LONG_CALLS = {
    "computes": ("compute(7)", 60, None),
    "computes for too long": ("compute(40)", 6, r"running, no heartbeat for [6-9]\.\d s"),
    "waits": ("ctypes.PyDLL(None).sleep(40)", 60, r"running, no heartbeat for [45]\.\d s"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("call", "limit_s", "found"), LONG_CALLS.values(), ids=LONG_CALLS)
def test_a_call_that_holds_pythons_lock(
    call: str, limit_s: int, found: str | None, tiny_folder: Path, tmp_path: Path
) -> None:
    """No heartbeat then; a rank that computes meanwhile is borne with, one that does not is stuck."""
    program = write_program(
        tmp_path,
        f"""
import ctypes
from alspec.runtime.faults import heartbeat as faults
faults.LOAD_LIMIT_S = {limit_s}
def compute(seconds):
    sys.setswitchinterval(100)  # no other thread has its turn
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass
    sys.setswitchinterval(0.005)
tokens = stream(engine)
next(tokens)
time.sleep(1)  # for a beat that does not tell of loading
if rank == 1:
    {call}
sys.stdout.write(f"{{len(list(tokens))}} more\\n")
sys.stdout.flush()
engine.close()
""",
    )
    with job(tmp_path, 2, [str(tiny_folder)], program) as running:
        code = running.torchrun.wait(timeout=60)
        lines = running.lines
        if found is None:
            assert (code, lines) == (0, []), running.stderr
            assert running.stdout.splitlines() == ["2 more"] * 2
        else:
            assert len(lines) == 1, running.stderr
            assert re.fullmatch(rf"alspec: exit 5: rank 1 stalled at step 0, operation .+: {found}", lines[0])


@pytest.mark.slow
def test_sigterm_to_torchrun(tiny_folder: Path, tmp_path: Path) -> None:
    with job(tmp_path, 2, [*LONG, "--model", str(tiny_folder), "--speculation", "paired"]) as running:
        running.wait_for_tokens()
        running.torchrun.send_signal(signal.SIGTERM)
        assert running.seconds_until_gone() < GONE_WITHIN_S
        assert running.torchrun.returncode != 0


def test_an_interrupt_while_weights_are_read_is_told_at_once() -> None:
    """The handler is another one then, and a read of a hung file may never end."""
    told, ended = threading.Event(), threading.Event()
    heartbeat = SimpleNamespace(
        placement=Placement(0, 2, 0, 2), tell=lambda _: told.set(), end_process=lambda _: ended.set()
    )

    def read() -> None:
        with faults._ended_by_interrupt(heartbeat), interrupts_wait():
            os.kill(os.getpid(), signal.SIGINT)
            assert told.wait(10)
            assert ended.wait(10)

    with pytest.raises(KeyboardInterrupt):
        read()


@pytest.mark.slow
def test_interrupt(tiny_folder: Path, tmp_path: Path) -> None:
    """Ctrl-C, where one rank is blocked in a collective that the other one will not come to."""
    program = write_program(
        tmp_path,
        """
def work():
    for token in stream(engine):
        pass
    print("tokens", flush=True)
    if rank == 0:
        engine.transport.barrier()
    time.sleep(60)
with guarded(engine.heartbeat):
    work()
""",
    )
    with job(tmp_path, 2, [str(tiny_folder)], program) as running:
        running.wait_for_tokens()
        for process in running.ranks.values():
            os.kill(process, signal.SIGINT)
        assert running.seconds_until_gone() < GONE_WITHIN_S
        lines = running.lines
        assert lines == ["alspec: exit 130: interrupted"] * 2, running.stderr
        assert running.stderr.count("exitcode  : 130") == 2
        assert "Traceback (most recent call last)" not in running.stderr.partition("alspec: ")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "own_lines", "named"),
    [
        ('OSError(28, "No space left on device")', [], r"OSError: \[Errno 28\] No space left on device"),
        ('UserError("cannot write F: disk full")', ["alspec: exit 2: cannot write F: disk full"], "cannot write F: .*"),
    ],
    ids=["unexpected", "one line"],
)
def test_own_error(error: str, own_lines: list[str], named: str, tiny_folder: Path, tmp_path: Path) -> None:
    """A full disk under rank 0 is no loss of a peer: rank 1, which waits for it, names the cause."""
    program = write_program(
        tmp_path,
        f"""
from alspec.errors import UserError
def work():
    for token in stream(engine):
        pass
    if rank == 0:
        raise {error}
    engine.transport.barrier()
with guarded(engine.heartbeat):
    work()
""",
    )
    with job(tmp_path, 2, [str(tiny_folder)], program) as running:
        running.torchrun.wait(timeout=90)
        lines = sorted(line for line in running.lines if line.startswith("alspec: exit"))
        cause = rf"rank 0 died at step \d+, operation .+: {named}"
        assert lines[:-1] == own_lines, running.stderr
        assert re.fullmatch(f"alspec: exit 5: {cause}", lines[-1])
        # torchrun's summary has the cause, too.
        assert re.search(
            rf"traceback : (alspec: exit 2|rank 0 died at step \d+, operation .+): {named}", running.stderr
        )


@pytest.mark.slow
def test_program_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    """It is restarted, handles signals itself, catches Ctrl-C, closes an engine in a thread, and leaves one open."""
    program = write_program(
        tmp_path,
        """
if attempt == 0:
    next(stream(engine))
    os._exit(3) if rank == 1 else time.sleep(60)
calls = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: calls.append(signal.Signals(number).name))
try:
    for token in stream(engine):
        pass
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(3.5 + rank / 2)
    calls.append("saved")
thread = threading.Thread(target=engine.close)
thread.start()
thread.join()
engine = Engine.from_pretrained(sys.argv[1], transport="gloo")
found = " ".join(map(str, [rank, *calls, len(list(stream(engine)))]))
sys.stdout.write(f"{found}\\n")  # at once: the other rank writes to the same file
sys.stdout.flush()
time.sleep(rank)
""",
    )
    port = str(free_port())
    options = ("--nnodes", "1", "--master-addr", "localhost", "--master-port", port, "--max-restarts", "1")
    with job(tmp_path, 2, [str(tiny_folder)], program, options) as running:
        assert running.torchrun.wait(timeout=90) == 0, running.stderr
        assert sorted(running.stdout.splitlines()) == [f"{rank} SIGUSR1 SIGTERM saved 3" for rank in range(2)]
        assert "terminate called" not in running.stderr


@pytest.mark.slow
def test_an_error_after_the_others_have_left(tiny_folder: Path, tmp_path: Path) -> None:
    """Nobody was missed: it stays what it is."""
    program = write_program(
        tmp_path,
        """
def work():
    for token in stream(engine):
        pass
    if rank == 1:
        sys.exit(0)
    time.sleep(2)
    raise RuntimeError("a bug")
with guarded(engine.heartbeat):
    work()
""",
    )
    with job(tmp_path, 2, [str(tiny_folder)], program) as running:
        assert running.torchrun.wait(timeout=60) != 0
        assert "RuntimeError: a bug" in running.stderr
        assert "rank 1 left" not in running.stderr


@pytest.mark.slow
def test_a_caught_error_waits_for_nobody(tiny_folder: Path, tmp_path: Path) -> None:
    """Every rank gives up a text, one ends soon, the other later; an error after the goodbye is the program's own."""
    program = write_program(
        tmp_path,
        """
def cancel(done):
    raise RuntimeError("cancelled")
def work():
    list(stream(engine))
    sampling = SamplingConfig(max_new_tokens=3)
    try:
        list(engine.stream([1, 2, 3], sampling, progress=cancel))
    except RuntimeError:
        pass
    if rank == 1:
        sys.exit(0)
    time.sleep(6)
    print("alone", flush=True)
    engine.heartbeat.stop()
    raise ValueError("no such row")
try:
    with guarded(engine.heartbeat):
        work()
except ValueError as error:
    print(error)
""",
    )
    with job(tmp_path, 2, [str(tiny_folder)], program) as running:
        assert running.torchrun.wait(timeout=60) == 0, running.stderr
        assert running.stdout.splitlines() == ["alone", "no such row"]


@pytest.mark.slow
def test_uncaught_error(tiny_folder: Path, tmp_path: Path) -> None:
    """Of a program without `guarded`: the other rank names it, whether its own collective fails first or not."""
    program = write_program(
        tmp_path,
        """
for token in stream(engine):
    if rank == 0 and token.token_id >= 0:
        raise ValueError("no such token")
time.sleep(60)
""",
    )
    with job(tmp_path, 2, [str(tiny_folder)], program) as running:
        running.torchrun.wait(timeout=90)
        lines = running.lines
        assert lines, running.stderr
        assert re.fullmatch(
            r"alspec: exit 5: rank 0 died at step \d+, operation .+: ValueError: no such token", lines[0]
        )


THREE_TOKENS = """
tokens = stream(engine, 100)
for _ in range(3):
    next(tokens)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "missed",
    ["list(stream(engine, 100))", "list(tokens)", 'with engine.heartbeat.waiting("a test"): time.sleep(60)'],
    ids=["generation", "step", "wait"],
)
def test_a_rank_that_leaves_early(missed: str, tiny_folder: Path, tmp_path: Path) -> None:
    """It ends well, without `close`: whoever waits for it is told, also where no collective fails (as on GPUs)."""
    text = f"""{THREE_TOKENS}
if rank == 1:
    sys.exit(0)
time.sleep(6)
print("alone", flush=True)
def work():
    {missed}
with guarded(engine.heartbeat):
    work()
"""
    ended = failed(tmp_path, tiny_folder, text)
    assert ended.stdout.splitlines() == ["alone"]  # as long as nobody is waited for
    pattern = r"alspec: exit 5: rank 1 left at step 2, operation .+ without closing its engine"
    assert len(ended.lines) == 1, ended.stderr
    assert re.fullmatch(pattern, ended.lines[0]), ended.stderr


PLACE = r" at step \d+, operation [\w ,]+"
PARTED = "ranks wait for each other in different places: rank 0 in generation 1" + PLACE + ", rank 1 in {}" + PLACE
# What rank 1 does after three tokens of generation 1, while rank 0 goes on with it, and what the job then says.
PARTINGS = {
    "another generation": ("next(stream(engine))", PARTED.format("the start of generation 2")),
    "close": ("engine.close()", PARTED.format("close")),
    "close, later": ("time.sleep(6); engine.close()", PARTED.format("close")),
}


@pytest.mark.slow
@pytest.mark.parametrize(("other", "line"), PARTINGS.values(), ids=PARTINGS)
def test_ranks_that_part(other: str, line: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Each would wait for the other for ten minutes, or take its messages for others."""
    text = f"{THREE_TOKENS}\nif rank == 1:\n    {other}\nlist(tokens)\ntime.sleep(60)"
    ended = failed(tmp_path, tiny_folder, text, within_s=40)
    assert ended.lines
    assert all(re.fullmatch("alspec: exit 5: " + line, each) for each in ended.lines), ended.stderr


SOON_GONE = {
    "ends": ("sys.exit(0)", "rank 1 ended at step 0, operation start, before it joined the job; see its own .+"),
    "closes": ("engine.close(); time.sleep(60)", "rank 1 closed its engine at step 0, operation start without .+"),
    # Before the heartbeat tells of a step; it took part.
    "killed": ("next(stream(engine)); os.kill(os.getpid(), 9)", "rank 1 died at step .+"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("other", "line"), SOON_GONE.values(), ids=SOON_GONE)
def test_a_rank_that_is_soon_gone(other: str, line: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Rank 1; rank 0 is told in its first generation that it waits in vain."""
    text = f"if rank == 1:\n    {other}\nlist(stream(engine))"
    ended = failed(tmp_path, tiny_folder, text, within_s=40)
    assert len(ended.lines) == 1, ended.stderr
    assert re.fullmatch("alspec: exit 5: " + line, ended.lines[0])


@pytest.mark.slow
def test_a_long_wait_for_a_rank_elsewhere(tiny_folder: Path, tmp_path: Path) -> None:
    """It may still come, and then all is well."""
    program = write_program(
        tmp_path,
        """
from alspec.runtime.faults import heartbeat as faults
faults.NOTICE_S = 5.0
if rank == 1:
    time.sleep(7)
tokens = stream(engine)
next(tokens)
if rank == 1:
    time.sleep(7)
list(tokens)
engine.close()
""",
    )
    with job(tmp_path, 2, [str(tiny_folder)], program) as running:
        assert running.torchrun.wait(timeout=60) == 0, running.stderr
        lines = running.lines
        absent = "for rank 1 (which is not in its engine, after step 0)"
        starts = ("the start of generation 1", "generation 1")
        assert lines == [f"alspec: rank 0 waits in {where} {absent}" for where in starts]


@pytest.mark.slow
def test_ranks_without_torchrun(tiny_folder: Path, tmp_path: Path) -> None:
    """Rank 0 has the store: for the next engine, for ranks that are slow to close, and gone once it has left."""
    program = write_program(
        tmp_path,
        """
import atexit, gc
list(stream(engine))
release = engine._release
engine._release = lambda: (time.sleep(rank), release())
engine.close()
del engine, release
if rank == 0:
    time.sleep(1)
    gc.collect()
engine = Engine.from_pretrained(sys.argv[1], transport="gloo")
atexit.register(engine.close)  # called after the goodbye at the interpreter's end
list(stream(engine))
if rank == 0:
    sys.exit(0)
time.sleep(5)
print("alone", flush=True)
""",
    )
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(tiny_folder)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert [stdout for stdout, _ in outputs] == ["", "alone\n"]
    assert not any("Traceback" in stderr for _, stderr in outputs), outputs


class SlowStore:
    """Holds what the heartbeat's thread sets until another thread has set something, or has been kept from it."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.holds, self._other = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        is_other = threading.current_thread() is threading.main_thread()
        if not is_other:
            self.holds.set()
            self._other.wait(1.0)
        self._store.set(key, value)
        if is_other:
            self._other.set()


def test_a_cause_that_is_told_is_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the beating thread is between a record's building and its setting."""
    store = dist.HashStore()
    monkeypatch.setattr(faults, "connect_store", lambda placement: store)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    other, own = (faults.Heartbeat(Placement(rank, 2, rank, 2)) for rank in range(2))
    starting = threading.Thread(target=other.start)
    starting.start()
    own.start()
    starting.join()
    other.stop()
    slow = SlowStore(own._store)
    own._store = slow
    assert slow.holds.wait(5)
    own.tell(RankFailureError("a full disk"))
    own._end_watch()
    assert json.loads(store.get("alspec/beat/1"))["cause"] == "a full disk"


# What the beat and the process say, how long it has been silent, and whether it is then lost to a rank with 4 s for it.
SILENCES = {
    "another host": ({}, "silent", 4.1, True),
    "another host, in time": ({}, "silent", 3.9, False),
    "another host, patient": ({"grace_s": 60.0}, "silent", 59.0, False),
    "patient for too long": ({"grace_s": 60.0}, "running", 61.0, True),
    "closed meanwhile": ({"ended": "closed"}, "silent", 61.0, False),
    "not started": ({"has_started": False}, "silent", 61.0, False),
}


@pytest.mark.parametrize(("said", "state", "silent_s", "is_lost"), SILENCES.values(), ids=SILENCES)
def test_how_long_a_rank_may_be_silent(said: dict[str, Any], state: str, silent_s: float, is_lost: bool) -> None:
    """On another host nothing but its beats tells of a process; some ranks say that they will be long."""
    beat = {"step": 7, "op": "decode", "ended": "", "has_started": True, "grace_s": 0.0} | said
    lost = faults._stalled_rank_error(1, beat, state, silent_s, cpu_s=0.0, limit_s=4.0)
    line = f"rank 1 stalled at step 7, operation decode: {state}, no heartbeat for {silent_s:.1f} s"
    assert str(lost) == (line if is_lost else "None")


def spoil(folder: Path, name: str, row: int, column: int, value: float) -> None:
    """Overwrite one weight."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name][row, column] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# What is spoilt, and where it is first seen: layer 2's down_proj is split by columns over the ranks of a group, the LM
# head by rows over all ranks.
FAULTS = {
    "nan-in-down": ("model.layers.2.mlp.down_proj.weight", (3, 90), torch.nan, "layer 2"),
    "inf-in-down": ("model.layers.2.mlp.down_proj.weight", (3, 90), torch.inf, "layer 2"),
    "nan-in-lm-head": ("lm_head.weight", (300, 5), torch.nan, "the LM head"),
}


def spoilt_copy(tiny_folder: Path, tmp_path: Path, fault: str) -> tuple[Path, str]:
    """A folder with one bad weight, and the place that the message must name."""
    name, place, value, where = FAULTS[fault]
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "spoilt"))
    spoil(folder, name, *place, value)
    return folder, where


def bad_numbers(rank: int, where: str, step: int) -> str:
    return f"alspec: exit 4: NaN or Inf in the logits: first seen on rank {rank}, {where}, step {step};"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", ["off", "simulated"])
def test_bad_numbers_alone(
    tiny_folder: Path, tmp_path: Path, fault: str, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, where = spoilt_copy(tiny_folder, tmp_path, fault)
    code = main([*LONG, "--model", str(folder), "--speculation", mode])
    captured = capfd.readouterr()
    assert code == 4
    assert captured.out == ""
    assert captured.err.startswith(bad_numbers(0, where, 0))
    assert captured.err.count("\n") == 1


def test_overflow_of_fp16(tiny_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A weight beyond fp16 is Inf there, and the advice of the message, fp32, helps."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "spoilt"))
    spoil(folder, "model.layers.4.mlp.down_proj.weight", 1, 1, 70_000.0)
    flags = [*LONG[:2], "--max-new-tokens", "4", "--ignore-eos", "--transport", "gloo", "--model", str(folder)]
    assert main([*flags, "--dtype", "fp16"]) == 4
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(bad_numbers(0, "layer 4", 0))
    assert "--dtype fp32" in captured.err
    assert main([*flags, "--dtype", "fp32"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "mode", "rank"), [("nan-in-down", "off", 1), ("inf-in-down", "paired", 0), ("nan-in-lm-head", "off", 1)]
)
def test_bad_numbers_on_two_ranks(tiny_folder: Path, tmp_path: Path, fault: str, mode: str, rank: int) -> None:
    """Under tensor parallelism the bad weight is rank 1's; both ranks of a pair have it, and the first is named."""
    folder, where = spoilt_copy(tiny_folder, tmp_path, fault)
    with job(tmp_path, 2, [*LONG, "--model", str(folder), "--speculation", mode]) as running:
        running.torchrun.wait(timeout=90)
        # The last rank to leave may also report (exit 5) that the first one has left.
        lines = [line for line in running.lines if line.startswith("alspec: exit 4")]
        assert lines, running.stderr
        assert all(line.startswith(bad_numbers(rank, where, 0)) for line in lines)
        assert running.stdout == ""


def test_no_token_after_bad_numbers(tiny_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A token whose embedding is bad spoils the step that reads it: what came before is printed, nothing after."""
    flags = [*LONG, "--speculation", "off"]
    flags[flags.index("100000")] = "12"
    assert main([*flags, "--model", str(tiny_folder), "--json", str(tmp_path / "run.json")]) == 0
    whole = capfd.readouterr().out
    token_ids = json.loads((tmp_path / "run.json").read_text())["requests"][0]["token_ids"]
    step, token_id = next(
        (index, token) for index, token in enumerate(token_ids) if index >= 3 and token not in token_ids[:index]
    )
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "spoilt"))
    spoil(folder, "model.embed_tokens.weight", token_id, 0, torch.nan)
    assert main([*flags, "--model", str(folder)]) == 4
    captured = capfd.readouterr()
    assert captured.out[1:].endswith("\n"), "some text, and the error on a line of its own"
    assert whole.startswith(captured.out[:-1])
    assert captured.err.startswith(bad_numbers(0, "layer 0", step + 1))
