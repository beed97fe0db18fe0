"""API clients with one key each. Every response is checked against the OpenAPI document."""

import json
import math
import re
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from django.core.signals import request_finished
from django.db import close_old_connections, connection
from django.db.models import F
from django.test import Client
from django.utils import timezone
from django_q.models import OrmQ

from leases import api_keys
from leases.api.base import views
from leases.models import (
    Agent,
    AgentKey,
    AgentRun,
    CatalogAgent,
    CodingTask,
    EnvironmentType,
    IdempotentRequest,
    KeyScope,
    Lease,
    LeaseEvent,
    QueuedRun,
    Shell,
    Turn,
)
from sandboxes.models import MintedToken, Pool, Process, Run, Sandbox, Snapshot, Transition
from tests.support.billing import ADA, BOB

OPENAPI = Path(__file__).resolve().parents[2] / "controlplane" / "openapi.yaml"

PATH_PARAMETERS = {
    "id": "{id}", "path": "a", "name": "a", "event_id": "x", "session_id": "s", "environment_id": "game-1",
    "run_id": str(uuid.UUID(int=1)), "process_id": str(uuid.UUID(int=1)), "did": ADA, "account": "house", "month": "2026-10",
    "catalog_id": "sandbox:none", "agent_did": ADA, "provider": "memory",
    "budget_id": "1",
}  # fmt: skip
ANY_BODY = {
    "argv": ["true"], "turn_number": 1, "state": {}, "snapshot_id": str(uuid.UUID(int=1)), "environment_id": "fork-1",
    "role": "user", "content": "x", "action": "x", "type": "turn", "aud": "did:web:example.com", "lxm": "com.example.method",
    "did": "did:plc:new", "phase": "combat", "condition": "x", "ids": [str(uuid.UUID(int=1))], "name": "n",
    "signal": "TERM", "offset": 0, "prompt": "x", "repository": "none", "title": "x",
    "port": 8080, "path": "a", "target": "b", "method": "GET", "pattern": "x",
    "reason": "not needed", "agents": [ADA], "model": "m", "prices": {"input": "1"}, "valid_from": "2026-11-01T00:00:00Z",
    "source": "price page", "scope": "all", "unit": "usd", "amount": "1", "period": "day",
}  # fmt: skip
ALL_MODELS = (
    Agent, AgentKey, AgentRun, CatalogAgent, CodingTask, EnvironmentType, IdempotentRequest, Lease, LeaseEvent, MintedToken,
    OrmQ, Pool, Process, QueuedRun, Run, Sandbox, Shell, Snapshot, Transition, Turn,
)  # fmt: skip


@cache
def load_openapi() -> dict[str, Any]:
    return parse_yaml(OPENAPI.read_text())


def parse_yaml(text: str | bytes) -> dict[str, Any]:
    """Parse with libyaml, which takes a tenth of the time of the parser in Python."""
    document: dict[str, Any] = yaml.load(text, Loader=yaml.CSafeLoader)
    return document


def list_operations(prefix: str = "", *, status: int = 401, media_type: str = "") -> list[tuple[str, str]]:
    """Return method and path of each operation that documents this status and needs a key, and takes bodies of the media type.

    Only the lease id is left to be filled in. Every operation documents 401."""
    return [
        (method.upper(), path.removeprefix("/api/v1/").format(**PATH_PARAMETERS))
        for path, methods in load_openapi()["paths"].items()
        for method, operation in methods.items()
        if path.startswith(f"/api/v1/{prefix}") and str(status) in operation["responses"]
        if operation["security"] == [{"key": []}]
        if not media_type or media_type in operation.get("requestBody", {}).get("content", {})
    ]


@cache
def list_path_patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns of all paths in the order in which they match: concrete ones first, longer before shorter."""
    paths = sorted(load_openapi()["paths"], key=lambda path: (path.count("{"), -len(path)))
    return [(re.compile(re.sub(r"\{\w+\}", "[^/]+", path.replace("{path}", ".*"))), path) for path in paths]


def check_response(method: str, url: str, response: Any) -> None:
    """Assert that a response is documented for its operation and matches its schema."""
    path = url.partition("?")[0]
    template = next((template for pattern, template in list_path_patterns() if pattern.fullmatch(path)), None)
    operation = load_openapi()["paths"].get(template, {}).get(method.lower())
    if operation is None:
        assert response.status_code in (404, 405)
        return
    documented = operation["responses"].get(str(response.status_code))
    assert documented, f"{response.status_code} is not documented for {method} {template}: {response.content[:300]!r}"
    content = documented.get("content")
    if not content:
        assert response.content == b""
        return
    (media_type, body), *_ = content.items()
    assert media_type in (response.headers["Content-Type"], "*/*")
    if media_type.endswith("json"):
        payload = response.json()
        schema = {**body["schema"], "components": load_openapi()["components"]}
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(payload)
        name = body["schema"]["$ref"].rpartition("/")[2]
        assert payload.keys() <= load_openapi()["components"]["schemas"][name]["properties"].keys()


def select_fields(method: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that an operation documents; all if it accepts any. `path` is relative to /api/v1/."""
    template = next(template for pattern, template in list_path_patterns() if pattern.fullmatch(f"/api/v1/{path}"))
    operation = load_openapi()["paths"][template].get(method.lower(), {})
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    component = load_openapi()["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], {})
    if schema and component.get("additionalProperties") is not False:
        return fields
    return {name: value for name, value in fields.items() if name in component.get("properties", {})}


class ApiClient:
    """HTTP client that sends one API key."""

    def __init__(self, key: str = "") -> None:
        self.key = key
        self.client = Client(raise_request_exception=False)

    def __call__(self, method: str, path: str, body: Any = None, /, **headers: str) -> Any:
        """Send a request. Headers are keywords: idempotency_key="k1". A body that is not bytes is sent as JSON."""
        request_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        request_headers = ({"Authorization": f"Bearer {self.key}"} if self.key else {}) | request_headers
        content_type = request_headers.pop("content-type", "application/json")
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        url = path if path.startswith("/") else f"/api/v1/{path}"
        response = self.client.generic(method, url, data, content_type=content_type, headers=request_headers)
        check_response(method, url, response)
        return response

    def get(self, path: str, **headers: str) -> Any:
        return self("GET", path, **headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Any:
        return self("POST", path, body, **headers)

    def put(self, path: str, body: bytes, **headers: str) -> Any:
        return self("PUT", path, body, **headers)

    def delete(self, path: str, **headers: str) -> Any:
        return self("DELETE", path, **headers)


def close_response(response: Any) -> None:
    """Close a response before its end, and keep the connection of this test to the database."""
    request_finished.disconnect(close_old_connections)
    response.close()
    request_finished.connect(close_old_connections)


@pytest.fixture(autouse=True)
def short_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep requests from checking their key twice, as those of more than a second do: a slow machine changes no result."""
    monkeypatch.setattr(views, "RECHECK_SECONDS", math.inf)


@pytest.fixture
def issue(db: None) -> Callable[..., ApiClient]:
    def make(*dids: str, **fields: Any) -> ApiClient:
        return ApiClient(api_keys.issue_key(dids, now=timezone.now(), **fields)[1])

    return make


@pytest.fixture
def ada(issue: Callable[..., ApiClient]) -> ApiClient:
    return issue(ADA)


@pytest.fixture
def bob(issue: Callable[..., ApiClient]) -> ApiClient:
    return issue(BOB)


@pytest.fixture
def operator(issue: Callable[..., ApiClient]) -> ApiClient:
    return issue(operator=True)


@pytest.fixture
def builder(issue: Callable[..., ApiClient]) -> ApiClient:
    """Operator's key with every scope."""
    return issue(operator=True, scopes=[KeyScope.LEASES, KeyScope.COSTS, KeyScope.TEMPLATES])


@pytest.fixture
def acquire_body(pool: Pool) -> Callable[..., dict[str, Any]]:
    """Factory of request bodies that acquire a lease in the test's pool."""

    def body(**fields: Any) -> dict[str, Any]:
        return {"agent_did": ADA, "environment_id": "game-1", "environment_type": "catan", "pool": pool.name} | fields

    return body


@pytest.fixture
def join_body(acquire_body: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Factory of request bodies that join an environment, which the path names."""
    return lambda **fields: select_fields("POST", "environments/e/join", acquire_body(**fields)) | fields


@pytest.fixture
def lease(ada: ApiClient, acquire_body: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Lease of Ada, as the API returns it."""
    granted: dict[str, Any] = ada.post("leases", acquire_body()).json()
    return granted


def expire_lease(pk: str) -> None:
    """Move all times of a lease back by a day, so that its ttl has elapsed and no sweep has run."""
    day = timedelta(days=1)
    Lease.objects.filter(pk=uuid.UUID(pk)).update(
        leased_at=F("leased_at") - day, last_activity_at=F("last_activity_at") - day, expires_at=F("expires_at") - day
    )


def read_rows() -> dict[str, Any]:
    """Row counts and state that a refused request must not change. One statement counts all tables."""
    leases = list(Lease.objects.values_list("pk", "status", "expires_at", "last_activity_at"))
    tables = [model._meta.db_table for model in ALL_MODELS]
    with connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(f"SELECT '{table}', COUNT(*) FROM {table}" for table in tables))
        return {"leases": leases, "tokens": list(AgentKey.objects.values_list("tokens"))} | dict(cursor.fetchall())


def assert_refused(
    api: ApiClient, method: str, path: str, body: Any, status: int, field: str | None = None, **headers: str
) -> dict[str, Any]:
    """Assert that the response is a problem document with this status and field or item, and that no row changed."""
    before = read_rows()
    response = api(method, path, body, **({"idempotency_key": "k1"} | headers))
    problem: dict[str, Any] = response.json()
    assert (response.status_code, problem["status"]) == (status, status), (method, path, body, problem)
    assert problem["detail"]
    assert problem["code"]
    assert problem["type"].startswith("urn:leasehold:problem:")
    if field is not None:
        assert f"{problem.get('field')}.".startswith(f"{field}."), (problem, body)
    assert read_rows() == before
    return problem
