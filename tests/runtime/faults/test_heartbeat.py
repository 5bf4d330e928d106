"""A rank that dies, stalls, fails, leaves or is interrupted ends the whole job soon, and the job names that rank.

The fast tier keeps one job of each of these faults: killed, stopped, interrupted, failed, left early, stalled.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from jobs import (
    GONE_WITHIN_S,
    LONG,
    default_interrupts,
    free_port,
    is_running,
    job,
    run_failing_program,
    write_program,
)
from tiers import fast

from alspec.errors import RankFailureError
from alspec.interrupts import interrupts_wait
from alspec.runtime.distributed.placement import Placement
from alspec.runtime.faults import bounded_store, guard, heartbeat
from alspec.runtime.faults.heartbeat import TERMINATED_LIMIT_S

MODES = {
    "paired": ["--speculation", "paired"],
    "off": ["--speculation", "off"],
    "rounds": ["--draft", "self", "--draft-always"],
}
# Number of ranks, mode, the rank that gets the signal, the signal.
LOST_RANKS = [
    (2, "paired", 0, signal.SIGKILL),
    (2, "paired", 1, signal.SIGKILL),
    (2, "paired", 0, signal.SIGSTOP),
    (2, "paired", 1, signal.SIGSTOP),
    (4, "off", 3, signal.SIGKILL),
    (4, "off", 0, signal.SIGSTOP),
    (2, "rounds", 1, signal.SIGKILL),
    (2, "rounds", 0, signal.SIGSTOP),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "mode", "rank", "sent"),
    fast(LOST_RANKS, keep=[(2, "paired", 1, signal.SIGKILL)]),
    ids=[f"{mode}{n}-{sent.name}-rank{rank}" for n, mode, rank, sent in LOST_RANKS],
)
def test_a_rank_that_is_killed_or_stopped_is_named(
    tiny_folder: Path, tmp_path: Path, world_size: int, mode: str, rank: int, sent: signal.Signals
) -> None:
    """The signal arrives in the middle of a generation."""
    with job(tmp_path, world_size, [*LONG, "--model", str(tiny_folder), *MODES[mode]]) as running:
        running.wait_for_tokens()
        assert sorted(running.ranks) == list(range(world_size))
        os.kill(running.ranks[rank], sent)
        seconds = running.seconds_until_gone()
        assert seconds < GONE_WITHIN_S
        assert running.torchrun.returncode != 0
        lines = [line for line in running.lines if line.startswith("alspec: exit")]
        # A survivor ends a stopped rank, so another survivor may find it dead. No survivor is blamed.
        pattern = rf"alspec: exit 5: rank {rank} (died|stalled) at step (\d+), operation \w+"
        named = [re.match(pattern, line) for line in lines]
        assert named, running.stderr
        assert all(named), running.stderr
        assert all(int(match[2]) >= 1 for match in named if match)
        assert any(match[1] == ("died" if sent == signal.SIGKILL else "stalled") for match in named if match)
        assert "Traceback (most recent call last)" not in "".join(lines)


# Call -> (its code, the time that a busy rank gets, what the job says about the stall).
LONG_CALLS = {
    "computes": ("compute(7)", 60, None),
    "computes for too long": ("compute(40)", 6, r"running, no heartbeat for [6-9]\.\d s"),
    "waits": ("ctypes.PyDLL(None).sleep(40)", 60, r"running, no heartbeat for [45]\.\d s"),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", fast(list(LONG_CALLS), keep=["waits"]))
def test_a_rank_in_a_call_that_holds_pythons_lock_stalls_unless_it_computes(
    call: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Such a rank sends no heartbeat. While it computes, it gets more time."""
    code, limit_s, found = LONG_CALLS[call]
    program = write_program(
        tmp_path,
        f"""
import ctypes
from alspec.runtime.faults import heartbeat
heartbeat.LOAD_LIMIT_S = {limit_s}
def compute(seconds):
    sys.setswitchinterval(100)  # no other thread runs
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass
    sys.setswitchinterval(0.005)
tokens = stream(engine)
next(tokens)
time.sleep(1)  # for a beat after loading
if rank == 1:
    {code}
sys.stdout.write(f"{{len(list(tokens))}} more\\n")
sys.stdout.flush()
engine.close()
""",
    )
    with job(tmp_path, 2, [str(tiny_folder)], program) as running:
        exit_code = running.torchrun.wait(timeout=60)
        lines = running.lines
        if found is None:
            assert (exit_code, lines) == (0, []), running.stderr
            assert running.stdout.splitlines() == ["2 more"] * 2
        else:
            assert len(lines) == 1, running.stderr
            assert re.fullmatch(rf"alspec: exit 5: rank 1 stalled at step 0, operation .+: {found}", lines[0])


@pytest.mark.slow
def test_sigterm_to_torchrun_ends_all_ranks_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    """No rank is blamed, and none waits to see which one failed."""
    with job(tmp_path, 2, [*LONG, "--model", str(tiny_folder), "--speculation", "paired"]) as running:
        running.wait_for_tokens()
        sent_s = time.monotonic()
        running.torchrun.send_signal(signal.SIGTERM)
        while any(map(is_running, running.ranks.values())):
            assert time.monotonic() - sent_s < TERMINATED_LIMIT_S, running.stderr
            time.sleep(0.02)
        assert running.seconds_until_gone() < GONE_WITHIN_S
        assert running.torchrun.returncode != 0
        assert running.lines == ["alspec: exit 143: terminated"] * 2, running.stderr


def test_an_interrupt_during_a_read_of_weights_is_published_at_once() -> None:
    """A read of a hung file may never end, and SIGINT has another handler meanwhile."""
    published, ended = threading.Event(), threading.Event()
    beats: Any = SimpleNamespace(
        placement=Placement(0, 2, 0, 2),
        publish_error=lambda _: published.set(),
        end_process=lambda _: ended.set(),
    )

    def read() -> None:
        with guard._ended_by_interrupt(beats), interrupts_wait():
            os.kill(os.getpid(), signal.SIGINT)
            assert published.wait(10)
            assert ended.wait(10)

    with default_interrupts(), pytest.raises(KeyboardInterrupt):
        read()


@pytest.mark.slow
def test_ctrl_c_ends_every_rank_with_one_line(tiny_folder: Path, tmp_path: Path) -> None:
    """Rank 0 is blocked in a collective, which rank 1 never joins."""
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


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "own_lines", "named"),
    [
        ('OSError(28, "No space left on device")', [], r"OSError: \[Errno 28\] No space left on device"),
        ('UserError("cannot write F: disk full")', ["alspec: exit 2: cannot write F: disk full"], "cannot write F: .*"),
    ],
    ids=["unexpected", "one line"],
)
def test_an_error_inside_guarded_is_named_by_the_other_rank(
    error: str, own_lines: list[str], named: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Rank 0 fails, for example because a disk is full. Rank 1 waits for it and names the cause, not a lost peer."""
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


@pytest.mark.full
@pytest.mark.slow
def test_a_program_keeps_its_signals_restarts_threads_and_second_engine(tiny_folder: Path, tmp_path: Path) -> None:
    """It is restarted, handles signals, catches Ctrl-C, closes an engine in a thread, and leaves another one open."""
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
sys.stdout.write(f"{found}\\n")  # one write: the other rank writes to the same file
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


@pytest.mark.full
@pytest.mark.slow
def test_an_error_after_the_others_have_left_stays_what_it_is(tiny_folder: Path, tmp_path: Path) -> None:
    """The failed rank did not wait for the rank that left, so that rank is not blamed."""
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


@pytest.mark.full
@pytest.mark.slow
def test_after_a_caught_error_no_rank_waits_for_the_others(tiny_folder: Path, tmp_path: Path) -> None:
    """Both ranks cancel a generation. One ends soon, the other later. An error after `stop` is the program's own."""
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
def test_an_uncaught_error_is_named_by_the_other_rank(tiny_folder: Path, tmp_path: Path) -> None:
    """The program does not use `guarded`. The other rank may or may not see its own collective fail first."""
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
# What rank 0 does after rank 1 has left.
NEEDS_THE_OTHER = {
    "generation": "list(stream(engine, 100))",
    "step": "list(tokens)",
    "wait": 'with engine.heartbeat.waiting("a test"): time.sleep(60)',
}


@pytest.mark.slow
@pytest.mark.parametrize("need", fast(list(NEEDS_THE_OTHER), keep=["step"]))
def test_a_rank_that_leaves_early_is_named_once_it_is_needed(need: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Rank 1 exits with code 0 and without `close`. "wait" fails in no collective, as on GPUs."""
    text = f"""{THREE_TOKENS}
if rank == 1:
    sys.exit(0)
time.sleep(6)
print("alone", flush=True)
def work():
    {NEEDS_THE_OTHER[need]}
with guarded(engine.heartbeat):
    work()
"""
    ended = run_failing_program(tmp_path, tiny_folder, text)
    assert ended.stdout.splitlines() == ["alone"], "rank 0 ended before it needed rank 1"
    pattern = r"alspec: exit 5: rank 1 left at step 2, operation .+ without closing its engine"
    assert len(ended.lines) == 1, ended.stderr
    assert re.fullmatch(pattern, ended.lines[0]), ended.stderr


PLACE = r" at step \d+, operation [\w ,]+"
PARTED = "ranks wait for each other in different places: rank 0 in generation 1" + PLACE + ", rank 1 in {}" + PLACE
# What rank 1 does after three tokens of generation 1, which rank 0 continues, and what the job then says.
PARTINGS = {
    "another generation": ("next(stream(engine))", PARTED.format("the start of generation 2")),
    "close": ("engine.close()", PARTED.format("close")),
    "close, later": ("time.sleep(6); engine.close()", PARTED.format("close")),
}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("other", "line"), PARTINGS.values(), ids=PARTINGS)
def test_ranks_that_wait_in_different_places_end(other: str, line: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Otherwise each would wait for the other for ten minutes, or take its messages for other ones."""
    text = f"{THREE_TOKENS}\nif rank == 1:\n    {other}\nlist(tokens)\ntime.sleep(60)"
    ended = run_failing_program(tmp_path, tiny_folder, text, within_s=40)
    assert ended.lines
    assert all(re.fullmatch("alspec: exit 5: " + line, each) for each in ended.lines), ended.stderr


SOON_GONE = {
    "ends": ("sys.exit(0)", "rank 1 left at step 0, operation start without closing its engine"),
    "closes": ("engine.close(); time.sleep(60)", "rank 1 closed its engine at step 0, operation start without .+"),
    # Rank 1 took part, and dies before a beat tells its step.
    "killed": ("next(stream(engine)); os.kill(os.getpid(), 9)", "rank 1 died at step .+"),
}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("other", "line"), SOON_GONE.values(), ids=SOON_GONE)
def test_a_rank_that_is_gone_before_the_first_step_is_named(
    other: str, line: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Rank 0 waits for rank 1 in its first generation."""
    text = f"if rank == 1:\n    {other}\nlist(stream(engine))"
    ended = run_failing_program(tmp_path, tiny_folder, text, within_s=40)
    assert len(ended.lines) == 1, ended.stderr
    assert re.fullmatch("alspec: exit 5: " + line, ended.lines[0])


@pytest.mark.full
@pytest.mark.slow
def test_a_long_wait_for_a_rank_elsewhere_is_reported_and_goes_on(tiny_folder: Path, tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        """
from alspec.runtime.faults import heartbeat
heartbeat.NOTICE_S = 5.0
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
        places = ("the start of generation 1", "generation 1")
        assert lines == [f"alspec: rank 0 waits in {place} {absent}" for place in places]


@pytest.mark.full
@pytest.mark.slow
def test_ranks_without_torchrun_close_start_again_and_leave(tiny_folder: Path, tmp_path: Path) -> None:
    """Rank 0 hosts the store. It keeps it for slow ranks and for the next engine, and takes it along when it leaves."""
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
atexit.register(engine.close)  # called after the heartbeat's own exit handler
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
    """A store that delays `set` of the heartbeat's thread until the main thread has called `set`, or for a second."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.is_delaying, self._main_has_set = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main:
            self.is_delaying.set()
            self._main_has_set.wait(1.0)
        self._store.set(key, value)
        if is_main:
            self._main_has_set.set()


def test_a_published_cause_is_not_overwritten_by_an_older_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause is published while the heartbeat's thread is between building a beat and setting it."""
    store = dist.HashStore()
    monkeypatch.setattr(heartbeat, "connect_store", lambda placement: store)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    other, own = (heartbeat.Heartbeat(Placement(rank, 2, rank, 2)) for rank in range(2))
    starting = threading.Thread(target=other.start)
    starting.start()
    own.start()
    starting.join()
    other.stop()
    try:
        assert own._store is not None
        slow: Any = SlowStore(own._store)
        own._store = slow
        assert slow.is_delaying.wait(5)
        own.publish_error(RankFailureError("a full disk"))
    finally:
        own._end_watch()
    assert json.loads(store.get("alspec/beat/1"))["cause"] == "a full disk"


# What the beat says, the state of the process, how long it has sent no beat, and whether a rank that waits 4 s then
# counts it as lost.
SILENCES = {
    "another host": ({}, "silent", 4.1, True),
    "another host, in time": ({}, "silent", 3.9, False),
    "another host, with a grace period": ({"grace_s": 60.0}, "silent", 59.0, False),
    "after the grace period": ({"grace_s": 60.0}, "running", 61.0, True),
    "closed meanwhile": ({"ended": "closed"}, "silent", 61.0, False),
}


@pytest.mark.parametrize(("said", "state", "silent_s", "is_lost"), SILENCES.values(), ids=SILENCES)
def test_a_rank_without_beats_is_lost_after_its_limit(
    said: dict[str, Any], state: str, silent_s: float, is_lost: bool
) -> None:
    """Only the beats tell anything about a process on another host. A rank may announce that it will be silent."""
    beat = {"step": 7, "op": "decode", "ended": "", "grace_s": 0.0} | said
    lost = heartbeat._stalled_rank_error(1, beat, state, silent_s, cpu_s=0.0, limit_s=4.0)
    line = f"rank 1 stalled at step 7, operation decode: {state}, no heartbeat for {silent_s:.1f} s"
    assert str(lost) == (line if is_lost else "None")


def test_a_store_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a network that drops packets. The call that waits does not keep later ones."""
    monkeypatch.setattr(bounded_store, "ANSWER_LIMIT_S", 0.2)
    monkeypatch.setattr(bounded_store, "SECOND_CHANCE_S", 0.1)
    frozen = threading.Event()

    class Store(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            frozen.wait(timeout=20)
            return False

    store = bounded_store.BoundedStore(Store())
    store.set("a", "1")
    assert (store.get("a"), store.multi_get(["a"])) == (b"1", [b"1"])
    started = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match="does not answer"):
        store.check(["a"])
    with pytest.raises(dist.DistNetworkError, match="does not answer"):
        store.get("a")
    assert time.monotonic() - started < 2
    frozen.set()


def test_a_frozen_store_ends_the_ranks(tmp_path: Path, tiny_folder: Path) -> None:
    """Its host has no power, say: no connection breaks. torchrun, which holds the store, is stopped here."""
    endless = """
with guarded(engine.heartbeat):
    while True:
        for token in stream(engine, 20):
            print("token", flush=True)
"""
    with job(tmp_path, 2, [str(tiny_folder)], write_program(tmp_path, endless)) as running:
        running.wait_for_tokens()
        running.torchrun.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        while any(map(is_running, running.ranks.values())):
            assert time.monotonic() - started < 20, running.stderr
            time.sleep(0.1)
        running.torchrun.send_signal(signal.SIGCONT)
        assert running.torchrun.wait(timeout=30) != 0
    assert all(line.startswith("alspec: exit 5: ") for line in running.lines if "exit" in line), running.lines
