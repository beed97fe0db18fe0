"""An agent's files as one directory of the bucket, which s3fs mounts on this machine into each of its sandboxes' /data.

A sandbox has no network, no key and no right to mount. Its container is given a directory of this machine, bound with
slave propagation, and whatever is mounted on that directory later appears in it:

    STATE_DIR/mounts               bound on itself and shared: what is mounted below it reaches the containers
    STATE_DIR/mounts/SANDBOX/fs    where s3fs mounts `agents/<did>/files` of the bucket
    STATE_DIR/mounts/SANDBOX/data  bound to /data; on it `fs` is bound once that answers

A container that starts while something is mounted there is bound to that, not to the directory, and would miss what is
mounted after it has gone. So `data` keeps what died on it, and a new mount goes on top: that reaches both sorts."""

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
from sandboxes.providers.base import DATA, Provider, Rejected
from sandboxes.state.mount_points import mount_error, translate_os_errors
from sandboxes.state.s3fs import DEAD, MOUNT_TIMEOUT_SECONDS, RESPONSIVE, UNRESPONSIVE, SandboxMount, check_bucket_reachable
from sandboxes.storage.base import StoreError

log = structlog.get_logger(__name__)
SUPPORTED_PROVIDER = "docker"  # the only one whose sandboxes can be given a directory of this machine


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
    with place.locked(), translate_os_errors("prepare"):
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
        raise mount_error("attach", why)
    place = SandboxMount.of(sandbox.pk)
    if not place.exists():
        raise mount_error("attach", "its sandbox was started without a directory to mount on, and has one when it has slept")
    seen = place.mounted()
    said = place.ask() if seen else DEAD
    if said == RESPONSIVE:
        return
    with place.locked(), translate_os_errors("attach"):
        if said == UNRESPONSIVE:
            check_bucket_reachable(sandbox.agent_did)
        if (said == UNRESPONSIVE or place.mounted() != seen) and place.ask() == RESPONSIVE:
            return
        place.mount(sandbox.agent_did)
        if not _is_visible_in_sandbox(place, sandbox, provider):
            place.unmount()
            raise mount_error(
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
            with place.locked(), translate_os_errors("detach"):
                place.clear()
    except StoreError as failed:
        log.warning("mount left behind", sandbox=str(pk), error=str(failed))


@contextmanager
def open_mount(agent_did: str) -> Iterator[Path]:
    """The agent's files, mounted for nobody but whoever asks, for a while."""
    place = SandboxMount.of(uuid.uuid5(uuid.NAMESPACE_URL, agent_did))
    with place.locked(), translate_os_errors("open"):
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
                translate_os_errors("leftovers"),
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


def _is_visible_in_sandbox(place: SandboxMount, sandbox: Sandbox, provider: Provider) -> bool:
    """Does /data of the sandbox lie on what is mounted here, and may commands write there?"""
    argv = ["sh", "-c", f"test -w {DATA} && stat -c %d {DATA}"]
    asked = provider.exec(
        sandbox.ref, argv, env={}, cwd="/", timeout=timedelta(seconds=MOUNT_TIMEOUT_SECONDS), cap=100, mark=uuid.uuid4().hex
    )
    return asked.stdout.decode(errors="replace").strip() == str(place.mounted())
