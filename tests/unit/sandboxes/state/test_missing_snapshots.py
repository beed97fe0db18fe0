"""Stored state that the store does not find: the use fails and is repeated, and only a confirmed loss ends the lease."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from controlplane.health import check_health
from leases import sweeps
from leases.errors import LeaseEnded
from leases.models import EnvironmentType, Lease
from sandboxes.errors import SandboxNotReady
from sandboxes.models import DataEvent, Installation, Snapshot
from sandboxes.models.installation import MARK_NAME
from sandboxes.state import workspace
from sandboxes.state.missing_snapshots import LOSS_TIMEOUT
from sandboxes.storage import get_store
from sandboxes.sweeps import installation, passes
from tests.conftest import MINUTE, NOW
from tests.support.leases import read, run, write

pytestmark = [pytest.mark.django_db, pytest.mark.postgres("hand-written SQL")]
HOUR = 60 * MINUTE


@pytest.fixture
def asleep(grant) -> Lease:
    """A lease of weeks, whose sandbox sleeps with stored files."""
    EnvironmentType.objects.update(max_ttl=timedelta(days=20))
    lease: Lease = grant(ttl=timedelta(days=20), sleep_after=HOUR / 2)
    write(lease)
    assert passes.evict_idle(now=NOW + HOUR).counts == {"put to sleep": 1}
    return lease


def take_objects(snapshot: Snapshot) -> dict[str, bytes]:
    """Remove all copies of a snapshot, and return the objects in the store."""
    workspace.forget_local(snapshot)
    objects = {key: get_store().get(key) for key in get_store().list(snapshot.key)}
    get_store().clear(snapshot.key)
    return objects


def test_stored_state_that_is_not_found_fails_the_start_until_it_is_back(asleep) -> None:
    objects = take_objects(Snapshot.objects.get())
    for minutes in range(3):
        with pytest.raises(SandboxNotReady, match="is missing in the store") as failed:
            run(asleep, now=NOW + HOUR + minutes * MINUTE)
        assert failed.value.retry_after
        sweeps.reclaim(now=NOW + HOUR + minutes * MINUTE)
    assert DataEvent.objects.get().kind == "corrupt"  # one event, however often it is tried
    assert any("store does not find: 1" in each for each in check_health(now=NOW + HOUR)["warnings"])
    for key, content in objects.items():
        get_store().set(key, content)
    assert read(asleep, now=NOW + 2 * HOUR) == "kept"
    assert not any("does not find" in each for each in check_health(now=NOW + 2 * HOUR)["warnings"])


def fail_start(lease: Lease, *, now: datetime) -> None:
    with pytest.raises(SandboxNotReady):
        run(lease, now=now)
    sweeps.reclaim(now=now)


def test_stored_state_that_stays_missing_ends_the_lease_as_lost_with_an_event(asleep) -> None:
    take_objects(Snapshot.objects.get())
    fail_start(asleep, now=NOW + HOUR)
    fail_start(asleep, now=NOW + HOUR + LOSS_TIMEOUT - MINUTE)
    with pytest.raises(LeaseEnded) as ended:
        run(asleep, now=NOW + HOUR + LOSS_TIMEOUT + MINUTE)
    assert ended.value.extra["end_reason"] == "lost"
    event = DataEvent.objects.get(kind="dropped")
    assert event.holder == asleep.pk and "is lost" in event.detail


@pytest.mark.parametrize("evidence", ["listed", "mismatch", "no mark"])
def test_missing_state_that_the_store_does_not_confirm_is_never_lost(asleep, evidence: str) -> None:
    installation.mark_places(now=NOW + HOUR)
    snapshot = Snapshot.objects.get()
    take_objects(snapshot)
    fail_start(asleep, now=NOW + HOUR)
    if evidence == "mismatch":
        Installation.objects.update(mismatch="The store belongs to another installation.")
    elif evidence == "no mark":
        get_store().remove(MARK_NAME)
    else:
        get_store().set(f"{snapshot.key}/other", b"")
    fail_start(asleep, now=NOW + HOUR + 2 * LOSS_TIMEOUT)
    assert not Lease.objects.get(pk=asleep.pk).ended_at


def test_store_that_is_not_mounted_loses_no_state(asleep, settings, tmp_path: Path) -> None:
    installation.mark_places(now=NOW + HOUR)
    workspace.forget_local(Snapshot.objects.get())
    (settings.STORAGE_DIR).rename(tmp_path / "unmounted")
    fail_start(asleep, now=NOW + HOUR)
    fail_start(asleep, now=NOW + HOUR + 2 * LOSS_TIMEOUT)
    (tmp_path / "unmounted").rename(settings.STORAGE_DIR)
    assert read(asleep, now=NOW + HOUR + 2 * LOSS_TIMEOUT + MINUTE) == "kept"


def test_older_snapshot_replaces_a_missing_one_only_once_that_is_lost(asleep) -> None:
    write(asleep, "newer", now=NOW + HOUR)
    passes.evict_idle(now=NOW + 2 * HOUR)
    newest = Snapshot.objects.latest("at")
    objects = take_objects(newest)
    fail_start(asleep, now=NOW + 3 * HOUR)
    for key, content in objects.items():
        get_store().set(key, content)
    assert read(asleep, now=NOW + 3 * HOUR + MINUTE) == "newer"
    passes.evict_idle(now=NOW + 4 * HOUR)
    newest = Snapshot.objects.latest("at")
    take_objects(newest)
    fail_start(asleep, now=NOW + 5 * HOUR)
    assert read(asleep, now=NOW + 5 * HOUR + LOSS_TIMEOUT + MINUTE) == "newer"  # of the snapshot before
    assert DataEvent.objects.filter(kind="older_copy").count() == 1


@pytest.mark.parametrize("answer", [b"<html>Sign in</html>", b""])
def test_object_of_which_one_answer_has_other_content_is_read_again(
    asleep, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    workspace.forget_local(Snapshot.objects.get())
    download, answers = get_store().download, [answer]

    def download_once_damaged(key: str, target: BinaryIO, **more: Any) -> bool:
        if answers:
            target.write(answers.pop())
            return True
        return download(key, target, **more)

    monkeypatch.setattr(get_store(), "download", download_once_damaged)
    assert read(asleep, now=NOW + 2 * HOUR) == "kept"
    assert not DataEvent.objects.exists()
