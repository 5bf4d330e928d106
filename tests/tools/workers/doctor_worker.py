"""The installation check with a fault in one check on one rank: `doctor_worker.py HOW:RANK:CHECK FLAGS`."""

import os
import signal
import sys
import time

from alspec.launch import doctor
from alspec.runtime.doctor import diagnostics
from alspec.runtime.doctor.checkup import Scope, check


def main() -> int:
    how, rank, name = sys.argv[1].split(":")
    healthy = diagnostics.CHECKS[name]

    def find(scope: Scope) -> str:
        if scope.placement.rank != int(rank):
            return healthy(scope).found
        if how == "hang":
            time.sleep(300)
        if how == "die":
            # Wait until the other rank is in this check too: on a busy machine torchrun may end it before it has
            # printed the outcome of the check before.
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("made to fail\nsecond line")

    check(name, "do something about it")(find)
    return doctor.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
