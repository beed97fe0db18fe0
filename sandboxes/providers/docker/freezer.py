"""Freezer of a container's cgroup, version 1 or 2: frozen, thawed and read in the kernel, without the engine.

The engine learns nothing of it and reports a container that is frozen in this way as running. The kernel's state is therefore
the only one to rely on: it is the same after the engine's pause, which writes the same file."""

import os
import time
from pathlib import Path
from typing import NamedTuple

FREEZE_TIMEOUT_SECONDS = 2.0  # until all processes have stopped; a process in an uninterruptible call takes longer
POLL_INTERVAL_SECONDS = 0.001
CGROUPS_DIRECTORY = Path("/sys/fs/cgroup")


class Freezer(NamedTuple):
    """Control file of one cgroup, which this process can read. All methods raise OSError if the cgroup is gone."""

    control: Path  # version 1: freezer.state; version 2: cgroup.freeze

    def is_writable(self) -> bool:
        return os.access(self.control, os.W_OK)

    def is_frozen(self) -> bool:
        """Return whether the processes are frozen, or are being frozen."""
        return self.control.read_text().strip() not in ("THAWED", "0")

    def freeze(self) -> None:
        """Freeze all processes of the cgroup. Raise TimeoutError, with the processes thawed, if they do not stop in time."""
        deadline = time.monotonic() + FREEZE_TIMEOUT_SECONDS
        self._write(frozen=True)
        while not self._is_settled():
            if time.monotonic() > deadline:
                self.thaw()
                raise TimeoutError(f"The processes do not stop within {FREEZE_TIMEOUT_SECONDS:.0f} s.")
            time.sleep(POLL_INTERVAL_SECONDS)
            self._write(frozen=True)  # version 1 freezes only the processes that exist at each write

    def thaw(self) -> None:
        self._write(frozen=False)

    @property
    def _is_unified(self) -> bool:
        return self.control.name == "cgroup.freeze"

    def _write(self, *, frozen: bool) -> None:
        value = str(int(frozen)) if self._is_unified else "FROZEN" if frozen else "THAWED"
        with self.control.open("w") as control:
            control.write(value)

    def _is_settled(self) -> bool:
        if self._is_unified:
            return "frozen 1" in self.control.with_name("cgroup.events").read_text().splitlines()
        return self.control.read_text().strip() == "FROZEN"


def find_freezer(pid: int, container: str) -> Freezer | None:
    """Return the freezer of the container with this full id, to which the process belongs.

    None if the process is not visible, is not in the container's own cgroup, or the kernel has no freezer there."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}
    version_1 = "freezer" in paths
    path = Path(paths["freezer"] if version_1 else paths.get("", "/"))
    # The pid may have been reused, or mean another process here. A cgroup below the container's own lacks processes.
    if container not in path.name:
        return None
    directory = CGROUPS_DIRECTORY / "freezer" if version_1 else CGROUPS_DIRECTORY
    control = directory / path.relative_to("/") / ("freezer.state" if version_1 else "cgroup.freeze")
    return Freezer(control) if os.access(control, os.R_OK) else None
