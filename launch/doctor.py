"""Check an installation: `python launch/doctor.py`, or `torchrun --standalone --nproc-per-node 4 launch/doctor.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

try:
    from alspec.errors import RankFailureError, UserError, report
    from alspec.launch.terminal.output import exit_code, exit_on_interrupt, is_special, result_console, write_text
except ImportError as error:  # `report` itself could not be imported
    print(f"alspec: exit 2: doctor: cannot import alspec: {error}; pip install -e . in its folder", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":  # before the slow imports
    exit_on_interrupt()

# A failed import of torch or Triton is a finding too: report it like any other.
try:
    from rich.text import Text

    from alspec.config import DoctorConfig
    from alspec.launch.terminal.flags import Parser, check_writable, parse_command
    from alspec.runtime.distributed.placement import Placement
    from alspec.runtime.doctor.checkup import Check, run_checks
    from alspec.runtime.doctor.diagnostics import CHECKS
    from alspec.runtime.faults.guard import guarded
    from alspec.runtime.faults.heartbeat import Heartbeat
except (ImportError, OSError) as error:
    sys.exit(report(UserError(f"doctor: cannot import what alspec needs: {error}; install alspec again with pip")))

__all__ = ["main"]

EPILOG = (
    "Without torchrun it checks every GPU of this host; under torchrun, with one rank for each GPU, also their links. "
    "Exit code: 0 nothing failed, 2 the setup is wrong, 5 a rank failed or stalled."
)
# If ranks have different outcomes, the first in this order is shown.
COLORS = {"fail": "red", "pass": "green", "skip": "yellow"}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="doctor", description="Check an installation.", epilog=EPILOG)
    with exit_code(argv) as outcome:
        config, _ = parse_command(parser, DoctorConfig, argv, outcome)
        outcome.code = _examine(config)
    return outcome.code


def _examine(config: DoctorConfig) -> int:
    check_writable("flags: --json", config.json_file)
    placement = Placement.from_environment()
    # A single call, such as the start of CUDA, may block a rank's heartbeat for the time limit of a check.
    heartbeat = Heartbeat(placement, grace_s=config.deadline)
    outcomes = run_checks(placement, config.transport, config.deadline, heartbeat, config.debug)
    width = max(map(len, CHECKS))
    with guarded(heartbeat):
        return _print(outcomes, config.json_file, placement.rank == 0, width)


def _print(outcomes: Iterable[list[Check]], json_file: Path | None, is_first: bool, width: int) -> int:
    """Rank 0 prints a line after each check. Every rank returns the same exit code."""
    console = result_console(json_file, highlight=False)
    checks: list[Check] = []
    rows = []
    for by_rank in outcomes:
        checks += by_rank
        rows += [asdict(check) | {"rank": rank} for rank, check in enumerate(by_rank)]
        if not is_first:
            continue
        status, text = _line(by_rank)
        console.print(
            Text.assemble(f"{by_rank[0].name:<{width}}  ", (status, COLORS[status]), f"  {text}"), soft_wrap=True
        )
        sys.stdout.flush()
        # Write the file again after each check: a stall in the next one ends the process.
        if json_file is not None and not is_special(json_file):
            _write(json_file, rows)
    if json_file is not None and is_first and is_special(json_file):
        _write(json_file, rows)
    failed = [check for check in checks if check.status == "fail"]
    if not failed:
        return 0
    kind = UserError if any(check.exit_code == UserError.exit_code for check in failed) else RankFailureError
    names = ", ".join(dict.fromkeys(check.name for check in failed))
    return report(kind(f"doctor: failed: {names}; the table says what to do"))


def _write(json_file: Path, rows: list[dict[str, Any]]) -> None:
    write_text(json_file, json.dumps({"world_size": 1 + rows[-1]["rank"], "checks": rows}, indent=1))


def _line(by_rank: list[Check]) -> tuple[str, str]:
    """Status and text of a check, from the rank whose status comes first in `COLORS`."""
    order = list(COLORS)
    rank, first = min(enumerate(by_rank), key=lambda item: order.index(item[1].status))
    found = first.found if len({check.found for check in by_rank}) == 1 else f"rank {rank}: {first.found}"
    return first.status, f"{found}; {first.advice}" if first.status == "fail" else found


if __name__ == "__main__":
    sys.exit(main())
