"""Stores of a lease through the API: chat history, artifacts, audit log, session index."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.conf import settings as configured
from django.db.models import F
from django.utils import timezone

from leases import sweeps
from leases.models import Lease
from sandboxes import storage
from sandboxes.models import Sandbox
from sandboxes.storage.base import StoreError
from sandboxes.storage.memory import MemoryStore
from tests.api.conftest import ADA, ApiClient, assert_refused, expire_lease

pytestmark = pytest.mark.django_db

MESSAGE = {"role": "user", "content": "Good morning"}
ENTRY = {"action": "file.deleted", "path": "/workspace/x"}
WRITES: list[tuple[str, str, Any]] = [
    ("POST", "chat", MESSAGE), ("POST", "audit", ENTRY), ("PUT", "artifacts/a", b"x"), ("PUT", "sessions/s", {}),
    ("DELETE", "artifacts/b", None),
]  # fmt: skip
LISTS = ["chat", "audit", "artifacts", "sessions"]
READS = [("GET", path, None) for path in (*LISTS, "artifacts/a", "sessions/s")]


@pytest.fixture
def build_url(lease) -> Callable[[str], str]:
    return lambda path: f"leases/{lease['id']}/{path}"


@pytest.fixture
def fill(ada: ApiClient, build_url) -> Callable[[], None]:
    """Write one entry to each store."""

    def write_all() -> None:
        ada.put(build_url("artifacts/b"), b"x")
        for method, path, body in WRITES:
            assert ada(method, build_url(path), body).status_code < 300

    return write_all


# --- chat and audit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "result", "field"), [("chat", MESSAGE, "message"), ("audit", ENTRY, "entry")])
def test_an_appended_event_is_read_back(ada: ApiClient, build_url, path: str, result: dict[str, Any], field: str) -> None:
    result = result | {"content": [{"type": "text", "text": "ä\0"}, None, 1.5], "x": {"y": []}}
    response = ada.post(build_url(path), result)
    shown = response.json()
    assert (response.status_code, shown[field]) == (201, result)
    assert shown["actor"].startswith("key ")
    assert ada.get(build_url(path)).json() == {"results": [shown], "next": None}
    assert ada.get(build_url(f"{path}/{shown['id']}")).json() == shown
    assert ada.get(build_url("chat" if path == "audit" else "audit")).json()["results"] == []
    for event_id in ("x", "%00", "..", "0" * 600, "000000000000000001-" + "0" * 16 + "-0000000001"):
        assert ada.get(build_url(f"{path}/{event_id}")).status_code == 404


@pytest.mark.parametrize("order", ["newest", "oldest"])
@pytest.mark.parametrize("path", ["chat", "audit"])
def test_pages_of_events_follow_each_other(ada: ApiClient, build_url, path: str, order: str) -> None:
    for n in range(5):
        last = ada.post(build_url(path), {"content": None} | MESSAGE | ENTRY | {"n": n}).json()["id"]
    seen, following = [], build_url(f"{path}?limit=2&order={order}")
    while following:
        page = ada.get(following).json()
        assert 1 <= len(page["results"]) <= 2
        seen += [(event.get("message") or event["entry"])["n"] for event in page["results"]]
        following = page["next"]
    assert seen == ([4, 3, 2, 1, 0] if order == "newest" else [0, 1, 2, 3, 4])
    new_events = build_url(f"{path}?order=oldest&cursor={last}")
    assert ada.get(new_events).json()["results"] == []
    new = ada.post(build_url(path), {"role": "assistant", "content": None, "action": "x"}).json()
    assert ada.get(new_events).json()["results"] == [new]


def test_an_event_that_exceeds_the_limit_when_stored_is_refused(ada: ApiClient, build_url) -> None:
    floats = b",".join([b"1e22"] * 52_000)  # Python writes 1e+22
    response = ada.post(build_url("chat"), b'{"role": "user", "content": [' + floats + b"]}")
    assert (response.status_code, response.json()["code"]) == (400, "store_refused")


# --- artifacts ----------------------------------------------------------------------------------------------------


def test_an_artifact_is_returned_as_stored(ada: ApiClient, build_url) -> None:
    content = bytes(range(256)) * 10_000  # more than is held in memory
    response = ada.put(build_url("artifacts/map.png"), content, content_type="image/png")
    shown = response.json()
    assert (response.status_code, shown["name"], shown["media_type"]) == (201, "map.png", "image/png")
    assert shown["size_bytes"] == len(content)
    found = ada.get(build_url("artifacts/map.png"))
    assert b"".join(found.streaming_content) == content
    assert (found["Content-Type"], found["Content-Length"]) == ("image/png", str(len(content)))
    assert (found["ETag"], found["X-Content-Type-Options"]) == (f'"{shown["sha256"]}"', "nosniff")
    assert found["Content-Disposition"].startswith("attachment")
    assert ada.get(build_url("artifacts")).json() == {"results": [shown], "next": None}


def test_an_artifact_is_replaced_and_deleted(ada: ApiClient, build_url) -> None:
    assert ada.put(build_url("artifacts/a"), b"old", content_type="").json()["media_type"] == "application/octet-stream"
    assert ada.put(build_url("artifacts/a"), b"n", content_type="text/plain; charset=utf-8").status_code == 200
    found = ada.get(build_url("artifacts/a"))
    assert (b"".join(found.streaming_content), found["Content-Type"]) == (b"n", "text/plain; charset=utf-8")
    assert ada.delete(build_url("artifacts/a")).status_code == 204
    assert ada.delete(build_url("artifacts/a")).status_code == 404
    assert ada.get(build_url("artifacts/a")).status_code == 404
    assert ada.get(build_url("artifacts")).json()["results"] == []


def test_artifacts_are_paged_by_name(ada: ApiClient, build_url) -> None:
    for name in "cab":
        ada.put(build_url(f"artifacts/{name}"), b"x")
    first = ada.get(build_url("artifacts?limit=2")).json()
    rest = ada.get(first["next"]).json()
    assert [[row["name"] for row in page["results"]] for page in (first, rest)] == [["a", "b"], ["c"]]
    assert rest["next"] is None


def test_invalid_names_and_media_types_are_rejected(ada: ApiClient, build_url) -> None:
    for name in (".hidden", "-", "a%20b", "%C3%A4", "a%00", "a%0A", "x" * 129, "%ED%A0%80"):
        for method in ("PUT", "GET", "DELETE"):
            assert_refused(ada, method, build_url(f"artifacts/{name}"), b"", 400, "name")
        for method in ("PUT", "GET"):
            assert_refused(ada, method, build_url(f"sessions/{name}"), b"{}", 400, "session_id")
        for path in ("artifacts", "sessions"):
            assert_refused(ada, "GET", build_url(f"{path}?cursor={name}"), None, 400, "cursor")
    for kind in ("text", "text/html, text/plain", "a/b" * 100, "text/plain;\tx=y"):
        assert_refused(ada, "PUT", build_url("artifacts/a"), b"x", 400, "Content-Type", content_type=kind)
    assert [ada.get(build_url(path)).json()["results"] for path in LISTS] == [[]] * 4


# --- sessions -----------------------------------------------------------------------------------------------------


def test_a_session_is_the_document_stored_last(ada: ApiClient, build_url) -> None:
    ada.put(build_url("sessions/s1"), json.dumps({"title": "first"}).encode())
    response = ada.put(build_url("sessions/s1"), json.dumps({"title": "ä", "turns": 3}).encode())
    shown = response.json()
    assert (response.status_code, shown["session"], shown["session_id"]) == (200, {"title": "ä", "turns": 3}, "s1")
    assert ada.get(build_url("sessions/s1")).json() == shown
    assert ada.get(build_url("sessions")).json() == {"results": [shown], "next": None}
    assert ada.get(build_url("sessions/s2")).status_code == 404


# --- retention ----------------------------------------------------------------------------------------------------


def test_writing_starts_no_sandbox_and_renews_nothing(ada: ApiClient, lease, fill) -> None:
    fill()
    now = ada.get(f"leases/{lease['id']}").json()
    assert (now["expires_at"], now["last_activity"]) == (lease["expires_at"], lease["last_activity"])
    assert not Sandbox.objects.exists()


@pytest.mark.parametrize("end", ["released", "ttl"])
def test_stores_of_an_ended_lease_are_read_only(ada: ApiClient, build_url, lease, fill, end: str) -> None:
    fill()
    before = [ada.get(build_url(path)).json() for path in LISTS]
    assert [len(page["results"]) for page in before] == [1, 1, 1, 1]
    if end == "released":
        ada.post(build_url("release"))
    else:
        expire_lease(lease["id"])
    for method, path, body in WRITES:
        problem = assert_refused(ada, method, build_url(path), body, 410)
        assert (problem["code"], problem["end_reason"]) == ("lease_ended", end)
    assert [ada.get(build_url(path)).json() for path in LISTS] == before
    assert b"".join(ada.get(build_url("artifacts/a")).streaming_content) == b"x"


def test_stores_are_retained_after_the_end(ada: ApiClient, build_url, lease, acquire_body, fill) -> None:
    def prune(ended_ago: timedelta) -> dict[str, int]:
        Lease.objects.filter(pk=UUID(lease["id"])).update(ended_at=moment - ended_ago)
        pruned = sweeps.prune_stores(now=moment)
        assert not pruned.failures
        return pruned.counts

    fill()
    other = ada.post("leases", acquire_body(environment_id="game-2")).json()["id"]
    ada.post(f"leases/{other}/chat", MESSAGE)
    ada.post(build_url("release"))
    moment = timezone.now()
    prune(configured.KEEP_STATE - timedelta(minutes=1))
    assert len(ada.get(build_url("chat")).json()["results"]) == 1
    counts = prune(configured.KEEP_STATE + timedelta(minutes=1))
    assert counts["stored entries removed"] >= 5
    assert counts["bytes with them"] > 100
    assert [ada.get(build_url(path)).json()["results"] for path in LISTS] == [[]] * 4
    assert not any(UUID(lease["id"]).hex in key for key in storage.get_store().list(f"stores/{ADA}/"))
    assert len(ada.get(f"leases/{other}/chat").json()["results"]) == 1
    assert sweeps.prune_stores(now=moment).counts.get("stored entries removed", 0) == 0


def test_an_elapsed_lease_keeps_its_stores_until_a_sweep_ends_it(ada: ApiClient, build_url, fill) -> None:
    fill()
    Lease.objects.update(expires_at=F("expires_at") - timedelta(days=30), leased_at=F("leased_at") - timedelta(days=30))
    sweeps.prune_stores(now=timezone.now())
    assert len(ada.get(build_url("chat")).json()["results"]) == 1


# --- store failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["standard", "journaled"])
def test_a_failing_store_is_unavailable(ada: ApiClient, build_url, memory_store, mode: str, settings, caplog) -> None:
    settings.STORAGE_MODE = mode
    for call in ("get", "set", "page", "upload", "download"):
        memory_store.fail(call, StoreError("memory", call, "disk /dev/sdz is gone", key="secret"))
    for method, path, body in WRITES + READS:
        caplog.clear()
        response = ada(method, build_url(path), body)
        assert (response.status_code, response.json()["code"], response["Retry-After"]) == (503, "store_unavailable", "5")
        assert "sdz" not in response.content.decode()
        assert "disk /dev/sdz is gone" in caplog.text


def test_a_failed_append_frees_its_idempotency_key(ada: ApiClient, build_url, memory_store: MemoryStore) -> None:
    with memory_store.fail("set", StoreError("memory", "set", "away")):
        assert ada.post(build_url("chat"), MESSAGE, idempotency_key="k1").status_code == 503
    assert ada.post(build_url("chat"), MESSAGE, idempotency_key="k1").status_code == 201
    assert len(ada.get(build_url("chat")).json()["results"]) == 1
