"""Ingestion and rotation of nginx's access log."""

import json
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from leases import execution
from leases.models import Lease
from sandboxes.egress.logs import access_log, tail
from sandboxes.models import LlmCall, Sandbox
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.unit.sandboxes.egress.test_upstream_records import append, settle

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)


def line(number: int = 1, **fields: Any) -> bytes:
    values = {
        "id": f"{number:032x}", "slot": 3, "at": f"{NOW.timestamp():.3f}", "took": "1.500", "method": "POST",
        "uri": "/v1/chat/completions", "status": 200, "sent": 700, "received": 1200, "upstream": "200", "limit": "PASSED",
    }  # fmt: skip
    return json.dumps({**values, **fields}).encode() + b"\n"


def refused(number: int = 1, status: int = 403, **fields: Any) -> bytes:
    return line(number, **{"status": status, "uri": "/v1/files", "upstream": "", "limit": "", **fields})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "access.log"


@pytest.fixture
def sandbox(grant: Callable[..., Lease]) -> Sandbox:
    return wake_sandbox(grant(now=NOW - HOUR), now=NOW - HOUR)


def wake_sandbox(lease: Lease, now: datetime) -> Sandbox:
    """Wake the lease's sandbox, and give it slot 3."""
    execution.exec_command(lease.pk, Command(argv=["true"], timeout=MINUTE), now=now)
    Sandbox.objects.filter(holder=lease.pk).update(slot=3)
    return Sandbox.objects.get(holder=lease.pk)


def call(number: int = 1, **fields: Any) -> LlmCall:
    asked = {"started_at": NOW - MINUTE, "deadline_at": NOW + HOUR}
    return LlmCall.objects.create(call_id=f"{number:032x}", **{**asked, **fields})


def collect(file: Path, now=NOW) -> dict[str, int]:
    return dict(access_log.collect_access_log(file, now))


def test_logged_call_is_marked_and_otherwise_unchanged(file: Path) -> None:
    row = call(ended_at=NOW, outcome="ok", status=200)
    append(file, line())
    assert collect(file) == {"logged": 1}
    row.refresh_from_db()
    assert (row.logged_at, row.outcome, row.sandbox) == (NOW, "ok", None)
    assert collect(file, NOW + HOUR) == {}


def test_logged_call_not_settled_within_a_minute_of_its_end_is_lost(file: Path) -> None:
    row, not_logged = call(), call(2)
    append(file, line())
    assert collect(file) == {"logged": 1}
    assert collect(file, NOW + MINUTE) == {}
    assert collect(file, NOW + 2 * MINUTE) == {"closed as lost": 1}
    row.refresh_from_db(), not_logged.refresh_from_db()
    assert (row.outcome, row.ended_at, row.cost, row.priced) == ("lost", NOW + 2 * MINUTE, None, "")
    assert not_logged.outcome == "open"


@pytest.mark.parametrize(
    ("status", "code"),
    {403: "path_forbidden", 413: "too_large", 429: "too_many", 400: "malformed", 414: "too_large", 418: "status_418"}.items(),
)
def test_request_refused_by_nginx_is_a_row_of_the_slots_sandbox(file: Path, sandbox: Sandbox, status: int, code: str) -> None:
    append(file, refused(status=status, uri="/admin/" + "x" * 300))
    assert collect(file) == {"refused": 1}
    row = LlmCall.objects.get()
    assert (row.outcome, row.status, row.code, row.cost, row.priced) == ("refused", status, code, None, "")
    assert (row.sandbox, row.holder, row.agent_did, row.environment_id) == (sandbox, sandbox.holder, "did:plc:ada", "game-1")
    assert (row.started_at, row.ended_at, row.logged_at) == (NOW - timedelta(seconds=1.5), NOW, NOW)
    assert (row.sent_bytes, row.received_bytes, row.path) == (700, 1200, "/admin/" + "x" * 192 + "…")


@pytest.mark.parametrize(
    ("fields", "whose"),
    [
        ({"state": "destroyed", "slot": 3, "destroyed_at": NOW + MINUTE}, True),
        ({"state": "destroyed", "slot": 3, "destroyed_at": NOW - MINUTE}, False),
        ({"slot": 3, "slot_since": None, "created_at": NOW + MINUTE}, False),
        ({"slot_since": NOW + MINUTE}, False),
        ({"slot": 4}, False),
        ({"slot": None}, False),
    ],
)
def test_request_belongs_to_the_sandbox_that_held_the_slot_at_the_time(
    file, sandbox: Sandbox, fields: Any, whose: bool
) -> None:
    Sandbox.objects.filter(pk=sandbox.pk).update(**fields)
    append(file, refused())
    collect(file, NOW + HOUR)
    row = LlmCall.objects.get()
    assert (row.sandbox_id, row.agent_did) == ((sandbox.pk, "did:plc:ada") if whose else (None, ""))


def test_successive_sandboxes_of_a_slot_have_their_own_requests(file: Path, sandbox: Sandbox, grant) -> None:
    Sandbox.objects.filter(pk=sandbox.pk).update(state="destroyed", destroyed_at=NOW)
    wake_sandbox(grant(environment="game-2", now=NOW + MINUTE), now=NOW + MINUTE)
    append(file, refused(1), refused(2, at=(NOW + 2 * MINUTE).timestamp()))
    collect(file, NOW + HOUR)
    assert [*LlmCall.objects.order_by("call_id").values_list("environment_id", flat=True)] == ["game-1", "game-2"]


def test_stored_refusals_per_sandbox_are_limited(file: Path, sandbox: Sandbox) -> None:
    append(file, *[refused(number) for number in range(1, 151)])
    assert collect(file) == {"refused": 100, "refused, not stored": 50}
    append(file, *[refused(number) for number in range(151, 161)])
    assert collect(file) == {"refused, not stored": 10}
    append(file, *[refused(number, slot=9) for number in range(161, 171)])
    assert collect(file) == {"refused": 10}
    append(file, *[refused(number, at=(NOW + HOUR).timestamp()) for number in range(171, 181)])
    assert collect(file) == {"refused": 10}
    assert LlmCall.objects.count() == 120


@pytest.mark.parametrize(
    ("status", "given", "outcome", "code", "counted"),
    [
        (200, "", "ok", "", "unmetered"), (502, "", "failed", "status_502", "refused"),
        (429, "", "refused", "too_many", "refused"), (403, "no_lease", "refused", "no_lease", "refused"),
    ],
)  # fmt: skip
def test_forwarded_request_without_a_row_is_recorded_unpriced(file, status, given, outcome, code, counted) -> None:
    """A refusal by the server has a code, which is kept."""
    append(file, line(status=status, upstream=str(status), code=given))
    assert collect(file) == {counted: 1}
    row = LlmCall.objects.get()
    assert (row.outcome, row.status, row.code, row.cost, row.priced) == (outcome, status, code, None, "")


def test_successful_model_list_request_is_not_a_call(file: Path) -> None:
    append(file, line(1, method="GET", uri="/v1/models"), refused(2, uri="/v1/models"))
    assert collect(file) == {"refused": 1}
    assert [row.status for row in LlmCall.objects.all()] == [403]


def test_message_to_the_tools_is_no_call_unless_it_is_refused(file: Path) -> None:
    append(file, line(1, uri="/mcp"), line(2, uri="/mcp", status=405, upstream="405"))
    append(file, line(3, uri="/mcp", status=403, upstream="403", code="tools_not_allowed"), refused(4, uri="/mcp"))
    assert collect(file) == {"refused": 2}
    assert {row.code for row in LlmCall.objects.all()} == {"tools_not_allowed", "path_forbidden"}


@pytest.mark.parametrize("status", [b"000", b"009"])
def test_request_without_a_status_is_not_malformed(file: Path, status: bytes) -> None:
    append(file, refused().replace(b"403", status))
    assert collect(file) == {"refused": 1}
    assert LlmCall.objects.get().outcome == "refused"


def test_row_inserted_concurrently_by_the_server_is_kept(file: Path, at_checkpoint) -> None:
    append(file, refused(status=499, upstream="-"))
    at_checkpoint("lines read", call)
    assert collect(file) == {"logged": 1}
    assert LlmCall.objects.get().outcome == "open"


def test_repeated_line_counts_once(file: Path, sandbox: Sandbox) -> None:
    append(file, refused(), refused())
    assert collect(file) == {"refused": 1}
    append(file, refused())
    assert collect(file) == {}
    assert LlmCall.objects.count() == 1


MALFORMED_LINES = [
    b"x", b"[]", b"{}", b"\xff", b"[" * 50_000, line(id="x"), line(id="A" * 32), line(id=None), line(slot=-1), line(slot="x"),
    line(slot=1 << 40), line(at="never"), line(at=1e300), line(at="nan"), line(at="inf"), line(took="-1"), line(took=1e12),
    line(status=1000), line(status=None), line(sent=1 << 70), line(uri=None), line(uri=7),
    line().replace(b'"upstream"', b'"up"'),
]  # fmt: skip


@pytest.mark.parametrize("wrong", MALFORMED_LINES)
def test_malformed_line_is_counted_and_skipped(file: Path, wrong: bytes) -> None:
    append(file, wrong.strip() + b"\n", refused(2))
    assert collect(file) == {"malformed": 1, "refused": 1}


@pytest.mark.parametrize("path", [b"/\xff\xfe", rb"/\u0000", rb"/\ud800", "/ü€𝄞".encode(), rb"/\"<script>"])
def test_any_bytes_in_a_path_can_be_stored(file: Path, path: bytes) -> None:
    append(file, refused().replace(b"/v1/files", path))
    assert collect(file) == {"refused": 1}
    assert LlmCall.objects.get().path.startswith("/")


# --- rotation ---------------------------------------------------------------------------------------------------------


class Nginx:
    """Writer that keeps its file open across a rename until `reopen`."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, 0
        self.path.touch()
        self.reopen()

    def reopen(self) -> None:
        self.file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def log(self) -> None:
        self.number += 1
        os.write(self.file, refused(self.number, slot=self.number))


def test_large_log_is_rotated_and_removed_once_collected(file: Path) -> None:
    nginx, old = Nginx(file), file.with_name("access.log.1")
    nginx.log()
    assert not access_log.rotate_log(file, nginx.reopen, now=NOW, max_bytes=10_000)
    assert access_log.rotate_log(file, nginx.reopen, now=NOW, max_bytes=100)
    nginx.log()
    assert not access_log.rotate_log(file, nginx.reopen, now=NOW, max_bytes=100)
    assert old.exists()  # an nginx worker may still write to it
    settle(old)
    assert not access_log.rotate_log(file, nginx.reopen, now=NOW, max_bytes=100)
    assert not old.exists()
    assert LlmCall.objects.count() == 2
    assert access_log.rotate_log(file, nginx.reopen, now=NOW, max_bytes=100)


@pytest.mark.parametrize("at", ["log renamed", "log reopened", "lines read", "lines applied", "lines committed"])
@pytest.mark.parametrize("largest", [0, 100_000])
def test_interrupted_rotation_loses_no_line(file: Path, at_checkpoint, at: str, largest: int) -> None:
    nginx, old = Nginx(file), file.with_name("access.log.1")
    access_log.collect_access_log(file, NOW)

    nginx.log()
    at_checkpoint(at)
    for _ in range(6):
        try:
            access_log.rotate_log(file, nginx.reopen, now=NOW, max_bytes=largest)
        except SimulatedCrash:
            nginx.log()
        else:
            nginx.log()
        if old.exists():
            settle(old)
    access_log.collect_access_log(file, NOW)
    assert LlmCall.objects.count() == nginx.number == 7
    assert tail.find_position(file) is not None
