"""An agent's files as one directory of the bucket, which s3fs mounts on this machine into each of its sandboxes' /data.

A sandbox has no network, no key and no right to mount. Its container is given a directory of this machine, bound with
slave propagation, and whatever is mounted on that directory later appears in it:

    STATE_DIR/mounts               bound on itself and shared: what is mounted below it reaches the containers
    STATE_DIR/mounts/SANDBOX/fs    where s3fs mounts `agents/<did>/files` of the bucket
    STATE_DIR/mounts/SANDBOX/data  bound to /data; on it `fs` is bound once that answers

A container that starts while something is mounted there is bound to that, not to the directory, and would miss what is
mounted after it has gone. So `data` keeps what died on it, and a new mount goes on top: that reaches both sorts."""

import ctypes
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
from datetime import timedelta
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import cache
from pathlib import Path
from typing import Self

import structlog
from django.conf import settings

from sandboxes.models import Sandbox, SandboxState
from sandboxes.models.state import AgentData, DataStorageMode
from sandboxes.providers.base import DATA, Provider, Rejected
from sandboxes.storage.base import StoreError
from sandboxes.storage.s3 import S3Store

log = structlog.get_logger(__name__)
SUPPORTED_PROVIDER = "docker"  # the only one whose sandboxes can be given a directory of this machine
AGENT_UID = 10001  # user id of whatever an agent runs, as in image/Dockerfile
PROBE_NAME = ".leasehold-answers"  # asked for to see whether the bucket answers: a name that is not there is never cached
PROBE_TIMEOUT_SECONDS = 5.0  # seconds, as the following
MOUNT_TIMEOUT_SECONDS = 10.0
LOCK_TIMEOUT_SECONDS = 30.0
UNMOUNT_TIMEOUT_SECONDS = 10.0  # to upload what was closed last
POLL_SECONDS = 0.02
LOCK_COUNT = 256
UNRESPONSIVE, DEAD, RESPONSIVE = "silent", "dead", "answers"
_DEAD_MOUNT_ERRORS = (b"endpoint is not connected", b"caused connection abort")
_MS_BIND, _MS_PRIVATE, _MS_SHARED, _MNT_DETACH, _UMOUNT_NOFOLLOW = 1 << 12, 1 << 18, 1 << 20, 2, 8
_libc = ctypes.CDLL(None, use_errno=True)


def find_missing_requirement() -> str:
    """What this machine or its settings lack for mounting; "" if nothing."""
    if settings.STORAGE_BACKEND != "s3":
        return "the files are mounted from a bucket, which takes STORAGE_BACKEND=s3"
    if settings.SANDBOX_PROVIDER in ("process", "memory"):
        return "the files are mounted into containers, which takes SANDBOX_PROVIDER=docker"
    if os.geteuid() != 0:
        return "mounting takes root"
    if not shutil.which("s3fs"):
        return "there is no program s3fs here, which the package of that name has"
    return "" if os.path.exists("/dev/fuse") else "there is no /dev/fuse here"


def is_mount_required(agent_did: str) -> bool:
    """Is this agent's data mounted, or would it be if there were any?"""
    if settings.STORAGE_BACKEND != "s3":
        return False
    kept = AgentData.objects.filter(agent_did=agent_did).values_list("keeping", flat=True).first()
    return (kept or settings.DATA_KEEPING) == DataStorageMode.MOUNT


def prepare_mount_directory(sandbox: Sandbox) -> Path | None:
    """The directory to bind to /data of a sandbox that is about to start, made empty; None if it needs none.

    A sandbox that nobody holds yet may be claimed by any agent. One whose data is copied uses the directory as it is."""
    if sandbox.provider != SUPPORTED_PROVIDER or not (
        settings.DATA_KEEPING == DataStorageMode.MOUNT or is_mount_required(sandbox.agent_did)
    ):
        return None
    place = SandboxMount.of(sandbox.pk)
    with place.locked(), _translate_os_errors("prepare"):
        place.make()
    return place.data


def has_mount_directory(pk: uuid.UUID) -> bool:
    """Was this sandbox started with a directory to mount on?"""
    return SandboxMount.of(pk).exists()


def attach(sandbox: Sandbox, provider: Provider) -> None:
    """Have the agent's files in its sandbox's /data, and the bucket answering. Safe to repeat, from many processes.

    StoreError within a minute, and mostly within ten seconds, if that cannot be had; Rejected if it never can. A bucket
    that does not answer leaves a mount as it is: s3fs finds its way back, and what was being written may yet get there."""
    if sandbox.provider != SUPPORTED_PROVIDER:
        raise Rejected(f"The data of {sandbox.agent_did} is mounted, which sandboxes of {sandbox.provider} cannot be given.")
    if why := find_missing_requirement():
        raise _mount_error("attach", why)
    place = SandboxMount.of(sandbox.pk)
    if not place.exists():
        raise _mount_error("attach", "its sandbox was started without a directory to mount on, and has one when it has slept")
    seen = place.mounted()
    said = place.ask() if seen else DEAD
    if said == RESPONSIVE:
        return
    with place.locked(), _translate_os_errors("attach"):
        if said == UNRESPONSIVE:
            _check_bucket_reachable(sandbox.agent_did)
        if (said == UNRESPONSIVE or place.mounted() != seen) and place.ask() == RESPONSIVE:
            return
        place.mount(sandbox.agent_did)
        if not _is_visible_in_sandbox(place, sandbox, provider):
            place.unmount()
            raise _mount_error(
                "attach", "what is mounted here does not appear in the sandbox: is its engine on another machine?"
            )
    log.info("data mounted", sandbox=str(sandbox.pk), agent=sandbox.agent_did, again=seen is not None)


def release_unresponsive_mount(sandbox: Sandbox) -> None:
    """Let go of a bucket that does not answer, for a sandbox that is about to go: what waits for it cannot be killed."""
    place = SandboxMount.of(sandbox.pk)
    if place.mounted() and place.ask() == UNRESPONSIVE:
        log.warning("mount given up", sandbox=str(sandbox.pk), agent=sandbox.agent_did)
        place.end(patience=0)


def detach(pk: uuid.UUID) -> None:
    """Leave nothing of a sandbox whose process is gone: no mount, no s3fs, no directory. What fails is left to
    `leftovers`."""
    try:
        place = SandboxMount.of(pk)
        if place.exists():
            with place.locked(), _translate_os_errors("detach"):
                place.clear()
    except StoreError as failed:
        log.warning("mount left behind", sandbox=str(pk), error=str(failed))


@contextmanager
def open_mount(agent_did: str) -> Iterator[Path]:
    """The agent's files, mounted for nobody but whoever asks, for a while."""
    place = SandboxMount.of(uuid.uuid5(uuid.NAMESPACE_URL, agent_did))
    with place.locked(), _translate_os_errors("open"):
        place.make()
        try:
            place.mount(agent_did)
            yield place.fs
        finally:
            place.clear()


def clear_leftovers() -> list[uuid.UUID]:
    """Clear up after sandboxes that have no process any more, whoever should have done so; whose it was. What fails is
    tried again next time."""
    cleared = []
    for place in SandboxMount.list_all():
        try:
            with (
                place.locked(),
                _translate_os_errors("leftovers"),
            ):  # the row is read under the lock, which whoever starts it takes
                if (
                    not Sandbox.objects.filter(pk=place.pk)
                    .exclude(state__in=(SandboxState.COLD, SandboxState.DESTROYED))
                    .exists()
                ):
                    place.clear()
                    cleared.append(place.pk)
        except StoreError as failed:
            log.warning("mount left behind", sandbox=str(place.pk), error=str(failed))
    return cleared


# --- one sandbox's ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SandboxMount:
    """What one sandbox has on this machine. Whoever changes any of it holds its lock."""

    home: Path
    pk: uuid.UUID

    @classmethod
    def of(cls, pk: uuid.UUID) -> Self:
        return cls(_mounts_root(), pk)

    @classmethod
    def list_all(cls) -> list[Self]:
        home = _mounts_root()
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
        _ensure_shared_mount(self.home)
        self.fs.mkdir(mode=0o700, parents=True)
        self.data.mkdir(mode=0o700)
        os.chown(self.data, AGENT_UID, AGENT_UID)

    def exists(self) -> bool:
        return os.path.lexists(self.directory)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes it. StoreError if somebody else is at it for too long."""
        with _acquire_lock(self.home, f"{self.pk.int % LOCK_COUNT:02x}"):
            yield

    def mounted(self) -> int | None:
        """The device that lies on `data`, by its number."""
        devices = _list_devices(self.data)
        return devices[-1] if devices else None

    def ask(self) -> str:
        """Whether the bucket answers through the mount, in bounded time: asked by a child, since whoever asks a file
        system that does not answer cannot be stopped, not even by SIGKILL."""
        return _probe(self.data / PROBE_NAME)

    def mount(self, agent_did: str) -> None:
        """Mount anew, whatever is there. StoreError if that fails; then nothing that answers is there."""
        self.end(patience=0)
        _unmount(self.fs)
        _ensure_shared_mount(self.home)  # as it was, unless this machine was started anew since
        _ensure_prefix(agent_did)
        if not _list_devices(self.data):  # nothing that is written before the next mount, or between two, gets lost in it
            os.chown(self.data, 0, 0)
            os.chmod(self.data, 0o500)
        try:
            self._start(agent_did)
            if (said := _probe(self.fs / PROBE_NAME)) != RESPONSIVE:
                raise _mount_error("mount", f"s3fs has mounted, and is {said}")
            _mount(self.fs, self.data, _MS_BIND)
        except BaseException:
            self.end(patience=0)
            _unmount(self.fs)
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
            while not _list_devices(self.fs):
                if select.select([ended], [], [], POLL_SECONDS)[0]:
                    raise _mount_error("mount", f"s3fs has ended: {_read_last_line(said)}")
                if time.monotonic() > until:
                    raise _mount_error("mount", f"s3fs has not mounted after {MOUNT_TIMEOUT_SECONDS:.0f} s")
        except subprocess.CalledProcessError as failed:
            raise _mount_error("mount", f"s3fs could not be started: {_read_last_line(said)}") from failed
        finally:
            keys.unlink(missing_ok=True)
            os.close(ended)
            if end >= 0:
                os.close(end)

    def unmount(self) -> None:
        """Nothing is mounted here, and no s3fs is left: it ends by itself once it has uploaded what was closed."""
        _unmount(self.data)
        _unmount(self.fs)
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
                raise _mount_error("unmount", f"s3fs does not end: {found}")
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


def _mounts_root() -> Path:
    return Path(settings.STATE_DIR, "mounts").resolve()


def _is_visible_in_sandbox(place: SandboxMount, sandbox: Sandbox, provider: Provider) -> bool:
    """Does /data of the sandbox lie on what is mounted here, and may commands write there?"""
    argv = ["sh", "-c", f"test -w {DATA} && stat -c %d {DATA}"]
    asked = provider.exec(
        sandbox.ref, argv, env={}, cwd="/", timeout=timedelta(seconds=MOUNT_TIMEOUT_SECONDS), cap=100, mark=uuid.uuid4().hex
    )
    return asked.stdout.decode(errors="replace").strip() == str(place.mounted())


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


# --- the bucket, asked by ourselves ---------------------------------------------------------------------------------------


def _ensure_prefix(agent_did: str) -> None:
    """Have something under the agent's prefix: of one with nothing under it, some servers say that it is not there."""
    bucket, prefix = _get_bucket(), build_key_prefix(agent_did)
    if not bucket.page(prefix, limit=1).entries:
        bucket.set(prefix, b"")


def _check_bucket_reachable(agent_did: str) -> None:
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


# --- the kernel -----------------------------------------------------------------------------------------------------------


def _ensure_shared_mount(home: Path) -> None:
    """Have a mount of our own there, which is shared: below it mounts spread to containers, and to nothing else."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _acquire_lock(home, "all"):
        lines = _read_mountinfo(home)
        if not lines:
            _mount(home, home, _MS_BIND)
        if not any(word.startswith("shared:") for line in lines[-1:] for word in line[6 : line.index("-")]):
            _mount(None, home, _MS_PRIVATE)
            _mount(None, home, _MS_SHARED)


def _read_mountinfo(point: Path) -> list[list[str]]:
    """The lines of mountinfo about one mount point, in words; what was mounted last comes last."""
    name = re.sub(r"[\s\\]", lambda found: f"\\{ord(found[0]):03o}", str(point))
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        return [line.split() for line in file if f" {name} " in line and line.split()[4] == name]


def _list_devices(point: Path) -> list[int]:
    """Of everything that is mounted on a directory: the numbers that stat gives for their devices."""
    numbers = (line[2].split(":") for line in _read_mountinfo(point))
    return [os.makedev(int(major), int(minor)) for major, minor in numbers]


def _mount(source: Path | None, target: Path, flags: int) -> None:
    _raise_for_errno(_libc.mount(os.fsencode(source) if source else None, os.fsencode(target), None, flags, None), target)


def _unmount(point: Path) -> None:
    while _list_devices(point):
        _raise_for_errno(_libc.umount2(os.fsencode(point), _MNT_DETACH | _UMOUNT_NOFOLLOW), point)


def _raise_for_errno(result: int, path: Path) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


@contextmanager
def _acquire_lock(home: Path, name: str) -> Iterator[None]:
    """One process, or thread, at a time. Locks have few names and are never removed."""
    with _translate_os_errors("lock"):
        directory = home.parent / "mount-locks"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() > until:
                raise _mount_error("lock", f"somebody else has been mounting or unmounting for {LOCK_TIMEOUT_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _translate_os_errors(method: str) -> Iterator[None]:
    try:
        yield
    except OSError as failed:
        raise _mount_error(method, f"{failed.filename or ''} {failed.strerror or failed}".strip()) from failed


def _mount_error(method: str, why: str) -> StoreError:
    return StoreError("mount", method, why)
