"""`close` after an error: the job ends soon and names the cause if a rank is missed, and closes in order if not.

Also: an engine that could not load leaves nothing behind.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from jobs import GONE_WITHIN_S, job, write_program
from tiers import fast

IN_FINALLY = """
try:
    work()
finally:
    engine.close()
"""
# How rank 1 gets to `close` -> (the error that it raises before, the end of its program).
ERRORS = {
    "finally": ("ValueError", IN_FINALLY),
    "as collectives raise": ("RuntimeError", IN_FINALLY),
    "end of the interpreter": ("ValueError", "list(stream(engine, 1)); atexit.register(engine.close); work()"),
    "guarded": (
        "RuntimeError",
        """
with guarded(engine.heartbeat):
    try:
        work()
    finally:
        engine.close()
""",
    ),
    "caught": (
        "ValueError",
        """
try:
    try:
        work()
    finally:
        engine.close()
except ValueError:
    traceback.print_exc()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(60)
""",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", fast(list(ERRORS), keep=["finally"]))
def test_a_rank_that_closes_after_an_error_is_named_and_shows_its_error(
    how: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Rank 1 fails between two steps. Rank 0 waits for it in the next step and names it."""
    kind, ending = ERRORS[how]
    program = write_program(
        tmp_path,
        f"""
import atexit, traceback
def work():
    for index, token in enumerate(stream(engine, 100)):
        if rank == 1 and index == 3:
            print(time.time(), flush=True)
            raise {kind}("no such token")
{ending}
""",
    )
    with job(tmp_path, 2, [str(tiny_folder)], program) as running:
        running.torchrun.wait(timeout=60)
        seconds = time.time() - float(running.stdout)
        lines = [line for line in running.lines if line.startswith("alspec: exit")]
        cause = rf"rank 1 closed its engine after an error at step 3, operation .+: {kind}: no such token"
        assert len(lines) == 1, running.stderr
        assert re.fullmatch(f"alspec: exit 5: {cause}", lines[0]), running.stderr
        own, _, summary = running.stderr.partition("Root Cause")
        assert own.count(f"{kind}: no such token\n") == 2, running.stderr  # the line, and the end of a traceback
        assert own.count("raise " + kind) == 1
        assert "During handling of the above exception" not in own
        assert re.search(f"traceback : alspec: exit 5: {cause}", summary)
        assert seconds < GONE_WITHIN_S


# The errors of all ranks, and by how many seconds rank 1 is later.
ERRORS_OF_ALL = [(["ValueError"], 3), (["ValueError", "RuntimeError", "SystemExit"], 6)]


@pytest.mark.slow
@pytest.mark.parametrize(("errors", "late_s"), fast(ERRORS_OF_ALL, keep=[]), ids=["one error", "each kind of error"])
def test_ranks_that_all_fail_close_together_and_go_on(
    errors: list[str], late_s: int, tiny_folder: Path, tmp_path: Path
) -> None:
    """However late one of them is, they continue with another engine. A rank that handles an error closes normally."""
    program = write_program(
        tmp_path,
        f"""
from alspec.runtime.faults import heartbeat
heartbeat.NOTICE_S = 2
for error in ({", ".join(errors)},):
    try:
        list(stream(engine))
        try:
            time.sleep({late_s} * rank)
            raise error("no such row")
        finally:
            engine.close()
    except error as found:
        sys.stdout.write(f"{{found}}\\n")
    engine = Engine.from_pretrained(sys.argv[1], transport="gloo")
try:
    raise ValueError("no such file")
except ValueError as error:
    list(stream(engine))
    if rank == 1:
        engine.close()
if rank == 0:
    engine.close()
sys.stdout.flush()
""",
    )
    with job(tmp_path, 2, [str(tiny_folder)], program) as running:
        assert running.torchrun.wait(timeout=90) == 0, running.stderr
        assert running.stdout.splitlines() == ["no such row"] * 2 * len(errors)
        lines = running.lines
        waits = "alspec: rank 0 closes after {}: no such row; waiting for the others to close"
        assert lines == [waits.format(error) for error in errors]


@pytest.mark.full
@pytest.mark.slow
def test_after_a_transport_that_does_not_work_engines_start_again(tiny_folder: Path, tmp_path: Path) -> None:
    """The same engine and another one load. On GPUs this is an engine with `transport` = `symm`."""
    program = write_program(
        tmp_path,
        """
import dataclasses, torch
import alspec.runtime.engine.composition as module
works = module.probe_peer_memory
module.probe_peer_memory = lambda ways, transport: (None, "a packet did not arrive")
engine._choices = dataclasses.replace(engine._choices, candidates=("symm",))
lines = []
for attempt in range(2):
    try:
        list(stream(engine))
    except module.UserError as error:
        lines.append(f"{error} {torch.distributed.is_initialized()}")
module.probe_peer_memory, engine._choices = works, dataclasses.replace(engine._choices, candidates=())
lines.append(str([token.token_id for token in stream(engine)]))
engine.close()
with Engine.from_pretrained(sys.argv[1], transport="gloo") as another:
    lines.append(str([token.token_id for token in stream(another)]))
if rank == 0:
    print(*lines, sep="\\n")
""",
    )
    with job(tmp_path, 2, [str(tiny_folder)], program) as running:
        assert running.torchrun.wait(timeout=60) == 0, running.stderr
        lines = running.stdout.splitlines()
    refused = "transport: gloo does not work here: a packet did not arrive; use auto or nccl False"
    assert lines[:2] == [refused] * 2
    assert re.fullmatch(r"\[\d+, \d+, \d+\]", lines[2])
    assert lines[3:] == [lines[2]]


@pytest.mark.full
@pytest.mark.slow
def test_ranks_that_cannot_connect_each_print_one_line(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line says that Gloo cannot connect, not that a rank was lost."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch9")
    with job(tmp_path, 2, ["--model", str(tiny_folder), "--prompt-ids", "1,2"]) as running:
        assert running.torchrun.wait(timeout=60) != 0
        lines = running.lines
    assert "runtime/distributed/transport.py" not in running.stderr, "alspec shows a traceback"
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("alspec: exit 5: transport: gloo cannot connect the ranks: ")
        assert "nosuch9; check that host names resolve; GLOO_SOCKET_IFNAME selects the network interface" in line


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        ("alspec.runtime.engine.resources", "Llama", 'torch.OutOfMemoryError("too little")'),
        pytest.param("torch.distributed", "new_group", 'RuntimeError("reset")', marks=pytest.mark.full),
        pytest.param("torch.distributed", "new_group", "KeyboardInterrupt()", marks=pytest.mark.full),
    ],
)
def test_a_load_that_failed_can_be_repeated(
    tmp_path: Path, tiny_folder: Path, module: str, name: str, error: str
) -> None:
    """On all ranks, after they had connected or while they did; and another engine can follow."""
    program = write_program(
        tmp_path,
        f"""
import torch, {module} as module
from unittest import mock
with mock.patch.object(module, "{name}", side_effect={error}):
    try:
        engine.load(1, 64)
    except BaseException as found:
        print(type(found).__name__, flush=True)
engine.load(1, 64)
engine.close()
with Engine.from_pretrained(sys.argv[1], transport="gloo") as engine:
    assert len(list(stream(engine))) == 3
print("done", flush=True)
""",
    )
    with job(tmp_path, 2, [str(tiny_folder)], program) as running:
        assert running.torchrun.wait(timeout=60) == 0, running.stderr
    assert running.stdout.count("done") == 2
