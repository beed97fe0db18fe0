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
from leases.models import IdempotentRequest, Lease
from sandboxes import storage
from sandboxes.models import Sandbox
from sandboxes.storage.base import StoreError
from sandboxes.storage.memory import MemoryStore
from tests.api.conftest import ADA, ApiClient, expire_lease

pytestmark = pytest.mark.django_db

MESSAGE = {"role": "user", "content": "Good morning"}
ENTRY = {"action": "file.deleted", "path": "/workspace/x"}
WRITES: list[tuple[str, str, Any]] = [
    ("POST", "chat", MESSAGE),
    ("POST", "audit", ENTRY),
    ("PUT", "artifacts/a", b"x"),
    ("DELETE", "artifacts/a", None),
    ("PUT", "sessions/s", {}),
]
READS = ["chat", "audit", "artifacts", "sessions", "artifacts/a", "sessions/s"]


@pytest.fixture(params=["standard", "journaled"])
def mode(request: pytest.FixtureRequest, settings) -> str:
    settings.STORAGE_MODE = request.param
    return str(request.param)


@pytest.fixture
def memory_store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    store = MemoryStore()
    monkeypatch.setattr(storage, "get_store", lambda: store)
    return store


@pytest.fixture
def build_url(lease) -> Callable[[str], str]:
    return lambda path: f"leases/{lease['id']}/{path}"


def set_ended_at(pk: str, ago: timedelta) -> None:
    ended_at = timezone.now() - ago
    Lease.objects.filter(pk=UUID(pk)).update(ended_at=ended_at)


# --- chat and audit -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mode")
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


def test_content_may_be_null_but_not_missing(ada: ApiClient, build_url) -> None:
    assert ada.post(build_url("chat"), {"role": "assistant", "content": None, "tool_calls": []}).status_code == 201
    assert ada.post(build_url("chat"), {"role": "assistant"}).json()["field"] == "content"


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("order", ["newest", "oldest"])
@pytest.mark.parametrize("path", ["chat", "audit"])
def test_pages_of_events_follow_each_other(ada: ApiClient, build_url, path: str, order: str) -> None:
    for n in range(5):
        ada.post(build_url(path), MESSAGE | ENTRY | {"n": n})
    seen, following = [], build_url(f"{path}?limit=2&order={order}")
    while following:
        page = ada.get(following).json()
        assert 1 <= len(page["results"]) <= 2
        seen += [(event.get("message") or event["entry"])["n"] for event in page["results"]]
        following = page["next"]
    assert seen == ([4, 3, 2, 1, 0] if order == "newest" else [0, 1, 2, 3, 4])


@pytest.mark.usefixtures("mode")
def test_reading_continues_from_the_last_message_seen(ada: ApiClient, build_url) -> None:
    last = ada.post(build_url("chat"), MESSAGE).json()["id"]
    new = build_url(f"chat?order=oldest&cursor={last}")
    assert ada.get(new).json()["results"] == []
    following = ada.post(build_url("chat"), MESSAGE | {"content": "Is the server up?"}).json()
    assert ada.get(new).json()["results"] == [following]


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("path", ["chat", "audit"])
def test_an_idempotency_key_appends_once(ada: ApiClient, build_url, path: str) -> None:
    responses = [ada.post(build_url(path), MESSAGE | ENTRY, idempotency_key="k1") for _ in range(3)]
    assert [response.status_code for response in responses] == [201] * 3
    assert len({response.content for response in responses}) == 1
    assert len(ada.get(build_url(path)).json()["results"]) == 1
    ada.post(build_url(path), MESSAGE | ENTRY, idempotency_key="k2")
    assert len(ada.get(build_url(path)).json()["results"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("chat", {"content": "x"}, 400, "role"),
        ("chat", {"role": "", "content": "x"}, 400, "role"),
        ("chat", {"role": 5, "content": "x"}, 400, "role"),
        ("chat", {"role": "x" * 65, "content": "x"}, 400, "role"),
        ("chat", [], 400, ""),
        ("chat", b"{", 400, ""),
        ("chat", b'{"role": "user", "content": NaN}', 400, ""),
        ("chat", b'{"role": "user", "content": "\\ud800"}', 400, ""),
        ("chat", b'{"role": "user", "content": ' + b"[" * 200 + b"]" * 200 + b"}", 400, ""),
        ("chat", MESSAGE | {"x": "y" * (256 << 10)}, 413, ""),
        ("audit", {}, 400, "action"),
        ("audit", {"action": ["x"]}, 400, "action"),
        ("audit", {"action": "x" * 201}, 400, "action"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_invalid_events_are_rejected(ada: ApiClient, build_url, path: str, body: Any, status: int, field: str) -> None:
    response = ada.post(build_url(path), body, idempotency_key="k1")
    assert (response.status_code, response.json().get("field", "")) == (status, field)
    assert ada.get(build_url(path)).json()["results"] == []
    assert not IdempotentRequest.objects.filter(status_code__isnull=False, body__contains='"id": "0').exists()


def test_an_event_that_exceeds_the_limit_when_stored_is_refused(ada: ApiClient, build_url) -> None:
    floats = b",".join([b"1e22"] * 52_000)  # Python writes 1e+22
    response = ada.post(build_url("chat"), b'{"role": "user", "content": [' + floats + b"]}")
    assert (response.status_code, response.json()["code"]) == (400, "store_refused")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("order=up", "order"),
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=x", "limit"),
        ("cursor=x", "cursor"),
        ("cursor=%00", "cursor"),
        ("cursor=000000000000000001-000000000000000z-0000000001", "cursor"),
    ],
)
@pytest.mark.parametrize("path", ["chat", "audit"])
def test_invalid_event_page_parameters_are_rejected(ada: ApiClient, build_url, path: str, query: str, field: str) -> None:
    response = ada.get(build_url(f"{path}?{query}"))
    assert (response.status_code, response.json()["field"]) == (400, field)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("event_id", ["x", "%00", "..", "0" * 600, "000000000000000001-" + "0" * 16 + "-0000000001"])
@pytest.mark.parametrize("path", ["chat", "audit"])
def test_an_unknown_event_is_not_found(ada: ApiClient, build_url, path: str, event_id: str) -> None:
    assert ada.get(build_url(f"{path}/{event_id}")).status_code == 404


# --- artifacts ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mode")
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


@pytest.mark.usefixtures("mode")
def test_an_artifact_is_replaced_and_deleted(ada: ApiClient, build_url) -> None:
    assert ada.put(build_url("artifacts/a"), b"old", content_type="text/plain").status_code == 201
    assert ada.put(build_url("artifacts/a"), b"n", content_type="text/plain; charset=utf-8").status_code == 200
    found = ada.get(build_url("artifacts/a"))
    assert (b"".join(found.streaming_content), found["Content-Type"]) == (b"n", "text/plain; charset=utf-8")
    assert ada.delete(build_url("artifacts/a")).status_code == 204
    assert ada.delete(build_url("artifacts/a")).status_code == 404
    assert ada.get(build_url("artifacts/a")).status_code == 404
    assert ada.get(build_url("artifacts")).json()["results"] == []


def test_an_artifact_without_a_media_type_is_an_octet_stream(ada: ApiClient, build_url) -> None:
    assert ada.put(build_url("artifacts/a"), b"x", content_type="").json()["media_type"] == "application/octet-stream"


@pytest.mark.usefixtures("mode")
def test_artifacts_are_paged_by_name(ada: ApiClient, build_url) -> None:
    for name in "cab":
        ada.put(build_url(f"artifacts/{name}"), b"x")
    first = ada.get(build_url("artifacts?limit=2")).json()
    rest = ada.get(first["next"]).json()
    assert [[row["name"] for row in page["results"]] for page in (first, rest)] == [["a", "b"], ["c"]]
    assert rest["next"] is None


@pytest.mark.parametrize("name", [".hidden", "-", "a%20b", "%C3%A4", "a%00", "a%0A", "x" * 129, "%ED%A0%80"])
def test_invalid_names_are_rejected(ada: ApiClient, build_url, name: str) -> None:
    for method, path in [("PUT", "artifacts"), ("GET", "artifacts"), ("DELETE", "artifacts")]:
        response = ada(method, build_url(f"{path}/{name}"), b"")
        assert (response.status_code, response.json()["field"]) == (400, "name")
    for method in ("PUT", "GET"):
        response = ada(method, build_url(f"sessions/{name}"), b"{}")
        assert (response.status_code, response.json()["field"]) == (400, "session_id")
    for path in ("artifacts", "sessions"):
        assert ada.get(build_url(f"{path}?cursor={name}")).json()["field"] == "cursor"
        assert ada.get(build_url(path)).json()["results"] == []


@pytest.mark.parametrize("kind", ["text", "text/html, text/plain", "a/b" * 100, "text/plain;\tx=y"])
def test_invalid_media_types_are_rejected(ada: ApiClient, build_url, kind: str) -> None:
    response = ada.put(build_url("artifacts/a"), b"x", content_type=kind)
    assert (response.status_code, response.json()["field"]) == (400, "Content-Type")


def test_an_artifact_over_the_limit_is_rejected(ada: ApiClient, build_url) -> None:
    response = ada.put(build_url("artifacts/a"), b"x" * ((64 << 20) + 1))
    assert (response.status_code, response.json()["code"]) == (413, "too_large")
    assert ada.get(build_url("artifacts")).json()["results"] == []


# --- sessions -----------------------------------------------------------------------------------------------------


def test_a_session_is_the_document_stored_last(ada: ApiClient, build_url) -> None:
    ada.put(build_url("sessions/s1"), json.dumps({"title": "first"}).encode())
    response = ada.put(build_url("sessions/s1"), json.dumps({"title": "ä", "turns": 3}).encode())
    shown = response.json()
    assert (response.status_code, shown["session"], shown["session_id"]) == (200, {"title": "ä", "turns": 3}, "s1")
    assert ada.get(build_url("sessions/s1")).json() == shown
    assert ada.get(build_url("sessions")).json() == {"results": [shown], "next": None}
    assert ada.get(build_url("sessions/s2")).status_code == 404


@pytest.mark.parametrize(
    ("body", "status"), [(b"[]", 400), (b"{", 400), (b'{"x": "' + b"y" * (64 << 10) + b'"}', 413)], ids=["list", "no", "large"]
)
def test_invalid_sessions_are_rejected(ada: ApiClient, build_url, body: bytes, status: int) -> None:
    assert ada.put(build_url("sessions/s"), body).status_code == status
    assert ada.get(build_url("sessions/s")).status_code == 404


# --- access and retention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path", "body"), [*WRITES, *[("GET", path, None) for path in READS]])
def test_another_keys_lease_is_not_found(
    ada: ApiClient, bob: ApiClient, operator: ApiClient, build_url, method: str, path: str, body: Any
) -> None:
    ada.put(build_url("artifacts/a"), b"x")
    ada.put(build_url("sessions/s"), b"{}")
    assert bob(method, build_url(path), body).json()["detail"] == "There is no such lease."
    assert ApiClient()(method, build_url(path), body).status_code == 401
    assert operator(method, build_url(path), body).status_code < 300


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("end", ["released", "elapsed"])
def test_stores_of_an_ended_lease_are_read_only(ada: ApiClient, build_url, lease, end: str) -> None:
    for method, path, body in WRITES:
        if method != "DELETE":
            ada(method, build_url(path), body)
    before = [ada.get(build_url(path)).json() for path in ("chat", "audit", "artifacts", "sessions")]
    assert [len(page["results"]) for page in before] == [1, 1, 1, 1]
    if end == "released":
        ada.post(build_url("release"))
    else:
        expire_lease(lease["id"])
    for method, path, body in WRITES:
        response = ada(method, build_url(path), body)
        assert (response.status_code, response.json()["code"]) == (410, "lease_ended")
        assert response.json()["end_reason"] == ("released" if end == "released" else "ttl")
    assert [ada.get(build_url(path)).json() for path in ("chat", "audit", "artifacts", "sessions")] == before
    assert b"".join(ada.get(build_url("artifacts/a")).streaming_content) == b"x"


def test_the_next_lease_in_the_environment_starts_with_empty_stores(ada: ApiClient, build_url, acquire_body) -> None:
    ada.post(build_url("chat"), MESSAGE)
    ada.post(build_url("release"))
    new = ada.post("leases", acquire_body()).json()["id"]
    assert ada.get(f"leases/{new}/chat").json()["results"] == []
    assert len(ada.get(build_url("chat")).json()["results"]) == 1


@pytest.mark.usefixtures("mode")
def test_writing_starts_no_sandbox_and_renews_nothing(ada: ApiClient, build_url, lease) -> None:
    for method, path, body in WRITES:
        assert ada(method, build_url(path), body).status_code < 300
    now = ada.get(f"leases/{lease['id']}").json()
    assert (now["expires_at"], now["last_activity"]) == (lease["expires_at"], lease["last_activity"])
    assert not Sandbox.objects.exists()


@pytest.mark.usefixtures("mode")
def test_stores_are_retained_after_the_end(ada: ApiClient, build_url, lease, acquire_body, now) -> None:
    for method, path, body in WRITES:
        if method != "DELETE":
            ada(method, build_url(path), body)
    other = ada.post("leases", acquire_body(environment_id="game-2")).json()["id"]
    ada.post(f"leases/{other}/chat", MESSAGE)
    ada.post(build_url("release"))
    moment = timezone.now()
    set_ended_at(lease["id"], configured.KEEP_STATE - timedelta(minutes=1))
    sweeps.prune_stores(now=moment)
    assert len(ada.get(build_url("chat")).json()["results"]) == 1
    set_ended_at(lease["id"], configured.KEEP_STATE + timedelta(minutes=1))
    pruned = sweeps.prune_stores(now=moment)
    assert pruned.counts["stored entries removed"] >= 5
    assert pruned.counts["bytes with them"] > 100
    assert not pruned.failures
    assert [ada.get(build_url(path)).json()["results"] for path in ("chat", "audit", "artifacts", "sessions")] == [[]] * 4
    assert not any(UUID(lease["id"]).hex in key for key in storage.get_store().list(f"stores/{ADA}/"))
    assert len(ada.get(f"leases/{other}/chat").json()["results"]) == 1
    assert sweeps.prune_stores(now=moment).counts.get("stored entries removed", 0) == 0


def test_a_lease_due_for_pruning_keeps_its_stores_until_swept(ada: ApiClient, build_url, lease) -> None:
    ada.post(build_url("chat"), MESSAGE)
    Lease.objects.update(expires_at=F("expires_at") - timedelta(days=30), leased_at=F("leased_at") - timedelta(days=30))
    sweeps.prune_stores(now=timezone.now())
    assert len(ada.get(build_url("chat")).json()["results"]) == 1


# --- store failures -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize(("method", "path", "body"), [*WRITES, *[("GET", path, None) for path in READS]])
def test_a_failing_store_is_unavailable(
    ada: ApiClient, build_url, memory_store: MemoryStore, method: str, path: str, body: Any, caplog
) -> None:
    for call in ("get", "set", "page", "upload", "download"):
        memory_store.fail(call, StoreError("memory", call, "disk /dev/sdz is gone", key="secret"))
    response = ada(method, build_url(path), body)
    assert (response.status_code, response.json()["code"], response["Retry-After"]) == (503, "store_unavailable", "5")
    assert "sdz" not in response.content.decode()
    assert "disk /dev/sdz is gone" in caplog.text


@pytest.mark.usefixtures("mode")
def test_a_failed_append_frees_its_idempotency_key(ada: ApiClient, build_url, memory_store: MemoryStore) -> None:
    with memory_store.fail("set", StoreError("memory", "set", "away")):
        assert ada.post(build_url("chat"), MESSAGE, idempotency_key="k1").status_code == 503
    assert ada.post(build_url("chat"), MESSAGE, idempotency_key="k1").status_code == 201
    assert len(ada.get(build_url("chat")).json()["results"]) == 1
