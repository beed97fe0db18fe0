"""Store failures during exec, turn, sleep, wake and destroy.

The caller gets an error, unsaved changes stay in the sandbox, and a sweep stores them once the store works again."""

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from boto3.session import Session
from django.test import Client
from django.utils import timezone
from pytest_django import Settings

from leases import api_keys, execution, leasing, snapshots, sweeps, turns
from leases.models import EnvironmentType, Lease, Turn
from sandboxes import providers
from sandboxes import sweeps as sandbox_sweeps
from sandboxes.errors import SandboxError, SandboxNotReady, StoreUnavailable
from sandboxes.models import Attachment, Pool, Run, Sandbox, Snapshot
from sandboxes.providers.base import DATA
from sandboxes.runs import Command
from sandboxes.state import pruning, workspace
from sandboxes.storage import get_store
from sandboxes.storage.s3 import S3Store
from tests.conftest import MINUTE, NOW, skip_or_fail
from tests.support.loopback import (
    Handler,
    Responder,
    ScriptedServer,
    drop_connection,
    respond,
    run_scripted_server,
    stall_response,
)

pytestmark = pytest.mark.django_db
LATER = NOW + timedelta(hours=1)  # every deadline has passed, no lease has
SESSION = Session()
Fault = Callable[[Handler, Responder], None]  # replaces or wraps the server's normal answer


# --- S3 server with fault injection --------------------------------------------------------------------------------------


class Bucket:
    """S3 responder for the loopback server. Requests with the verbs in `failing` are answered by `fault`."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault: Fault | None = None
        self.failing: set[str] = set()

    def __call__(self, handler: Handler) -> None:
        if self.fault and handler.command in self.failing:
            self.fault(handler, self.answer)
        else:
            self.answer(handler)

    def answer(self, handler: Handler) -> None:
        url = urlsplit(handler.path)
        key, body = unquote(url.path).removeprefix("/shelf/"), handler.loopback.seen[-1].body
        if handler.command == "PUT":
            self.objects[key] = body
            respond(200, ETag='"e"')(handler)
        elif handler.command == "DELETE":
            self.objects.pop(key, None)
            respond(204)(handler)
        elif handler.command == "POST":
            respond(501)(handler)  # batch removal is not supported
        elif url.query == "uploads" or url.query.startswith("uploads&"):
            respond(200, b"<ListMultipartUploadsResult></ListMultipartUploadsResult>")(handler)
        elif "list-type" in url.query:
            self.list(handler, parse_qs(url.query)["prefix"][0])
        elif key not in self.objects:
            respond(404, b"<Error><Code>NoSuchKey</Code></Error>", Content_Type="application/xml")(handler)
        elif byte_range := handler.headers.get("Range"):
            start, _, end = byte_range.removeprefix("bytes=").partition("-")
            part = self.objects[key][int(start) : int(end) + 1 if end else None]
            respond(206, part, Content_Range=f"bytes {start}-{int(start) + len(part) - 1}/{len(self.objects[key])}")(handler)
        else:
            respond(200, self.objects[key])(handler)

    def list(self, handler: Handler, prefix: str) -> None:
        contents = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(value)}</Size><LastModified>2026-11-21T12:00:00Z</LastModified></Contents>"
            for key, value in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        respond(200, f"<ListBucketResult>{contents}</ListBucketResult>".encode())(handler)


def server_error(handler: Handler, answer: Responder) -> None:
    respond(500, b"<Error><Code>InternalError</Code></Error>", Content_Type="application/xml")(handler)


def timeout(handler: Handler, answer: Responder) -> None:
    stall_response(handler)


def half_closed(handler: Handler, answer: Responder) -> None:
    """The request is executed, but the connection is closed without a response."""
    handler.wfile.write = len  # type: ignore[method-assign, assignment]
    answer(handler)
    drop_connection(handler)


def truncated(handler: Handler, answer: Responder) -> None:
    respond(200, b"half of", length=1000)(handler)


FULL = "full"
FAULTS: dict[str, Fault] = {
    "500": server_error, "timeout": timeout, "half-closed": half_closed, "truncated": truncated,
}  # fmt: skip


# --- faults behind one interface -------------------------------------------------------------------------------------------


class FaultSwitch:
    """down("PUT") makes these requests fail from now on; up() makes them work again."""

    def __init__(self, down: Callable[..., object], up: Callable[[], object]) -> None:
        self.down, self.up = down, up


@pytest.fixture
def served() -> Iterator[tuple[ScriptedServer, Bucket]]:
    bucket = Bucket()
    with run_scripted_server(bucket) as server:
        yield server, bucket


def configure_s3(settings: Settings, monkeypatch: pytest.MonkeyPatch, url: str, **options: Any) -> None:
    """Configure this S3 server as the store."""
    settings.STORAGE_BACKEND, settings.S3_BUCKET, settings.S3_ENDPOINT = "s3", options.pop("bucket", "shelf"), url
    settings.S3_ACCESS_KEY_ID, settings.S3_SECRET_ACCESS_KEY = options.pop("access", "id"), options.pop("secret", "secret")
    monkeypatch.setattr("sandboxes.storage.s3.Session", lambda: SESSION)  # creating a session takes a tenth of a second
    monkeypatch.setattr("sandboxes.storage.S3Store", partial(S3Store, **options))
    get_store.cache_clear()


def fault_fixture(*kinds: str) -> Any:
    @pytest.fixture(params=kinds)
    def fixture(
        request: pytest.FixtureRequest, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> Iterator[FaultSwitch]:
        if request.param == FULL:
            with small_disk(tmp_path / "full") as disk:
                settings.STORAGE_DIR = tmp_path / "full" / "store"
                get_store.cache_clear()
                yield disk
            return
        server, bucket = request.getfixturevalue("served")
        read_timeout = 1 if request.param == "timeout" else 20  # seconds; a busy machine is sometimes slow
        configure_s3(settings, monkeypatch, server.url, connect_timeout=20, read_timeout=read_timeout, attempts=1)

        def down(*verbs: str) -> None:
            bucket.fault, bucket.failing = FAULTS[request.param], {*verbs}

        yield FaultSwitch(down, lambda: bucket.failing.clear())
        get_store.cache_clear()

    return fixture


broken = fault_fixture(*FAULTS, FULL)
unread = fault_fixture(*FAULTS)  # a full disk can still be read


@contextmanager
def small_disk(at: Path) -> Iterator[FaultSwitch]:
    """Mount a small file system that can be filled and emptied."""
    if os.geteuid():
        pytest.skip("only root can mount a file system to fill")
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "lh-full", str(at)], capture_output=True, text=True)
    if mounted.returncode:
        skip_or_fail(f"no file system can be mounted here: {mounted.stderr.strip()}")

    def fill(*verbs: str) -> None:
        filled = subprocess.run(["dd", "if=/dev/zero", f"of={at}/filler", "bs=4096"], capture_output=True, text=True)
        assert "No space left" in filled.stderr

    try:
        yield FaultSwitch(fill, (at / "filler").unlink)
    finally:
        subprocess.run(["umount", str(at)], check=True)


# --- requests and sweeps ---------------------------------------------------------------------------------------------------


@pytest.fixture
def one(grant: Callable[..., Lease]) -> Lease:
    return grant(environment="game-1")


@pytest.fixture
def two(grant: Callable[..., Lease]) -> Lease:
    """A second sandbox of the same agent."""
    return grant(environment="game-2")


def sh(lease: Lease, line: str, *, now: datetime = NOW) -> tuple[Run, str]:
    run, result = execution.exec_command(lease.pk, Command(argv=["sh", "-c", line], timeout=MINUTE), now=now)
    return run, (result.stdout + result.stderr).decode().strip()


def sandbox_of(lease: Lease) -> Sandbox:
    return Sandbox.objects.filter(holder=lease.pk).latest("created_at")


def assert_nothing_left() -> None:
    """After a prune the store contains exactly what rows point to, and no run is open."""
    assert pruning.remove_orphans(now=LATER + timedelta(days=1), grace=timedelta(0)).failures == []
    data = {*Attachment.objects.values_list("data__bundles__key", flat=True)} - {None}
    assert {*get_store().list("agents/")} == data
    assert {*get_store().list("snapshots/")} == {
        f"{snapshot.key}/workspace" for snapshot in Snapshot.objects.filter(forgotten_at=None)
    }
    assert not Run.objects.filter(ended_at=None).exists()


def test_exec_succeeds_and_its_changes_are_stored_later(one: Lease, two: Lease, broken: FaultSwitch) -> None:
    sh(one, "true")
    broken.down("PUT")
    run, output = sh(one, f"echo hello >{DATA}/note; echo done")
    assert (output, run.outcome) == ("done", "ok")
    assert "is not stored yet" in run.note
    assert sandbox_of(one).state == "waiting" and Attachment.objects.get(sandbox__holder=one.pk).unsaved_since
    assert pruning.persist_unsaved(now=NOW + MINUTE).failures
    assert sh(one, f"cat {DATA}/note")[1] == "hello"
    broken.up()
    assert pruning.persist_unsaved(now=NOW + 2 * MINUTE).counts == {"stored": 1}
    assert sh(two, f"cat {DATA}/note")[1] == "hello"
    assert_nothing_left()


def test_exec_without_its_data_is_refused_and_runs_nothing(one: Lease, two: Lease, unread: FaultSwitch, memory) -> None:
    sh(one, f"echo hello >{DATA}/note")
    unread.down("GET")
    with pytest.raises(StoreUnavailable, match="nothing was run"):
        sh(two, "echo ran >/workspace/ran")
    assert "/workspace/ran" not in memory.files(sandbox_of(two).ref)
    assert (sandbox_of(two).state, Run.objects.get(sandbox=sandbox_of(two)).outcome) == ("waiting", "error")
    unread.up()
    assert sh(two, f"cat {DATA}/note")[1] == "hello"
    assert_nothing_left()


def test_client_gets_503_with_retry_after(pool: Pool, unread: FaultSwitch) -> None:
    key = api_keys.issue_key(["did:plc:ada"], now=timezone.now())[1]

    def post(path: str, body: dict[str, Any]) -> Any:
        return Client().post(
            f"/api/v1{path}", body, content_type="application/json", headers={"Authorization": f"Bearer {key}"}
        )

    request = {"agent_did": "did:plc:ada", "environment_type": "catan", "pool": pool.name}
    one, two = (post("/leases", {**request, "environment_id": name}).json()["id"] for name in ("game-1", "game-2"))
    assert post(f"/leases/{one}/exec", {"argv": ["sh", "-c", f"echo hello >{DATA}/note"]}).status_code == 200
    unread.down("GET")
    refused = post(f"/leases/{two}/exec", {"argv": ["true"]})
    assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
    assert refused.headers["Content-Type"] == "application/problem+json" and refused.headers["Retry-After"] == "5"
    unread.up()
    assert post(f"/leases/{two}/exec", {"argv": ["cat", f"{DATA}/note"]}).json()["stdout"] == "hello\n"


def test_turn_without_its_data_is_refused_and_its_number_stays_free(one: Lease, two: Lease, unread: FaultSwitch) -> None:
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["echo", '{"action": "roll"}'])
    sh(one, f"echo hello >{DATA}/note")
    unread.down("GET")
    with pytest.raises(StoreUnavailable):
        turns.take_turn(two.pk, 1, {}, now=NOW)
    assert not Turn.objects.exists()
    unread.up()
    turn = turns.take_turn(two.pk, 1, {}, now=NOW + MINUTE)
    assert (turn.action, turn.skipped) == ({"action": "roll"}, False)


def test_turn_with_unsaved_changes_is_recorded(one: Lease, two: Lease, broken: FaultSwitch) -> None:
    sh(one, "true")
    argv = ["sh", "-c", f"""echo hello >{DATA}/note; echo '{{"action": "roll"}}'"""]
    EnvironmentType.objects.filter(name="catan").update(turn_argv=argv)
    broken.down("PUT")
    turn = turns.take_turn(one.pk, 1, {}, now=NOW)
    assert turn.action == {"action": "roll"} and turn.run and "is not stored yet" in turn.run.note
    broken.up()
    assert pruning.persist_unsaved(now=NOW + MINUTE).counts == {"stored": 1}
    assert sh(two, f"cat {DATA}/note")[1] == "hello"


def test_sandbox_that_cannot_be_stored_is_evicted_later(one: Lease, broken: FaultSwitch, memory) -> None:
    sh(one, "echo hello >note")
    broken.down("PUT")
    assert sandbox_sweeps.evict_idle(now=NOW + 10 * MINUTE).failures
    assert sandbox_of(one).state == "waiting" and "could not be stored" in sandbox_of(one).last_error
    assert memory.files(sandbox_of(one).ref)["/workspace/note"].content == b"hello\n"
    assert not Snapshot.objects.exists()
    broken.up()
    assert sandbox_sweeps.evict_idle(now=NOW + 20 * MINUTE).counts == {"put to sleep": 1}
    assert memory.list(str(sandbox_of(one).pool.owner)) == []
    assert sh(one, "cat note", now=NOW + 21 * MINUTE)[1] == "hello"
    assert_nothing_left()


def test_wake_fails_while_the_store_fails_and_succeeds_later(one: Lease, unread: FaultSwitch) -> None:
    sh(one, "echo hello >note")
    sandbox_sweeps.evict_idle(now=NOW + 10 * MINUTE)
    snapshot = workspace.find_latest(one.pk)
    assert snapshot
    workspace.forget_local(snapshot)
    unread.down("GET")
    with pytest.raises(SandboxNotReady):
        sh(one, "cat note", now=NOW + 11 * MINUTE)
    sandbox_sweeps.destroy_due(now=NOW + 12 * MINUTE)
    assert workspace.find_latest(one.pk) == snapshot
    unread.up()
    assert sh(one, "cat note", now=NOW + 13 * MINUTE)[1] == "hello"
    assert sandbox_of(one).source == "cloud"
    assert_nothing_left()


def test_sandbox_is_not_destroyed_before_its_data_is_stored(one: Lease, two: Lease, broken: FaultSwitch, memory) -> None:
    sh(one, "true")
    broken.down("PUT")
    sh(one, f"echo hello >{DATA}/note")
    leasing.release(one.pk, now=NOW + MINUTE)
    assert sweeps.reclaim(now=NOW + 2 * MINUTE).failures
    assert sandbox_of(one).state == "destroying" and memory.files(sandbox_of(one).ref)
    broken.up()
    assert sweeps.reclaim(now=LATER).counts == {"destroyed": 1, "leases closed": 1}
    assert sh(two, f"cat {DATA}/note", now=LATER)[1] == "hello"
    assert_nothing_left()


def test_snapshot_that_cannot_be_stored_fails_and_can_be_retried(one: Lease, broken: FaultSwitch) -> None:
    sh(one, "echo hello >note")
    broken.down("PUT")
    with pytest.raises(SandboxError):
        snapshots.take_snapshot(one.pk, name="before", now=NOW)
    assert not Snapshot.objects.exists() and sandbox_of(one).state == "waiting"
    broken.up()
    snapshot = snapshots.take_snapshot(one.pk, name="before", now=NOW + MINUTE)
    assert get_store().has(f"{snapshot.key}/workspace")
    assert_nothing_left()


# --- full state directory --------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(settings: Settings, tmp_path: Path) -> Iterator[FaultSwitch]:
    """The state directory on a disk that can be filled. The store has space."""
    with small_disk(tmp_path / "small") as disk:
        settings.STATE_DIR = tmp_path / "small"
        yield disk


def test_exec_on_a_full_disk_succeeds_and_its_changes_are_stored_later(one: Lease, two: Lease, disk: FaultSwitch) -> None:
    sh(one, "true")
    disk.down()
    run, _ = sh(one, f"echo hello >{DATA}/note")
    assert run.outcome == "ok" and "No space left" in run.note
    with pytest.raises(StoreUnavailable, match="No space left"):
        sh(two, "true")
    disk.up()
    assert pruning.persist_unsaved(now=NOW + MINUTE).counts == {"stored": 1}
    assert sh(two, f"cat {DATA}/note")[1] == "hello"
    assert_nothing_left()


def test_eviction_and_wake_fail_on_a_full_disk_until_there_is_space(one: Lease, disk: FaultSwitch) -> None:
    sh(one, "echo hello >note; head -c 50000 /dev/zero >large")
    disk.down()
    assert sandbox_sweeps.evict_idle(now=NOW + 10 * MINUTE).failures
    assert sandbox_of(one).state == "waiting"
    disk.up()
    assert sandbox_sweeps.evict_idle(now=NOW + 20 * MINUTE).counts == {"put to sleep": 1}
    snapshot = workspace.find_latest(one.pk)
    assert snapshot
    workspace.forget_local(snapshot)
    disk.down()
    with pytest.raises(SandboxNotReady, match="No space left"):
        sh(one, "cat note", now=NOW + 21 * MINUTE)
    disk.up()
    sandbox_sweeps.destroy_due(now=NOW + 22 * MINUTE)
    assert sh(one, "cat note", now=NOW + 23 * MINUTE)[1] == "hello"
    assert sandbox_of(one).source == "cloud"
    assert_nothing_left()


# --- real S3 server --------------------------------------------------------------------------------------------------------


def test_state_round_trip_on_a_real_s3_server(settings: Settings, monkeypatch: pytest.MonkeyPatch, db: None) -> None:
    names = ("TEST_S3_URL", "TEST_BUCKET", "TEST_S3_ACCESS_KEY_ID", "TEST_S3_SECRET_ACCESS_KEY")
    values = [os.environ.get(name, "") for name in names]
    if not all(values):
        skip_or_fail("TEST_S3_URL is not set: .ci/services starts what it names")
    url, bucket, access, secret = values
    settings.STORAGE_PREFIX = f"t-{uuid.uuid4().hex}/"
    configure_s3(settings, monkeypatch, url, bucket=bucket, access=access, secret=secret)
    pool = Pool.objects.create(name=f"faults-{uuid.uuid4().hex[:12]}", provider="process", capacity=10)

    def lease(environment: str) -> Lease:
        request = leasing.LeaseRequest("did:plc:ada", environment, "coding", pool=pool.name)
        return leasing.acquire(request, now=NOW)[0]

    try:
        one, two = lease("game-1"), lease("game-2")
        digest = sh(one, "head -c 20000000 /dev/urandom >large; echo 'spoken of' >'od\u00e9 n\u00e4me'; sha256sum <large")[1]
        execution.exec_command(one.pk, Command(argv=["cp", "large", f"{DATA}/large"], timeout=MINUTE), now=NOW)
        assert sandbox_sweeps.evict_idle(now=NOW + 10 * MINUTE).counts == {"put to sleep": 1}
        snapshot = workspace.find_latest(one.pk)
        assert snapshot and get_store().has(f"{snapshot.key}/workspace")
        workspace.forget_local(snapshot)
        assert sh(one, "sha256sum <large", now=NOW + 11 * MINUTE)[1] == digest
        assert sh(one, "cat 'od\u00e9 n\u00e4me'", now=NOW + 11 * MINUTE)[1] == "spoken of"
        assert sandbox_of(one).source == "cloud"
        read = Command(argv=["sha256sum", f"{DATA}/large"], timeout=MINUTE)
        assert execution.exec_command(two.pk, read, now=NOW + 11 * MINUTE)[1].stdout.split()[0].decode() == digest.split()[0]
        assert_nothing_left()
    finally:
        get_store().clear()
        get_store.cache_clear()
        for sandbox in providers.get_provider("process").list(str(pool.owner)):
            providers.get_provider("process").destroy(sandbox.ref)
