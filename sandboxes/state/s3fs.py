"""The s3fs mount of one sandbox: its directories, its process and its health."""

import os
import re
import select
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from django.conf import settings

from sandboxes.hosts.directories import chmod_no_follow
from sandboxes.state.mount_points import (
    MS_BIND,
    POLL_SECONDS,
    acquire_lock,
    ensure_shared_mount,
    list_devices,
    mount_error,
    sys_mount,
    unmount_all,
)
from sandboxes.storage.base import KeyValueStore

AGENT_UID = 10001  # user id of agent processes, as in image/Dockerfile
PROBE_NAME = ".leasehold-answers"  # does not exist: s3fs never caches a missing name, so each probe reaches the bucket
PROBE_TIMEOUT_SECONDS = 5.0
MOUNT_TIMEOUT_SECONDS = 10.0
UNMOUNT_TIMEOUT_SECONDS = 10.0  # includes the upload of the files closed last
LOCK_COUNT = 256  # lock files; sandboxes share them by id
UNRESPONSIVE, DEAD, RESPONSIVE = "unresponsive", "dead", "responsive"
_DEAD_MOUNT_ERRORS = (b"endpoint is not connected", b"caused connection abort")


@dataclass(frozen=True)
class SandboxMount:
    """Directories, mount points and s3fs process of one sandbox. Changes require its lock."""

    root: Path
    pk: uuid.UUID

    @classmethod
    def of(cls, pk: uuid.UUID) -> Self:
        return cls(mounts_root(), pk)

    @classmethod
    def list_all(cls) -> list[Self]:
        root = mounts_root()
        names = (entry.name for entry in root.iterdir()) if root.is_dir() else ()
        return [cls(root, uuid.UUID(name)) for name in names if re.fullmatch(r"[0-9a-f]{32}", name)]

    @property
    def directory(self) -> Path:
        return self.root / self.pk.hex

    @property
    def fs(self) -> Path:
        return self.directory / "fs"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def create_directories(self) -> None:
        """Create the directories, empty and without mounts. Commands may write to `data` until s3fs is mounted."""
        self.clear()
        ensure_shared_mount(self.root)
        self.fs.mkdir(mode=0o700, parents=True)
        self.data.mkdir(mode=0o700)
        os.chown(self.data, AGENT_UID, AGENT_UID, follow_symlinks=False)

    def exists(self) -> bool:
        return os.path.lexists(self.directory)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the exclusive lock of this sandbox's mount. Raise StoreError if it is not free within 30 seconds."""
        with acquire_lock(self.root, f"{self.pk.int % LOCK_COUNT:02x}"):
            yield

    def device(self) -> int | None:
        """Return the device number of the topmost mount on `data`; None if there is none."""
        devices = list_devices(self.data)
        return devices[-1] if devices else None

    def probe(self) -> str:
        """Return RESPONSIVE, UNRESPONSIVE or DEAD within 5 seconds.

        A child process probes: a process that waits for an unresponsive file system cannot be stopped, not even by SIGKILL."""
        return _probe(self.data / PROBE_NAME)

    def mount(self, agent_did: str) -> None:
        """Start a new mount, replacing an existing one. Raise StoreError on failure, and leave no working mount."""
        self.end(grace_seconds=0)
        unmount_all(self.fs)
        ensure_shared_mount(self.root)  # a restart of the machine removes it
        _ensure_prefix(agent_did)
        if not list_devices(self.data):  # no writes into the bare directory between two mounts: a mount would hide them
            os.chown(self.data, 0, 0, follow_symlinks=False)
            chmod_no_follow(self.data, 0o500)
        try:
            self._start(agent_did)
            if (status := _probe(self.fs / PROBE_NAME)) != RESPONSIVE:
                raise mount_error("mount", f"s3fs has mounted but is {status}")
            sys_mount(self.fs, self.data, MS_BIND)
        except BaseException:
            self.end(grace_seconds=0)
            unmount_all(self.fs)
            raise

    def _start(self, agent_did: str) -> None:
        """Start s3fs and wait until it has mounted. It exits with 0 even on failure, so the mount table is authoritative."""
        keys, log_path = self.directory / "keys", self.directory / "log"
        with suppress(FileNotFoundError):
            keys.unlink()
        read_end, write_end = os.pipe()  # s3fs holds the write end: end of file means that s3fs has ended
        try:
            with open(os.open(keys, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{settings.S3_ACCESS_KEY_ID}:{settings.S3_SECRET_ACCESS_KEY}\n")
            with log_path.open("wb") as output:
                subprocess.run(
                    # setsid: s3fs outlives this process and is reaped by init
                    ["setsid", "--fork", *_build_s3fs_command(agent_did, self.fs, keys)],  # noqa: S607
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[write_end], cwd="/", check=True,
                    env={"PATH": os.defpath, "LC_ALL": "C"},
                )  # fmt: skip
            os.close(write_end)
            write_end = -1
            deadline = time.monotonic() + MOUNT_TIMEOUT_SECONDS
            while not list_devices(self.fs):
                if select.select([read_end], [], [], POLL_SECONDS)[0]:
                    raise mount_error("mount", f"s3fs ended: {_read_last_line(log_path)}")
                if time.monotonic() > deadline:
                    raise mount_error("mount", f"s3fs did not mount within {MOUNT_TIMEOUT_SECONDS:.0f} s")
        except subprocess.CalledProcessError as error:
            raise mount_error("mount", f"s3fs could not be started: {_read_last_line(log_path)}") from error
        finally:
            keys.unlink(missing_ok=True)
            os.close(read_end)
            if write_end >= 0:
                os.close(write_end)

    def unmount(self) -> None:
        """Unmount everything and wait until s3fs has ended. s3fs exits once it has uploaded the closed files."""
        unmount_all(self.data)
        unmount_all(self.fs)
        self.end(grace_seconds=UNMOUNT_TIMEOUT_SECONDS)

    def end(self, *, grace_seconds: float) -> None:
        """Wait until no s3fs of this sandbox runs, and kill it after `grace_seconds`. Blocked processes then get an error."""
        deadline = time.monotonic() + grace_seconds
        while pids := self._find_s3fs_pids():
            if time.monotonic() >= deadline:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline + MOUNT_TIMEOUT_SECONDS:
                raise mount_error("unmount", f"s3fs did not end: processes {pids}")
            time.sleep(POLL_SECONDS)

    def _find_s3fs_pids(self) -> list[int]:
        """Return the process ids of this sandbox's s3fs, no matter which process started it."""
        pids, point = [], os.fsencode(self.fs)
        for entry in os.listdir("/proc"):
            with suppress(OSError):  # the process has ended
                if entry.isdecimal() and point in (argv := Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")):
                    pids += [int(entry)] if os.path.basename(argv[0]) == b"s3fs" else []
        return pids

    def clear(self) -> None:
        """Unmount and remove the directories.

        Files are removed only below a renamed directory: the kernel refuses to rename or remove a mount point, so the bucket's
        files are never deleted."""
        self.unmount()
        if not self.exists():
            return
        renamed = self.directory / "old"
        with suppress(FileNotFoundError):
            os.rename(self.data, renamed)
        if renamed.exists():
            shutil.rmtree(renamed)
        for name in ("keys", "log"):
            (self.directory / name).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            self.fs.rmdir()
        self.directory.rmdir()


def mounts_root() -> Path:
    return Path(settings.STATE_DIR, "mounts").resolve()


def _build_s3fs_command(agent_did: str, point: Path, keys: Path) -> list[str]:
    options = {
        "url": settings.S3_ENDPOINT or f"https://s3.{settings.S3_REGION}.amazonaws.com",
        "endpoint": settings.S3_REGION,
        "use_path_request_style": None,
        "sigv4": None,
        "passwd_file": str(keys),
        "allow_other": None,
        "uid": str(AGENT_UID),
        "gid": str(AGENT_UID),
        "mp_umask": "0077",
        "complement_stat": None,  # objects written by other clients have no mode
        "nosuid": None,
        "nodev": None,
        "connect_timeout": "3",
        "readwrite_timeout": "5",
        "retries": "2",
        "max_stat_cache_size": "10000",
        "stat_cache_expire": "1",  # another sandbox's writes are visible after a second
        "tmpdir": str(settings.STATE_DIR),
        "ensure_diskfree": "256",  # MB: below that s3fs uploads parts of files that are still being written
    }
    arguments = [name if value is None else f"{name}={_escape_option(value)}" for name, value in options.items()]
    source = f"{settings.S3_BUCKET}:/{settings.STORAGE_PREFIX}{build_key_prefix(agent_did).rstrip('/')}"
    return [
        shutil.which("s3fs") or "s3fs",
        source,
        str(point),
        "-f",
        *(part for argument in arguments for part in ("-o", argument)),
    ]


def build_key_prefix(agent_did: str) -> str:
    """Return the key prefix of an agent's mounted files."""
    return f"agents/{agent_did}/files/"


def _escape_option(value: str) -> str:
    return value.replace("\\", "\\\\").replace(",", "\\,")


def _read_last_line(log_path: Path) -> str:
    lines = log_path.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "no output"


def _ensure_prefix(agent_did: str) -> None:
    """Ensure that an object exists under the agent's prefix: some servers report an empty prefix as missing."""
    bucket, prefix = _get_bucket(), build_key_prefix(agent_did)
    if not bucket.page(prefix, limit=1).entries:
        bucket.set(prefix, b"")


def check_bucket_reachable(agent_did: str) -> None:
    """Raise StoreError if the bucket does not answer."""
    _get_bucket().page(build_key_prefix(agent_did), limit=1)


def _get_bucket() -> KeyValueStore:
    return _get_fail_fast_store(
        settings.S3_BUCKET,
        settings.S3_ENDPOINT,
        settings.S3_ACCESS_KEY_ID,
        settings.S3_SECRET_ACCESS_KEY,
        settings.S3_REGION,
        settings.STORAGE_PREFIX,
    )


@cache
def _get_fail_fast_store(bucket: str, endpoint: str, key_id: str, secret: str, region: str, prefix: str) -> KeyValueStore:
    from sandboxes.storage.s3 import S3Store  # imports boto3, which other backends do not need

    return S3Store(
        bucket, endpoint=endpoint, access_key_id=key_id, secret_access_key=secret, region=region, prefix=prefix,
        connect_timeout=3, read_timeout=PROBE_TIMEOUT_SECONDS, attempts=1,
    )  # fmt: skip


def _probe(path: Path) -> str:
    child = subprocess.Popen(
        ["stat", "--", str(path)],  # noqa: S607
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/",
        env={"PATH": os.defpath, "LC_ALL": "C"},
    )  # fmt: skip
    try:
        _, stderr = child.communicate(timeout=PROBE_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        threading.Thread(target=child.communicate, daemon=True).start()  # ends once s3fs times out or ends
        return UNRESPONSIVE
    if child.returncode == 0 or b"No such file" in stderr:
        return RESPONSIVE
    return DEAD if any(word in stderr for word in _DEAD_MOUNT_ERRORS) else UNRESPONSIVE
