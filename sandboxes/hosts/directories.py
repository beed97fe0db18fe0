"""Directories below which other users of the host may write: ownership checks; changes of owner and mode that follow no link.

The control plane often runs as root. A user of the host who plants a symbolic link where root creates a directory would
otherwise become the owner of any file."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from sandboxes.providers.errors import Unavailable


class UnsafeDirectory(Unavailable):
    """Another user of the host controls the directory."""


def ensure_private_directory(directory: Path) -> None:
    """Create a directory with mode 0700, unless it exists. Raise UnsafeDirectory as `check_private_directory` does."""
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    check_private_directory(directory)


def check_private_directory(directory: Path) -> None:
    """Raise UnsafeDirectory unless the path is a directory, not a link, that only this user can enter and replace."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        problem = "is not a directory" if not stat.S_ISLNK(status.st_mode) else "is a symbolic link"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to the user id {status.st_uid}, not to {os.geteuid()}"
    elif status.st_mode & 0o077:
        problem = f"has the mode {stat.S_IMODE(status.st_mode):04o}, not 0700"
    elif (parent := os.stat(directory.parent)).st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        problem = f"can be replaced by every user: {directory.parent} is writable for all, without the sticky bit"
    else:
        return
    raise UnsafeDirectory(
        f"{directory} {problem}. Another user of this host may have prepared it. Remove it, or set LEASEHOLD_RUNTIME_DIR to a "
        "directory of the control plane's own."
    )


def ensure_directory(directory: Path, *, owner: int | None = None) -> Path:
    """Create a directory with mode 0755 below a private one, unless it exists, and return it.

    `owner` is the user and group id of the new owner. Raise UnsafeDirectory if the path is a link or not a directory."""
    directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o755)
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise UnsafeDirectory(f"{directory} is a symbolic link or not a directory. Remove it.") from error
    try:
        if owner is not None:
            os.fchown(descriptor, owner, owner)
    finally:
        os.close(descriptor)
    return directory


def chmod_no_follow(path: Path | str, mode: int) -> None:
    """Set the mode of a file, directory or socket. Raise UnsafeDirectory for a symbolic link.

    Linux has no lchmod. The descriptor binds the change to the entry that was checked."""
    handle = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        if stat.S_ISLNK(os.fstat(handle).st_mode):
            raise UnsafeDirectory(f"{path} is a symbolic link. Remove it.")
        os.chmod(f"/proc/self/fd/{handle}", mode)
    finally:
        os.close(handle)
