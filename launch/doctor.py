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
    from alspec.launch.terminal.output import exit_on_interrupt, is_special, write_text
except ImportError as error:  # `report` is in what is missing
    print(f"alspec: exit 2: doctor: cannot import alspec: {error}; pip install -e . in its folder", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":  # before the imports that take seconds
    exit_on_interrupt()

# That torch or Triton cannot be imported is a finding too: report it like any other.
try:
    from rich.console import Console
    from rich.text import Text

    from alspec.config import DoctorConfig
    from alspec.launch.terminal.flags import Parser, check_writable, run_command
    from alspec.runtime.distributed.placement import Placement
    from alspec.runtime.doctor.checkup import Check, run_checks
    from alspec.runtime.doctor.diagnostics import CHECKS
    from alspec.runtime.faults.heartbeat import Heartbeat, run_guarded
except (ImportError, OSError) as error:
    sys.exit(report(UserError(f"doctor: cannot import what alspec needs: {error}; install alspec again with pip")))

__all__ = ["main"]

EPILOG = (
    "Alone it looks at every GPU of this host; under torchrun, one rank for each GPU, also at what connects them. "
    "exit code: 0 nothing failed, 2 the setup is at fault, 5 a rank failed or stalled."
)
# Of several ranks' outcomes the first in this order is shown.
COLORS = {"fail": "red", "pass": "green", "skip": "yellow"}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="doctor", description="Check an installation.", epilog=EPILOG)
    return run_command(parser, DoctorConfig, argv, lambda config, _: _examine(config))


def _examine(config: DoctorConfig) -> int:
    check_writable("flags: --json", config.json_file)
    placement = Placement.from_environment()
    # One call, such as CUDA's start, may keep a rank from beating for as long as a check may take.
    heartbeat = Heartbeat(placement, patience_s=config.deadline)
    outcomes = run_checks(placement, config.transport, config.deadline, heartbeat, config.debug)
    width = max(map(len, CHECKS))
    return run_guarded(heartbeat, lambda: _print(outcomes, config.json_file, placement.rank == 0, width))


def _print(outcomes: Iterable[list[Check]], json_file: Path | None, is_first: bool, width: int) -> int:
    """A line for each check as it comes, from rank 0; every rank returns the same exit code."""
    console = Console(highlight=False)
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
        # Written anew after each check: a stall in the next one ends the process.
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
    """Status and text of a check: those of the first rank that failed, else passed."""
    order = list(COLORS)
    rank, first = min(enumerate(by_rank), key=lambda item: order.index(item[1].status))
    found = first.found if len({check.found for check in by_rank}) == 1 else f"rank {rank}: {first.found}"
    return first.status, f"{found}; {first.advice}" if first.status == "fail" else found


if __name__ == "__main__":
    sys.exit(main())
