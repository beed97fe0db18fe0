"""A lease that ends while a request body arrives is not written to."""

import io
import json
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from django.utils import timezone

from leases import leasing
from leases.models import Lease
from sandboxes.models import Run
from sandboxes.storage.memory import MemoryStore
from tests.api.conftest import ApiClient, check_response, expire_lease

pytestmark = pytest.mark.django_db
STREAMS = {"files/a": b"x", "archive": bytes(1024), "artifacts/a": b"x", "sessions/s": b"{}"}
DOCUMENTS: dict[str, bytes] = {
    "chat": b'{"role": "user", "content": "x"}', "audit": b'{"action": "x"}', "exec": b'{"argv": ["true"]}',
    "processes": b'{"argv": ["true"]}', "turns": b'{"turn_number": 1, "state": {}}', "renew": b"{}",
    "service-token": json.dumps({"aud": "did:web:example.com", "lxm": "com.example.method"}).encode(),
}  # fmt: skip


class InterruptedBody(io.BytesIO):
    """Request body during whose arrival something else happens."""

    def __init__(self, content: bytes, interruption: Callable[[], object]) -> None:
        super().__init__(content)
        self.interruption = interruption

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell() == 0:
            self.interruption()
        return super().read(size)


def send(api: ApiClient, lease: dict[str, Any], path: str, body: io.BytesIO) -> Any:
    method, url = "PUT" if path in STREAMS else "POST", f"/api/v1/leases/{lease['id']}/{path}"
    environ = {"wsgi.input": body, "CONTENT_LENGTH": str(len(body.getvalue())), "CONTENT_TYPE": "application/json"}
    headers = {"Authorization": f"Bearer {api.key}"}
    response = api.client.generic(method, url, b"", "application/json", headers=headers, **environ)
    check_response(method, url, response)
    return response


def assert_ended(response: Any, store: MemoryStore, reason: str) -> None:
    assert (response.status_code, response.json().get("end_reason")) == (410, reason)
    assert (Run.objects.count(), [*store.list("stores/")]) == (0, [])


@pytest.mark.parametrize("path", [*STREAMS, *DOCUMENTS])
def test_a_lease_that_ends_while_the_body_arrives_is_not_written_to(
    ada: ApiClient, lease, memory_store: MemoryStore, path: str
) -> None:
    def reach_ttl() -> None:
        Lease.objects.update(expires_at=timezone.now())

    response = send(ada, lease, path, InterruptedBody((STREAMS | DOCUMENTS)[path], reach_ttl))
    assert_ended(response, memory_store, "ttl")


@pytest.mark.parametrize("path", STREAMS)
def test_a_lease_that_is_released_while_the_body_arrives_is_not_written_to(
    ada: ApiClient, lease, memory_store: MemoryStore, path: str
) -> None:
    def release() -> None:
        leasing.release(UUID(lease["id"]), now=timezone.now())

    assert_ended(send(ada, lease, path, InterruptedBody(STREAMS[path], release)), memory_store, "released")


@pytest.mark.parametrize("path", STREAMS)
def test_no_body_is_read_for_a_lease_that_has_ended(ada: ApiClient, lease, memory_store: MemoryStore, path: str) -> None:
    expire_lease(lease["id"])
    body = io.BytesIO(STREAMS[path])
    assert_ended(send(ada, lease, path, body), memory_store, "ttl")
    assert body.tell() == 0


@pytest.mark.parametrize("path", ["exec", "processes", "renew"])
def test_a_lease_that_ends_while_the_idempotency_key_is_claimed_is_not_used(
    ada: ApiClient, lease, memory_store: MemoryStore, at_checkpoint: Callable[..., None], path: str
) -> None:
    at_checkpoint("key claimed", lambda: Lease.objects.update(expires_at=timezone.now()))
    response = ada.post(f"leases/{lease['id']}/{path}", json.loads(DOCUMENTS[path]), idempotency_key="k1")
    assert_ended(response, memory_store, "ttl")
