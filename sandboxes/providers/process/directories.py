"""Directories of the process provider's sandboxes: layout, translation of paths, listing and removal."""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, unquote

from sandboxes.image import files
from sandboxes.providers.base import (
    DATA,
    LLM_SOCKET,
    MARK_VARIABLE,
    SOCKETS_DIRECTORY,
    USER_PROGRAMS_DIRECTORY,
    WORKSPACE,
    ProviderSandbox,
)
from sandboxes.providers.errors import OutOfSpace, Unavailable
from sandboxes.redaction.texts import quote_answer

IMAGE_DIRECTORY = Path(files.__file__).resolve().parent  # /opt/leasehold in the Docker image
METADATA_FILE = "sandbox.json"
SANDBOX_VARIABLE = "LEASEHOLD_SANDBOX"  # environment variable by which `destroy` finds processes
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True)
class SandboxDirectory:
    """Directory of one sandbox, and the host directory of its sockets."""

    path: Path
    sockets: str = ""

    def inside(self, path: str) -> str:
        """Translate a sandbox path to a host path. Return other strings unchanged."""
        host_directories = {
            WORKSPACE: str(self.path / "workspace"),
            DATA: str(self.path / "data"),
            SOCKETS_DIRECTORY: self.sockets,
            "/opt/leasehold": str(IMAGE_DIRECTORY),
        }
        for directory, host_directory in host_directories.items():
            if host_directory and (path == directory or path.startswith(directory + "/")):
                return host_directory + path[len(directory) :]
        return path

    def environment(self, variables: Mapping[str, str], mark: str) -> dict[str, str]:
        """Build a command's environment. Nothing is inherited from this process, whose environment contains secrets."""
        return {
            "PATH": f"{DEFAULT_PATH}:{self.inside(USER_PROGRAMS_DIRECTORY)}",
            "HOME": self.inside(f"{WORKSPACE}/.home"),
            "LANG": "C.UTF-8",
            **({"LLM_SOCKET": self.inside(LLM_SOCKET)} if self.sockets else {}),
            **variables,
            "LEASEHOLD_WORKSPACE": self.inside(WORKSPACE),
            "LEASEHOLD_DATA": self.inside(DATA),
            SANDBOX_VARIABLE: self.path.name,
            MARK_VARIABLE: mark,
        }


def inspect_directory(path: Path) -> ProviderSandbox | None:
    """Return the sandbox in this directory, or None if it was removed meanwhile."""
    owner = decode_owner(path.parent.name)
    with suppress(FileNotFoundError):
        created_at = datetime.fromisoformat(json.loads((path / METADATA_FILE).read_bytes())["created_at"])
        return ProviderSandbox(ref=path.name, name=path.name, running=True, created_at=created_at, owner=owner)
    with suppress(FileNotFoundError):
        modified_at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        return ProviderSandbox(ref=path.name, name=path.name, running=False, created_at=modified_at, owner=owner)
    return None


def list_directory(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:  # no sandbox was ever created here
        return []


def encode_owner(owner: str) -> str:
    """Encode an owner label as a file name."""
    return quote(owner, safe="").replace(".", "%2E")


def decode_owner(name: str) -> str:
    """Decode the file name of `encode_owner`."""
    return unquote(name)


def remove_tree(path: Path) -> None:
    """Remove a directory tree, including directories that programs have made read-only."""
    for directory, subdirectories, _ in os.walk(path):
        for name in subdirectories:
            with suppress(FileNotFoundError):
                if not os.path.islink(os.path.join(directory, name)):
                    os.chmod(os.path.join(directory, name), 0o700)
    with suppress(FileNotFoundError):  # removed concurrently
        shutil.rmtree(path)
    if path.exists():
        raise Unavailable(f"{path.name} is not completely removed yet.")


@contextmanager
def translate_disk_errors() -> Iterator[None]:
    """Translate OSError to Unavailable: the operation may succeed later, with free space or corrected permissions."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(str(error)) from error
        raise Unavailable(f"{error.strerror}: {quote_answer(error.filename)}") from error
