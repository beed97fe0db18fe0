"""Wall clock of the control plane's processes, set apart from that of the host by a preloaded library."""

import struct
import subprocess
from datetime import timedelta
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class ShiftedClock:
    """Clock that processes with `env` read. Their monotonic clock, and the database's clock, are those of the host."""

    def __init__(self, directory: Path) -> None:
        self._shift, library = directory / "clock", directory / "clock.so"
        self.set(timedelta(0))
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
        self.env = {"LD_PRELOAD": str(library), "TEST_CLOCK_SHIFT": str(self._shift)}

    def set(self, shift: timedelta) -> None:
        """Shift the clock of all processes at once. Written in place: the processes have mapped the file."""
        content = struct.pack("=q", shift // timedelta(microseconds=1) * 1000)
        with self._shift.open("r+b" if self._shift.exists() else "wb") as file:
            file.write(content)
