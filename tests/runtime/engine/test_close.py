"""`close` while an error is on its way: the job ends soon and by name where a rank is missed, in order elsewhere.

And what an engine that could not load leaves behind.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from jobs import GONE_WITHIN_S, job, write_program

IN_FINALLY = """
try:
    work()
finally:
    engine.close()
"""
# How rank 1 comes to `close`, and what it raises before.
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
@pytest.mark.parametrize(("kind", "ending"), ERRORS.values(), ids=ERRORS)
def test_close_after_an_error(kind: str, ending: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Of one rank, between two steps: the other, which waits for it in the next one, names it; the error is seen."""
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


@pytest.mark.slow
def test_close_after_an_error_of_all(tiny_folder: Path, tmp_path: Path) -> None:
    """They meet, however late one of them comes, and go on with another engine; so does one that handles an error."""
    program = write_program(
        tmp_path,
        """
from alspec.runtime.faults import heartbeat
heartbeat.NOTICE_S = 2
for error in (ValueError, RuntimeError, SystemExit):
    try:
        list(stream(engine))
        try:
            time.sleep(6 * rank)
            raise error("no such row")
        finally:
            engine.close()
    except error as found:
        sys.stdout.write(f"{found}\\n")
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
        assert running.stdout.splitlines() == ["no such row"] * 6
        lines = running.lines
        waits = "alspec: rank 0 closes after {}: no such row; waiting for the others to close"
        assert lines == [waits.format(error) for error in ("ValueError", "RuntimeError", "SystemExit")]


@pytest.mark.slow
def test_a_transport_that_does_not_work_leaves_nothing_behind(tiny_folder: Path, tmp_path: Path) -> None:
    """The same engine may start over, and so may another one; with GPUs that is one asked for `symm`."""
    program = write_program(
        tmp_path,
        """
import dataclasses
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


@pytest.mark.slow
def test_ranks_that_cannot_connect_say_so(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each; nobody was lost."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch9")
    with job(tmp_path, 2, ["--model", str(tiny_folder), "--prompt-ids", "1,2"]) as running:
        assert running.torchrun.wait(timeout=60) != 0
        lines = running.lines
    assert "runtime/distributed/transport.py" not in running.stderr, "a traceback of our own"
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("alspec: exit 5: transport: gloo cannot connect the ranks: ")
        assert "nosuch9; check that host names resolve; GLOO_SOCKET_IFNAME selects the network interface" in line
