"""File systems that can be filled."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers.services import skip_or_fail


@contextmanager
def small_disk(at: Path, size: str) -> Iterator[Callable[[], Path]]:
    """Mount a file system of this size, such as "256k". Requires root. Yields a function that fills the disk and returns the
    file to remove."""
    at.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "lh-full", at], capture_output=True, text=True)
    if mount.returncode:
        skip_or_fail(f"no file system can be mounted here: {mount.stderr.strip()}")

    def fill() -> Path:
        filled = subprocess.run(["dd", "if=/dev/zero", f"of={at}/filler", "bs=4096"], capture_output=True, text=True)
        assert "No space left" in filled.stderr
        return at / "filler"

    try:
        yield fill
    finally:
        subprocess.run(["umount", at], check=True)
