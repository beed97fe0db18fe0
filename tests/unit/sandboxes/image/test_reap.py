"""Process reaper on this host."""

import os
import subprocess
import sys
from uuid import uuid4

from sandboxes.image import reap

# Its memory takes tens of milliseconds to free, during which it has no environment and is no zombie yet.
LARGE = "import time\nx = bytearray(400 << 20)\nx[::4096] = b'x' * len(x[::4096])\nprint(flush=True)\ntime.sleep(300)"


def test_killed_processes_are_dead_before_their_end_is_reported() -> None:
    mark = uuid4().hex
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", LARGE], env=os.environ | {reap.MARK_VARIABLE: mark}, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        assert reap.kill_tree(mark) == 1
        with open(f"/proc/{child.pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    assert state == b"Z"
