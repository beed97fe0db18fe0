"""Invalid input gets a 4xx that names the field, and changes nothing."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.test import RequestFactory
from django_q.models import OrmQ

from leases.api.base import parsers
from leases.errors import InvalidRequest, LengthRequired, RequestTooLarge
from leases.models import Agent, AgentKey, EnvironmentType, IdempotentRequest, Lease, LeaseEvent, Turn
from sandboxes.models import Pool, Run, Sandbox, Transition
from tests.api.conftest import ApiClient, check_response

pytestmark = pytest.mark.django_db
ALL_MODELS = (
    Agent, AgentKey, EnvironmentType, IdempotentRequest, Lease, LeaseEvent, OrmQ, Pool, Run, Sandbox, Transition, Turn,
)  # fmt: skip
TOO_DEEP = b'{"turn_number": 1, "state": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}"
SLIGHTLY_TOO_DEEP = b'{"turn_number": 1, "state": {"a": ' + b"[" * 200 + b"]" * 200 + b"}}"
Change = Callable[[], Any]


def read_rows() -> dict[str, Any]:
    """Row counts and state that a refused request must not change."""
    leases = list(Lease.objects.values_list("pk", "status", "expires_at", "last_activity_at"))
    return {"leases": leases, "tokens": list(AgentKey.objects.values_list("tokens"))} | {
        model.__name__: model._default_manager.count() for model in ALL_MODELS
    }


def assert_refused(
    api: ApiClient, method: str, path: str, body: Any, status: int, field: str | None = None, **headers: str
) -> None:
    before = read_rows()
    response = api(method, path, body, **({"idempotency_key": "k1"} | headers))
    problem = response.json()
    assert (response.status_code, problem["status"]) == (status, status), problem
    assert problem["detail"]
    assert problem["code"]
    assert problem["type"].startswith("urn:leasehold:problem:")
    if field is not None:
        assert (problem.get("field") or "").partition(".")[0] == field, problem
    assert read_rows() == before


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"environment_type": "chess"}, "environment_type"),
        ({"environment_type": "Ünfug"}, "environment_type"),
        ({"environment_type": None}, "environment_type"),
        ({"environment_type": ["rpg"]}, "environment_type"),
        ({"agent_did": ""}, "agent_did"),
        ({"agent_did": "ada"}, "agent_did"),
        ({"agent_did": "did:plc:a b"}, "agent_did"),
        ({"agent_did": " did:plc:ada"}, "agent_did"),
        ({"agent_did": "did:plc:ada\n"}, "agent_did"),
        ({"agent_did": "did:plc:🦊"}, "agent_did"),
        ({"agent_did": "did:plc:" + "a" * 10_000}, "agent_did"),
        ({"agent_did": "did:plc:a\0b"}, "agent_did"),
        ({"agent_did": 5}, "agent_did"),
        ({"environment_id": ""}, "environment_id"),
        ({"environment_id": "a/b"}, "environment_id"),
        ({"environment_id": "x" * 201}, "environment_id"),
        ({"environment_id": "a\0"}, "environment_id"),
        ({"environment_id": 7}, "environment_id"),
        ({"environment_id": True}, "environment_id"),
        ({"expiry_conditions": "game.finished"}, "expiry_conditions"),
        ({"expiry_conditions": {"a": 1}}, "expiry_conditions"),
        ({"expiry_conditions": [1]}, "expiry_conditions"),
        ({"expiry_conditions": [None]}, "expiry_conditions"),
        ({"expiry_conditions": ["a", "a"]}, "expiry_conditions"),
        ({"expiry_conditions": ["a b"]}, "expiry_conditions"),
        ({"expiry_conditions": ["a\0"]}, "expiry_conditions"),
        ({"expiry_conditions": [f"c{n}" for n in range(33)]}, "expiry_conditions"),
        *[
            ({name: value}, name)
            for name in ("ttl_seconds", "max_ttl_seconds")
            for value in (0, -1, "5 minutes", "300", 10**12, 10**400, True, 1.5, 1.0, [], {})
        ],
        ({"ttl_seconds": 600, "max_ttl_seconds": 60}, "ttl_seconds"),
        *[({"sleep_after": value}, "sleep_after") for value in (0, -1, "", "5 minutes", "5m ago", 10**12, True, 1.5, [])],
        ({"sleep_after": "99999999d"}, "sleep_after"),
        ({"pool": "no-such-pool"}, "pool"),
        ({"pool": "a\0"}, "pool"),
        ({"pool": 1}, "pool"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_acquiring(operator: ApiClient, acquire_body, fields: dict[str, Any], field: str) -> None:
    assert_refused(operator, "POST", "leases", acquire_body(**fields), 400, field)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'"did"', 400),
        (b"null", 400),
        (b'{"agent_did": NaN}', 400),
        (b'{"agent_did": 1e999}', 400),
        (b'{"agent_did": ' + b"1" * 5000 + b"}", 400),
        (b'{"agent_did": "\xff"}', 400),
        (b'{"agent_did": "did:plc:\\ud800"}', 400),
        (b'{"agent_did": "did:plc:\\u0000"}', 400),
        (b"\xef\xbb\xbf{}", 400),
        ('{"agent_did": "did:plc:a"}'.encode("utf-16"), 400),
        (b"[" * 30_000, 400),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, 400),
        (b"{" + b" " * (64 << 10) + b"}", 413),
    ],
    ids=lambda value: repr(value)[:40],
)
@pytest.mark.parametrize("path", ["leases", "environments/game-1/join", "environments/game-1/conditions", "agents"])
def test_bodies_that_are_no_json_object_are_rejected(operator: ApiClient, path: str, body: bytes, status: int) -> None:
    assert_refused(operator, "POST", path, body, status)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx", ""]
)
def test_other_content_types_are_rejected(operator: ApiClient, acquire_body, kind: str) -> None:
    assert_refused(operator, "POST", "leases", acquire_body(), 415, content_type=kind)


@pytest.mark.parametrize("value", [None, 5, "", "a b", "a\0", "x" * 65, ["agent.death"], "ü"])
def test_invalid_conditions_are_rejected(operator: ApiClient, value: Any) -> None:
    assert_refused(operator, "POST", "environments/game-1/conditions", {"condition": value}, 400, "condition")


@pytest.mark.parametrize("environment", ["a%20b", "%00", "x" * 201, "%F0%9F%A6%8A", "-a"])
@pytest.mark.parametrize("act", ["join", "conditions"])
def test_invalid_environment_ids_in_the_path_are_rejected(
    operator: ApiClient, acquire_body, environment: str, act: str
) -> None:
    assert_refused(operator, "POST", f"environments/{environment}/{act}", acquire_body(condition="x"), 400, "environment_id")


@pytest.mark.parametrize(
    ("payload", "status", "field"),
    [
        ({}, 400, "argv"),
        ({"argv": []}, 400, "argv"),
        ({"argv": [""]}, 400, "argv"),
        ({"argv": ["", "a"]}, 400, "argv"),
        ({"argv": "ls"}, 400, "argv"),
        ({"argv": ["ls", 1]}, 400, "argv"),
        ({"argv": ["ls", None]}, 400, "argv"),
        ({"argv": ["a\0b"]}, 400, "argv"),
        ({"argv": ["echo", "x" * (1 << 20)]}, 413, "argv"),
        ({"argv": ["echo", "ü" * (100 << 10)]}, 413, "argv"),
        ({"argv": ["echo"] + ["x"] * (100 << 10)}, 413, "argv"),
        ({"env": []}, 400, "env"),
        ({"env": "A=1"}, 400, "env"),
        ({"env": {"A": 1}}, 400, "env"),
        ({"env": {"A": "x\0"}}, 400, "env"),
        ({"env": {"": "x"}}, 400, "env"),
        ({"env": {"A=B": "x"}}, 400, "env"),
        ({"env": {"A\0": "x"}}, 400, "env"),
        ({"env": {"1A": "x"}}, 400, "env"),
        ({"env": {"Ü": "x"}}, 400, "env"),
        ({"env": {"LEASEHOLD_RUN": "x"}}, 400, "env"),
        ({"env": {"LLM_SOCKET": "/tmp/s"}}, 400, "env"),
        ({"env": {"A": "x" * (1 << 20)}}, 413, "env"),
        ({"cwd": "data"}, 400, "cwd"),
        ({"cwd": ""}, 400, "cwd"),
        ({"cwd": "/a\0"}, 400, "cwd"),
        ({"cwd": "/" + "a" * 5000}, 400, "cwd"),
        ({"cwd": 1}, 400, "cwd"),
        ({"stdin": 1}, 400, "stdin"),
        ({"stdin": None}, 400, "stdin"),
        *[({"timeout_seconds": value}, 400, "timeout_seconds") for value in (0, -1, 3601, 10**12, True, 1.5, "60", [])],
    ],
    ids=lambda value: repr(value)[:60],
)
def test_exec_rejects_invalid_fields(ada: ApiClient, lease, payload: dict[str, Any], status: int, field: str) -> None:
    payload = payload if field == "argv" else {"argv": ["true"]} | payload
    assert_refused(ada, "POST", f"leases/{lease['id']}/exec", payload, status, field)


def test_invalid_encodings_are_rejected(ada: ApiClient, lease) -> None:
    assert_refused(ada, "POST", f"leases/{lease['id']}/exec?encoding=latin-1", {"argv": ["true"]}, 400, "encoding")
    payload = {"argv": ["cat"], "stdin": "not base64!"}
    assert_refused(ada, "POST", f"leases/{lease['id']}/exec?encoding=base64", payload, 400, "stdin")


def test_lone_surrogates_are_rejected(ada: ApiClient, lease) -> None:
    for payload in (b'{"argv": ["\\ud800"]}', b'{"argv": ["true"], "stdin": "\\udfff"}', b'{"argv": ["a"], "\\ud800": 1}'):
        assert_refused(ada, "POST", f"leases/{lease['id']}/exec", payload, 400)
    assert ada.post(f"leases/{lease['id']}/exec", b'{"argv": ["echo", "\\ud83e\\udd8a"]}').json()["stdout"] == "🦊\n"


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"state": {}}, 400, "turn_number"),
        *[({"turn_number": n, "state": {}}, 400, "turn_number") for n in (-1, 2**62 + 1, 10**400, "1", 1.0, True, None, [])],
        ({"turn_number": 1}, 400, "state"),
        *[({"turn_number": 1, "state": state}, 400, "state") for state in (None, [], "x", 1, [{}])],
        ({"turn_number": 1, "state": {"board": "x" * (5 << 20)}}, 413, None),
        (b'{"turn_number": 1, "state": {"a": NaN}}', 400, None),
        (b'{"turn_number": 1, "state": {"a": 1e400}}', 400, None),
        (b'{"turn_number": 1, "state": {"a": "\\ud800"}}', 400, None),
        (TOO_DEEP, 400, None),
        (SLIGHTLY_TOO_DEEP, 400, None),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_turns_reject_invalid_fields(ada: ApiClient, lease, body: Any, status: int, field: str | None) -> None:
    assert_refused(ada, "POST", f"leases/{lease['id']}/turns", body, status, field)


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "%2fetc/passwd", "../x", "a/../../x", "%2e%2e/x", "a/./b", "a//b", "a/", ".", "%00", "a%00b",
     "a" * 256, "/".join(["a" * 200] * 21)],
    ids=lambda value: value[:20],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_invalid_file_paths_are_rejected(ada: ApiClient, lease, method: str, path: str) -> None:
    assert_refused(ada, method, f"leases/{lease['id']}/files/{path}", b"x", 400, "path")


def test_unknown_roots_and_files_over_the_limit_are_rejected(ada: ApiClient, lease, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(ada, "GET", f"leases/{lease['id']}/files/a?root=etc", None, 400, "root")
    monkeypatch.setattr("leases.api.files.MAX_FILE_BYTES", 1000)
    monkeypatch.setattr("leases.api.files.FileView.max_body_bytes", 1000)
    assert_refused(ada, "PUT", f"leases/{lease['id']}/files/a", b"x" * 1001, 413)
    ada.post(f"leases/{lease['id']}/exec", {"argv": ["sh", "-c", "head -c 2000 /dev/zero >a"]})
    assert ada.get(f"leases/{lease['id']}/files/a").status_code == 413


@pytest.mark.parametrize("pk", ["1", "x", "None", str(uuid.UUID(int=0)), "%00", "0" * 32])
@pytest.mark.parametrize(("method", "act"), [("GET", ""), ("POST", "/renew"), ("POST", "/exec"), ("GET", "/files/a")])
def test_unknown_leases_are_not_found(ada: ApiClient, lease, method: str, pk: str, act: str) -> None:
    assert_refused(ada, method, f"leases/{pk}{act}", {"argv": ["true"]}, 404)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("status=asleep", "status"),
        ("status=%00", "status"),
        ("agent_did=ada", "agent_did"),
        ("agent_did=did:plc:%00", "agent_did"),
        ("environment_id=%00", "environment_id"),
        *[(f"limit={n}", "limit") for n in ("0", "-1", "201", "x", "1.5", "9" * 50, "%C2%B2")],
        *[
            (f"cursor={c}", "cursor")
            for c in ("x", "%00", "é", "MjAyNg==", "MDAwMS0wMS0wMVQwMDowMCsyMzo1OSB4", "A" * 5000, "====")
        ],
    ],
)
def test_invalid_list_parameters_are_rejected(ada: ApiClient, query: str, field: str) -> None:
    assert_refused(ada, "GET", f"leases?{query}", None, 400, field)


def test_a_cursor_with_a_number_beyond_the_database_is_rejected(ada: ApiClient, lease) -> None:
    cursor = "MjAyNi0xMS0yMVQwMDowMDowMCswMDowMCA5OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk5OQ=="
    assert_refused(ada, "GET", f"leases/{lease['id']}/turns?cursor={cursor}", None, 400, "cursor")


@pytest.mark.parametrize("key", ["", "x" * 256, "a b", "ü", "\x7f"])
@pytest.mark.parametrize("act", ["renew", "release"])
def test_invalid_idempotency_keys_are_rejected(ada: ApiClient, lease, key: str, act: str) -> None:
    assert_refused(ada, "POST", f"leases/{lease['id']}/{act}", None, 400, "Idempotency-Key", idempotency_key=key)


@pytest.mark.parametrize(
    "payload", [{"did": "x"}, {"did": "did:plc:x", "name": "n" * 101}, {"name": "x"}, {"did": "did:plc:x", "name": "\0"}]
)
def test_invalid_agents_are_rejected(operator: ApiClient, payload: dict[str, Any]) -> None:
    assert_refused(operator, "POST", "agents", payload, 400)


# --- request bodies at the WSGI boundary ----------------------------------------------------------------------------


class Stream:
    """Request body that counts the bytes read from it."""

    def __init__(self, content: bytes) -> None:
        self.remaining, self.bytes_read = content, 0

    def read(self, size: int = -1) -> bytes:
        chunk, self.remaining = self.remaining[:size], self.remaining[size:]
        self.bytes_read += len(chunk)
        return chunk


def build_request(stream: Stream, **environ: Any) -> Any:
    request = RequestFactory().generic("POST", "/", **environ)
    request.META.update({"wsgi.input": stream})
    request._stream.stream = stream  # the stream that Django reads
    return request


def test_a_body_announced_as_too_large_is_not_read() -> None:
    stream = Stream(b"x" * 100)
    with pytest.raises(RequestTooLarge):
        parsers.read_body(build_request(stream, CONTENT_LENGTH="101"), 100)
    assert stream.bytes_read == 0


def test_a_chunked_body_is_read_no_further_than_its_limit() -> None:
    chunked = {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
    assert parsers.read_body(build_request(Stream(b"x" * 100), **chunked), 100) == b"x" * 100
    stream = Stream(b"x" * (1 << 20))
    with pytest.raises(RequestTooLarge):
        parsers.read_body(build_request(stream, **chunked), 100)
    assert stream.bytes_read <= parsers.CHUNK_BYTES


def test_a_chunked_body_is_refused_if_the_server_does_not_mark_its_end() -> None:
    with pytest.raises(LengthRequired):
        parsers.read_body(build_request(Stream(b"x"), HTTP_TRANSFER_ENCODING="chunked"), 100)


@pytest.mark.parametrize("length", ["5", "-1", "x", "²", "1e3"])
def test_a_body_that_is_not_as_long_as_announced_is_refused(length: str) -> None:
    request = RequestFactory().generic("POST", "/", b"four")
    request.META["CONTENT_LENGTH"] = length
    with pytest.raises(InvalidRequest):
        parsers.read_body(request, 100)


def test_a_large_file_is_refused_before_it_is_read(ada: ApiClient, lease) -> None:
    before, url = read_rows(), f"/api/v1/leases/{lease['id']}/files/a"
    environ = {"CONTENT_LENGTH": str((64 << 20) + 1), "HTTP_AUTHORIZATION": f"Bearer {ada.key}"}
    response = ada.client.generic("PUT", url, b"", **environ)
    check_response("PUT", url, response)
    assert (response.status_code, read_rows()) == (413, before)
