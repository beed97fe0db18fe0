"""The store fails behind the whole path of an exec, a turn, a sleep, a wake and a destroy: whoever asked is told, what is
in the sandbox stays there, and a sweep makes good for it once the store answers again."""

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
from sandboxes import sweeps as below
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
Fault = Callable[[Handler, Responder], None]  # instead of, or around, how the server answers


# --- an S3 server that keeps what it is given, and answers wrongly when told to -------------------------------------------


class Bucket:
    """What answers at the loopback server. `fault` is how the requests of the verbs in `failing` go wrong."""

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
            respond(501)(handler)  # no removal of many at once
        elif url.query == "uploads" or url.query.startswith("uploads&"):
            respond(200, b"<ListMultipartUploadsResult></ListMultipartUploadsResult>")(handler)
        elif "list-type" in url.query:
            self.list(handler, parse_qs(url.query)["prefix"][0])
        elif key not in self.objects:
            respond(404, b"<Error><Code>NoSuchKey</Code></Error>", Content_Type="application/xml")(handler)
        elif span := handler.headers.get("Range"):
            start, _, end = span.removeprefix("bytes=").partition("-")
            part = self.objects[key][int(start) : int(end) + 1 if end else None]
            respond(206, part, Content_Range=f"bytes {start}-{int(start) + len(part) - 1}/{len(self.objects[key])}")(handler)
        else:
            respond(200, self.objects[key])(handler)

    def list(self, handler: Handler, prefix: str) -> None:
        found = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(value)}</Size><LastModified>2026-11-21T12:00:00Z</LastModified></Contents>"
            for key, value in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        respond(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())(handler)


def server_error(handler: Handler, answer: Responder) -> None:
    respond(500, b"<Error><Code>InternalError</Code></Error>", Content_Type="application/xml")(handler)


def timeout(handler: Handler, answer: Responder) -> None:
    stall_response(handler)


def half_closed(handler: Handler, answer: Responder) -> None:
    """It does what it was asked, and nobody learns of it."""
    handler.wfile.write = len  # type: ignore[method-assign, assignment]
    answer(handler)
    drop_connection(handler)


def truncated(handler: Handler, answer: Responder) -> None:
    respond(200, b"half of", length=1000)(handler)


FULL = "full"
FAULTS: dict[str, Fault] = {
    "500": server_error, "timeout": timeout, "half-closed": half_closed, "truncated": truncated,
}  # fmt: skip


# --- what stores can do wrong, behind one pair of verbs -------------------------------------------------------------------


class Broken:
    """down("PUT") makes these requests fail from now on; up() lets them go well again."""

    def __init__(self, down: Callable[..., object], up: Callable[[], object]) -> None:
        self.down, self.up = down, up


@pytest.fixture
def served() -> Iterator[tuple[ScriptedServer, Bucket]]:
    bucket = Bucket()
    with run_scripted_server(bucket) as server:
        yield server, bucket


def in_bucket(settings: Settings, monkeypatch: pytest.MonkeyPatch, url: str, **more: Any) -> None:
    """Let the store be this S3 server."""
    settings.STORAGE_BACKEND, settings.S3_BUCKET, settings.S3_ENDPOINT = "s3", more.pop("bucket", "shelf"), url
    settings.S3_ACCESS_KEY_ID, settings.S3_SECRET_ACCESS_KEY = more.pop("access", "id"), more.pop("secret", "secret")
    monkeypatch.setattr("sandboxes.storage.s3.Session", lambda: SESSION)  # each reads for a tenth of a second what S3 is
    monkeypatch.setattr("sandboxes.storage.S3Store", partial(S3Store, **more))
    get_store.cache_clear()


def failing(*kinds: str) -> Any:
    @pytest.fixture(params=kinds)
    def fixture(
        request: pytest.FixtureRequest, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> Iterator[Broken]:
        if request.param == FULL:
            with small_disk(tmp_path / "full") as disk:
                settings.STORAGE_DIR = tmp_path / "full" / "store"
                get_store.cache_clear()
                yield disk
            return
        server, bucket = request.getfixturevalue("served")
        patience = 1 if request.param == "timeout" else 20  # seconds: a busy machine is slow now and then
        in_bucket(settings, monkeypatch, server.url, connect_timeout=20, read_timeout=patience, attempts=1)

        def down(*verbs: str) -> None:
            bucket.fault, bucket.failing = FAULTS[request.param], {*verbs}

        yield Broken(down, lambda: bucket.failing.clear())
        get_store.cache_clear()

    return fixture


broken = failing(*FAULTS, FULL)
unread = failing(*FAULTS)  # what is full can be read


@contextmanager
def small_disk(at: Path) -> Iterator[Broken]:
    """A file system of its own, to be filled and emptied again."""
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
        yield Broken(fill, (at / "filler").unlink)
    finally:
        subprocess.run(["umount", str(at)], check=True)


# --- the path -------------------------------------------------------------------------------------------------------------


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


def row(lease: Lease) -> Sandbox:
    return Sandbox.objects.filter(holder=lease.pk).latest("created_at")


def nothing_is_left_over() -> None:
    """After a prune the store has what rows point to, and no Run is open."""
    assert pruning.remove_orphans(now=LATER + timedelta(days=1), grace=timedelta(0)).failures == []
    data = {*Attachment.objects.values_list("data__bundles__key", flat=True)} - {None}
    assert {*get_store().list("agents/")} == data
    assert {*get_store().list("snapshots/")} == {f"{kept.key}/workspace" for kept in Snapshot.objects.filter(forgotten_at=None)}
    assert not Run.objects.filter(ended_at=None).exists()


def test_an_exec_keeps_its_answer_and_its_changes_are_stored_later(one: Lease, two: Lease, broken: Broken) -> None:
    sh(one, "true")
    broken.down("PUT")
    run, said = sh(one, f"echo hello >{DATA}/note; echo done")
    assert (said, run.outcome) == ("done", "ok")
    assert "is not stored yet" in run.note
    assert row(one).state == "waiting" and Attachment.objects.get(sandbox__holder=one.pk).unsaved_since
    assert pruning.persist_unsaved(now=NOW + MINUTE).failures
    assert sh(one, f"cat {DATA}/note")[1] == "hello"
    broken.up()
    assert pruning.persist_unsaved(now=NOW + 2 * MINUTE).counts == {"stored": 1}
    assert sh(two, f"cat {DATA}/note")[1] == "hello"
    nothing_is_left_over()


def test_an_exec_that_cannot_have_its_data_is_refused_and_runs_nothing(one: Lease, two: Lease, unread: Broken, memory) -> None:
    sh(one, f"echo hello >{DATA}/note")
    unread.down("GET")
    with pytest.raises(StoreUnavailable, match="nothing was run"):
        sh(two, "echo ran >/workspace/ran")
    assert "/workspace/ran" not in memory.files(row(two).ref)
    assert (row(two).state, Run.objects.get(sandbox=row(two)).outcome) == ("waiting", "error")
    unread.up()
    assert sh(two, f"cat {DATA}/note")[1] == "hello"
    nothing_is_left_over()


def test_a_client_is_told_to_come_again(pool: Pool, unread: Broken) -> None:
    key = api_keys.issue_key(["did:plc:ada"], now=timezone.now())[1]

    def post(path: str, body: dict[str, Any]) -> Any:
        return Client().post(
            f"/api/v1{path}", body, content_type="application/json", headers={"Authorization": f"Bearer {key}"}
        )

    ask = {"agent_did": "did:plc:ada", "environment_type": "catan", "pool": pool.name}
    one, two = (post("/leases", {**ask, "environment_id": name}).json()["id"] for name in ("game-1", "game-2"))
    assert post(f"/leases/{one}/exec", {"argv": ["sh", "-c", f"echo hello >{DATA}/note"]}).status_code == 200
    unread.down("GET")
    refused = post(f"/leases/{two}/exec", {"argv": ["true"]})
    assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
    assert refused.headers["Content-Type"] == "application/problem+json" and refused.headers["Retry-After"] == "5"
    unread.up()
    assert post(f"/leases/{two}/exec", {"argv": ["cat", f"{DATA}/note"]}).json()["stdout"] == "hello\n"


def test_a_turn_that_cannot_have_its_data_is_not_played_and_its_number_stays_free(
    one: Lease, two: Lease, unread: Broken
) -> None:
    EnvironmentType.objects.filter(name="catan").update(turn_argv=["echo", '{"action": "roll"}'])
    sh(one, f"echo hello >{DATA}/note")
    unread.down("GET")
    with pytest.raises(StoreUnavailable):
        turns.take_turn(two.pk, 1, {}, now=NOW)
    assert not Turn.objects.exists()
    unread.up()
    turn = turns.take_turn(two.pk, 1, {}, now=NOW + MINUTE)
    assert (turn.action, turn.skipped) == ({"action": "roll"}, False)


def test_a_turn_whose_changes_cannot_be_stored_counts(one: Lease, two: Lease, broken: Broken) -> None:
    sh(one, "true")
    argv = ["sh", "-c", f"""echo hello >{DATA}/note; echo '{{"action": "roll"}}'"""]
    EnvironmentType.objects.filter(name="catan").update(turn_argv=argv)
    broken.down("PUT")
    turn = turns.take_turn(one.pk, 1, {}, now=NOW)
    assert turn.action == {"action": "roll"} and turn.run and "is not stored yet" in turn.run.note
    broken.up()
    assert pruning.persist_unsaved(now=NOW + MINUTE).counts == {"stored": 1}
    assert sh(two, f"cat {DATA}/note")[1] == "hello"


def test_a_sandbox_that_cannot_be_stored_stays_awake_and_sleeps_later(one: Lease, broken: Broken, memory) -> None:
    sh(one, "echo hello >note")
    broken.down("PUT")
    assert below.evict_idle(now=NOW + 10 * MINUTE).failures
    assert row(one).state == "waiting" and "could not be stored" in row(one).last_error
    assert memory.files(row(one).ref)["/workspace/note"].content == b"hello\n"
    assert not Snapshot.objects.exists()
    broken.up()
    assert below.evict_idle(now=NOW + 20 * MINUTE).counts == {"put to sleep": 1}
    assert memory.list(str(row(one).pool.owner)) == []
    assert sh(one, "cat note", now=NOW + 21 * MINUTE)[1] == "hello"
    nothing_is_left_over()


def test_a_wake_that_finds_no_store_fails_and_the_next_one_has_everything(one: Lease, unread: Broken) -> None:
    sh(one, "echo hello >note")
    below.evict_idle(now=NOW + 10 * MINUTE)
    asleep = workspace.find_latest(one.pk)
    assert asleep
    workspace.forget_local(asleep)
    unread.down("GET")
    with pytest.raises(SandboxNotReady):
        sh(one, "cat note", now=NOW + 11 * MINUTE)
    below.destroy_due(now=NOW + 12 * MINUTE)
    assert workspace.find_latest(one.pk) == asleep
    unread.up()
    assert sh(one, "cat note", now=NOW + 13 * MINUTE)[1] == "hello"
    assert row(one).source == "cloud"
    nothing_is_left_over()


def test_a_sandbox_is_not_destroyed_before_its_data_is_stored(one: Lease, two: Lease, broken: Broken, memory) -> None:
    sh(one, "true")
    broken.down("PUT")
    sh(one, f"echo hello >{DATA}/note")
    leasing.release(one.pk, now=NOW + MINUTE)
    assert sweeps.reclaim(now=NOW + 2 * MINUTE).failures
    assert row(one).state == "destroying" and memory.files(row(one).ref)
    broken.up()
    assert sweeps.reclaim(now=LATER).counts == {"destroyed": 1, "leases closed": 1}
    assert sh(two, f"cat {DATA}/note", now=LATER)[1] == "hello"
    nothing_is_left_over()


def test_a_copy_that_cannot_be_stored_is_refused_and_can_be_taken_later(one: Lease, broken: Broken) -> None:
    sh(one, "echo hello >note")
    broken.down("PUT")
    with pytest.raises(SandboxError):
        snapshots.take_snapshot(one.pk, name="before", now=NOW)
    assert not Snapshot.objects.exists() and row(one).state == "waiting"
    broken.up()
    taken = snapshots.take_snapshot(one.pk, name="before", now=NOW + MINUTE)
    assert get_store().has(f"{taken.key}/workspace")
    nothing_is_left_over()


# --- the disk under all of it ---------------------------------------------------------------------------------------------


@pytest.fixture
def disk(settings: Settings, tmp_path: Path) -> Iterator[Broken]:
    """The state directory on a disk that is full; the store has room."""
    with small_disk(tmp_path / "small") as disk:
        settings.STATE_DIR = tmp_path / "small"
        yield disk


def test_on_a_full_disk_an_exec_keeps_its_answer_and_its_changes_are_stored_later(one: Lease, two: Lease, disk: Broken) -> None:
    sh(one, "true")
    disk.down()
    run, _ = sh(one, f"echo hello >{DATA}/note")
    assert run.outcome == "ok" and "No space left" in run.note
    with pytest.raises(StoreUnavailable, match="No space left"):
        sh(two, "true")
    disk.up()
    assert pruning.persist_unsaved(now=NOW + MINUTE).counts == {"stored": 1}
    assert sh(two, f"cat {DATA}/note")[1] == "hello"
    nothing_is_left_over()


def test_on_a_full_disk_nothing_sleeps_and_what_sleeps_does_not_wake_until_there_is_room(one: Lease, disk: Broken) -> None:
    sh(one, "echo hello >note; head -c 50000 /dev/zero >large")
    disk.down()
    assert below.evict_idle(now=NOW + 10 * MINUTE).failures
    assert row(one).state == "waiting"
    disk.up()
    assert below.evict_idle(now=NOW + 20 * MINUTE).counts == {"put to sleep": 1}
    asleep = workspace.find_latest(one.pk)
    assert asleep
    workspace.forget_local(asleep)
    disk.down()
    with pytest.raises(SandboxNotReady, match="No space left"):
        sh(one, "cat note", now=NOW + 21 * MINUTE)
    disk.up()
    below.destroy_due(now=NOW + 22 * MINUTE)
    assert sh(one, "cat note", now=NOW + 23 * MINUTE)[1] == "hello"
    assert row(one).source == "cloud"
    nothing_is_left_over()


# --- what works -----------------------------------------------------------------------------------------------------------


def test_all_of_it_on_a_real_server(settings: Settings, monkeypatch: pytest.MonkeyPatch, db: None) -> None:
    names = ("TEST_S3_URL", "TEST_BUCKET", "TEST_S3_ACCESS_KEY_ID", "TEST_S3_SECRET_ACCESS_KEY")
    values = [os.environ.get(name, "") for name in names]
    if not all(values):
        skip_or_fail("TEST_S3_URL is not set: .ci/services starts what it names")
    url, bucket, access, secret = values
    settings.STORAGE_PREFIX = f"t-{uuid.uuid4().hex}/"
    in_bucket(settings, monkeypatch, url, bucket=bucket, access=access, secret=secret)
    pool = Pool.objects.create(name=f"faults-{uuid.uuid4().hex[:12]}", provider="process", capacity=10)

    def lease(environment: str) -> Lease:
        ask = leasing.LeaseRequest("did:plc:ada", environment, "coding", pool=pool.name)
        return leasing.acquire(ask, now=NOW)[0]

    try:
        one, two = lease("game-1"), lease("game-2")
        digest = sh(one, "head -c 20000000 /dev/urandom >large; echo 'spoken of' >'od\u00e9 n\u00e4me'; sha256sum <large")[1]
        execution.exec_command(one.pk, Command(argv=["cp", "large", f"{DATA}/large"], timeout=MINUTE), now=NOW)
        assert below.evict_idle(now=NOW + 10 * MINUTE).counts == {"put to sleep": 1}
        asleep = workspace.find_latest(one.pk)
        assert asleep and get_store().has(f"{asleep.key}/workspace")
        workspace.forget_local(asleep)
        assert sh(one, "sha256sum <large", now=NOW + 11 * MINUTE)[1] == digest
        assert sh(one, "cat 'od\u00e9 n\u00e4me'", now=NOW + 11 * MINUTE)[1] == "spoken of"
        assert row(one).source == "cloud"
        read = Command(argv=["sha256sum", f"{DATA}/large"], timeout=MINUTE)
        assert execution.exec_command(two.pk, read, now=NOW + 11 * MINUTE)[1].stdout.split()[0].decode() == digest.split()[0]
        nothing_is_left_over()
    finally:
        get_store().clear()
        get_store.cache_clear()
        for found in providers.get_provider("process").list(str(pool.owner)):
            providers.get_provider("process").destroy(found.ref)
