"""Mounts of agents' data: one directory of the bucket per agent, mounted by s3fs into /data of each of the agent's sandboxes.

A sandbox has no network, no key and no right to mount. Its container gets a directory of this machine as a bind mount with
slave propagation, so that mounts made on that directory later appear in the container:

    STATE_DIR/mounts               bind mount of itself, shared: mounts below it propagate to containers
    STATE_DIR/mounts/SANDBOX/fs    mount point of s3fs: `agents/<did>/files` of the bucket
    STATE_DIR/mounts/SANDBOX/data  bound to /data; `fs` is bound on it once s3fs answers

A container that starts while `data` is a mount point binds that mount and not the directory. It would not see a mount made
after that one is removed. Dead mounts therefore stay on `data` and new mounts are stacked on top, where all containers see
them."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import structlog
from django.conf import settings

from sandboxes.models import Sandbox, SandboxState
from sandboxes.models.state import AgentData, DataStorageMode
from sandboxes.providers.base import DATA, Provider
from sandboxes.providers.errors import Rejected
from sandboxes.state.mount_points import mount_error, translate_os_errors
from sandboxes.state.s3fs import DEAD, MOUNT_TIMEOUT_SECONDS, RESPONSIVE, UNRESPONSIVE, SandboxMount, check_bucket_reachable
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
SUPPORTED_PROVIDER = "docker"  # the only provider whose sandboxes can bind a directory of this machine


def find_missing_requirement() -> str:
    """Return the reason why this installation cannot mount data; "" if it can."""
    if settings.STORAGE_BACKEND != "s3":
        return "mounted data requires STORAGE_BACKEND=s3"
    if settings.SANDBOX_PROVIDER not in ("auto", SUPPORTED_PROVIDER):
        return "mounted data requires SANDBOX_PROVIDER=docker"
    if os.geteuid() != 0:
        return "mounting requires root"
    if not shutil.which("s3fs"):
        return "the program s3fs is missing; install the package s3fs"
    return "" if os.path.exists("/dev/fuse") else "/dev/fuse is missing"


def is_mount_required(agent_did: str) -> bool:
    """Return whether this agent's data is mounted, or will be when it is first stored."""
    if settings.STORAGE_BACKEND != "s3":
        return False
    mode = AgentData.objects.filter(agent_did=agent_did).values_list("keeping", flat=True).first()
    return (mode or settings.DATA_KEEPING) == DataStorageMode.MOUNT


def prepare_mount_directory(sandbox: Sandbox) -> Path | None:
    """Create the empty directory to bind to /data of a sandbox that is about to start. Return None if the sandbox needs none.

    A warm sandbox may be claimed by any agent, so it gets a directory if new agents' data is mounted. Sandboxes of agents with
    synced data use the directory as ordinary storage. Raise StoreError."""
    if sandbox.provider != SUPPORTED_PROVIDER or not (
        settings.DATA_KEEPING == DataStorageMode.MOUNT or is_mount_required(sandbox.agent_did)
    ):
        return None
    mount = SandboxMount.of(sandbox.pk)
    with mount.locked(), translate_os_errors("prepare"):
        mount.create_directories()
    return mount.data


def has_mount_directory(pk: uuid.UUID) -> bool:
    """Return whether this sandbox was started with a directory to mount on."""
    return SandboxMount.of(pk).exists()


def attach(sandbox: Sandbox, provider: Provider) -> None:
    """Ensure that the agent's files are mounted in its sandbox and the bucket answers. Idempotent; safe to call concurrently.

    Raise StoreError, mostly within 10 seconds and at most within a minute, if that fails; Rejected if the provider cannot
    mount. A mount whose bucket does not answer stays: s3fs reconnects by itself, and pending writes may still be uploaded."""
    if sandbox.provider != SUPPORTED_PROVIDER:
        raise Rejected(f"The data of {sandbox.agent_did} is mounted; the provider {sandbox.provider} does not support mounts.")
    if reason := find_missing_requirement():
        raise mount_error("attach", reason)
    mount = SandboxMount.of(sandbox.pk)
    if not mount.exists():
        raise mount_error("attach", "the sandbox was started without a directory to mount on; it gets one at its next wake")
    device = mount.device()
    status = mount.probe() if device else DEAD
    if status == RESPONSIVE:
        return
    with mount.locked(), translate_os_errors("attach"):
        if status == UNRESPONSIVE:
            check_bucket_reachable(sandbox.agent_did)
        if (status == UNRESPONSIVE or mount.device() != device) and mount.probe() == RESPONSIVE:
            return
        mount.mount(sandbox.agent_did)
        if not _is_visible_in_sandbox(mount, sandbox, provider):
            mount.unmount()
            raise mount_error(
                "attach", "the mount does not appear in the sandbox; check that its Docker Engine runs on this machine"
            )
    log.info("data mounted", sandbox=str(sandbox.pk), agent=sandbox.agent_did, remounted=device is not None)


def release_unresponsive_mount(sandbox: Sandbox) -> bool:
    """Kill s3fs if the bucket does not answer, and return whether it was killed. Writes that it had not uploaded are lost then.

    Called before a sandbox is stopped, because processes blocked on the mount cannot be killed."""
    mount = SandboxMount.of(sandbox.pk)
    if not mount.device() or mount.probe() != UNRESPONSIVE:
        return False
    mount.end(grace_seconds=0)
    return True


def detach(pk: uuid.UUID) -> None:
    """Remove a stopped sandbox's mount, s3fs process and directory. A failure is logged; `clear_leftovers` retries."""
    try:
        mount = SandboxMount.of(pk)
        if mount.exists():
            with mount.locked(), translate_os_errors("detach"):
                mount.clear()
    except StoreError as error:
        log.warning("mount left behind", sandbox=str(pk), error=str(error))


@contextmanager
def open_mount(agent_did: str) -> Iterator[Path]:
    """Mount an agent's files temporarily outside any sandbox. Raise StoreError."""
    mount = SandboxMount.of(uuid.uuid5(uuid.NAMESPACE_URL, agent_did))
    with mount.locked(), translate_os_errors("open"):
        mount.create_directories()
        try:
            mount.mount(agent_did)
            yield mount.fs
        finally:
            mount.clear()


def clear_leftovers() -> list[uuid.UUID]:
    """Remove the mounts of sandboxes that have no process. Return their ids. Failures are retried by the next sweep."""
    cleared = []
    for mount in SandboxMount.list_all():
        try:
            with mount.locked(), translate_os_errors("leftovers"):
                # The row is read under the lock, because a start of the sandbox takes the same lock.
                sandboxes = Sandbox.objects.filter(pk=mount.pk)
                if not sandboxes.exclude(state__in=(SandboxState.COLD, SandboxState.DESTROYED)).exists():
                    mount.clear()
                    cleared.append(mount.pk)
        except StoreError as error:
            log.warning("mount left behind", sandbox=str(mount.pk), error=str(error))
    return cleared


def _is_visible_in_sandbox(mount: SandboxMount, sandbox: Sandbox, provider: Provider) -> bool:
    """Return whether /data of the sandbox is the mounted device and writable for commands."""
    argv = ["sh", "-c", f"test -w {DATA} && stat -c %d {DATA}"]
    result = provider.exec(
        sandbox.ref, argv, env={}, cwd="/", timeout=timedelta(seconds=MOUNT_TIMEOUT_SECONDS), cap=100, mark=uuid.uuid4().hex
    )
    return result.stdout.decode(errors="replace").strip() == str(mount.device())
