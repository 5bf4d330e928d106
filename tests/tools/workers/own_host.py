"""Run a program as on a host of its own, which its torchrun stands for: `own_host.py PROGRAM ARGUMENTS`.

Ranks of different torchruns do not see each other's processes, so a rank that is gone is only silent.
"""

import os
import runpy
import sys

from alspec.runtime.faults import heartbeat, processes

if __name__ == "__main__":
    own = f"{processes.host()} {os.environ['GROUP_RANK']}"
    processes.host = heartbeat.host = lambda: own
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
