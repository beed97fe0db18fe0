"""The s3fs mount of one sandbox."""

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

from sandboxes.state.mount_points import (
    MS_BIND,
    POLL_SECONDS,
    acquire_lock,
    bind_or_remount,
    ensure_shared_mount,
    list_devices,
    mount_error,
    unmount_all,
)
from sandboxes.storage.s3 import S3Store

AGENT_UID = 10001  # user id of whatever an agent runs, as in image/Dockerfile
PROBE_NAME = ".leasehold-answers"  # asked for to see whether the bucket answers: a name that is not there is never cached
PROBE_TIMEOUT_SECONDS = 5.0  # seconds, as the following
MOUNT_TIMEOUT_SECONDS = 10.0
UNMOUNT_TIMEOUT_SECONDS = 10.0  # to upload what was closed last
LOCK_COUNT = 256
UNRESPONSIVE, DEAD, RESPONSIVE = "silent", "dead", "answers"
_DEAD_MOUNT_ERRORS = (b"endpoint is not connected", b"caused connection abort")


@dataclass(frozen=True)
class SandboxMount:
    """What one sandbox has on this machine. Whoever changes any of it holds its lock."""

    home: Path
    pk: uuid.UUID

    @classmethod
    def of(cls, pk: uuid.UUID) -> Self:
        return cls(mounts_root(), pk)

    @classmethod
    def list_all(cls) -> list[Self]:
        home = mounts_root()
        found = (each.name for each in home.iterdir()) if home.is_dir() else ()
        return [cls(home, uuid.UUID(name)) for name in found if re.fullmatch(r"[0-9a-f]{32}", name)]

    @property
    def directory(self) -> Path:
        return self.home / self.pk.hex

    @property
    def fs(self) -> Path:
        return self.directory / "fs"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def make(self) -> None:
        """Have it, with nothing mounted and nothing in it. Commands may write there until something is mounted."""
        self.clear()
        ensure_shared_mount(self.home)
        self.fs.mkdir(mode=0o700, parents=True)
        self.data.mkdir(mode=0o700)
        os.chown(self.data, AGENT_UID, AGENT_UID)

    def exists(self) -> bool:
        return os.path.lexists(self.directory)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes it. StoreError if somebody else is at it for too long."""
        with acquire_lock(self.home, f"{self.pk.int % LOCK_COUNT:02x}"):
            yield

    def mounted(self) -> int | None:
        """The device that lies on `data`, by its number."""
        devices = list_devices(self.data)
        return devices[-1] if devices else None

    def ask(self) -> str:
        """Whether the bucket answers through the mount, in bounded time: asked by a child, since whoever asks a file
        system that does not answer cannot be stopped, not even by SIGKILL."""
        return _probe(self.data / PROBE_NAME)

    def mount(self, agent_did: str) -> None:
        """Mount anew, whatever is there. StoreError if that fails; then nothing that answers is there."""
        self.end(patience=0)
        unmount_all(self.fs)
        ensure_shared_mount(self.home)  # as it was, unless this machine was started anew since
        _ensure_prefix(agent_did)
        if not list_devices(self.data):  # nothing that is written before the next mount, or between two, gets lost in it
            os.chown(self.data, 0, 0)
            os.chmod(self.data, 0o500)
        try:
            self._start(agent_did)
            if (said := _probe(self.fs / PROBE_NAME)) != RESPONSIVE:
                raise mount_error("mount", f"s3fs has mounted, and is {said}")
            bind_or_remount(self.fs, self.data, MS_BIND)
        except BaseException:
            self.end(patience=0)
            unmount_all(self.fs)
            raise

    def _start(self, agent_did: str) -> None:
        """Return once s3fs has mounted. It exits 0 also when it fails, so the mount point is what counts."""
        keys, said = self.directory / "keys", self.directory / "log"
        with suppress(FileNotFoundError):
            keys.unlink()
        ended, end = os.pipe()  # closed at the other end when s3fs ends
        try:
            with open(os.open(keys, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{settings.S3_ACCESS_KEY_ID}:{settings.S3_SECRET_ACCESS_KEY}\n")
            with said.open("wb") as output:
                subprocess.run(
                    # setsid: it lives on when this process ends, and is nobody's child to wait for
                    ["setsid", "--fork", *_build_s3fs_command(agent_did, self.fs, keys)],  # noqa: S607
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[end], cwd="/", check=True,
                    env={"PATH": os.defpath, "LC_ALL": "C"},
                )  # fmt: skip
            os.close(end)
            end = -1
            until = time.monotonic() + MOUNT_TIMEOUT_SECONDS
            while not list_devices(self.fs):
                if select.select([ended], [], [], POLL_SECONDS)[0]:
                    raise mount_error("mount", f"s3fs has ended: {_read_last_line(said)}")
                if time.monotonic() > until:
                    raise mount_error("mount", f"s3fs has not mounted after {MOUNT_TIMEOUT_SECONDS:.0f} s")
        except subprocess.CalledProcessError as failed:
            raise mount_error("mount", f"s3fs could not be started: {_read_last_line(said)}") from failed
        finally:
            keys.unlink(missing_ok=True)
            os.close(ended)
            if end >= 0:
                os.close(end)

    def unmount(self) -> None:
        """Nothing is mounted here, and no s3fs is left: it ends by itself once it has uploaded what was closed."""
        unmount_all(self.data)
        unmount_all(self.fs)
        self.end(patience=UNMOUNT_TIMEOUT_SECONDS)

    def end(self, *, patience: float) -> None:
        """Return once no s3fs of this sandbox is there. What waits for it gets an error."""
        until = time.monotonic() + patience
        while found := self._find_s3fs_pids():
            if time.monotonic() >= until:
                for pid in found:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until + MOUNT_TIMEOUT_SECONDS:
                raise mount_error("unmount", f"s3fs does not end: {found}")
            time.sleep(POLL_SECONDS)

    def _find_s3fs_pids(self) -> list[int]:
        """The s3fs of this sandbox, whoever started it."""
        found, point = [], os.fsencode(self.fs)
        for entry in os.listdir("/proc"):
            with suppress(OSError):  # it has ended
                if entry.isdecimal() and point in (argv := Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")):
                    found += [int(entry)] if os.path.basename(argv[0]) == b"s3fs" else []
        return found

    def clear(self) -> None:
        """Nothing of it is left. What is removed was never mounted on: the kernel renames, or removes, no mount point."""
        self.unmount()
        if not self.exists():
            return
        old = self.directory / "old"
        with suppress(FileNotFoundError):
            os.rename(self.data, old)
        if old.exists():
            shutil.rmtree(old)
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
        "complement_stat": None,  # an object that others have put there has no mode
        "nosuid": None,
        "nodev": None,
        "connect_timeout": "3",
        "readwrite_timeout": "5",
        "retries": "2",
        "max_stat_cache_size": "10000",
        "stat_cache_expire": "1",  # what another sandbox of the agent writes is seen a second later
        "tmpdir": str(settings.STATE_DIR),
        "ensure_diskfree": "256",  # MB: beyond that it uploads parts of what is being written
    }
    words = [name if value is None else f"{name}={_escape_option(value)}" for name, value in options.items()]
    source = f"{settings.S3_BUCKET}:/{settings.STORAGE_PREFIX}{build_key_prefix(agent_did).rstrip('/')}"
    return [shutil.which("s3fs") or "s3fs", source, str(point), "-f", *(part for word in words for part in ("-o", word))]


def build_key_prefix(agent_did: str) -> str:
    """What the keys of an agent's mounted files begin with."""
    return f"agents/{agent_did}/files/"


def _escape_option(value: str) -> str:
    return value.replace("\\", "\\\\").replace(",", "\\,")


def _read_last_line(said: Path) -> str:
    lines = said.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "it said nothing"


def _ensure_prefix(agent_did: str) -> None:
    """Have something under the agent's prefix: of one with nothing under it, some servers say that it is not there."""
    bucket, prefix = _get_bucket(), build_key_prefix(agent_did)
    if not bucket.page(prefix, limit=1).entries:
        bucket.set(prefix, b"")


def check_bucket_reachable(agent_did: str) -> None:
    """StoreError if the bucket does not answer."""
    _get_bucket().page(build_key_prefix(agent_did), limit=1)


def _get_bucket() -> S3Store:
    return _get_fail_fast_store(
        settings.S3_BUCKET,
        settings.S3_ENDPOINT,
        settings.S3_ACCESS_KEY_ID,
        settings.S3_SECRET_ACCESS_KEY,
        settings.S3_REGION,
        settings.STORAGE_PREFIX,
    )


@cache
def _get_fail_fast_store(bucket: str, endpoint: str, key_id: str, secret: str, region: str, prefix: str) -> S3Store:
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
        _, said = child.communicate(timeout=PROBE_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        threading.Thread(target=child.communicate, daemon=True).start()  # it ends when s3fs gives up, or ends
        return UNRESPONSIVE
    if child.returncode == 0 or b"No such file" in said:
        return RESPONSIVE
    return DEAD if any(word in said for word in _DEAD_MOUNT_ERRORS) else UNRESPONSIVE
