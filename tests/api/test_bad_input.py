"""Invalid input gets a 4xx that names the field, and changes nothing."""

import gzip
import io
import uuid
from itertools import product
from typing import Any

import pytest
from django.test import RequestFactory

from leases.api import templates
from leases.api.base import parsers
from leases.errors import InvalidRequest, LengthRequired, RequestTooLarge
from tests.api.conftest import ANY_BODY, ApiClient, assert_refused, check_response, list_operations, read_rows, select_fields

pytestmark = pytest.mark.django_db
TOO_DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000
SLIGHTLY_TOO_DEEP = b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}"


MISSING = object()
SECONDS = [0, -1, "5 minutes", "300", 10**12, 10**400, True, 1.5, 1.0, [], {}]
COMMAND: dict[str, list[Any]] = {
    "argv": [MISSING, [], [""], ["", "a"], "ls", ["ls", 1], ["ls", None], ["a\0b"]],
    "env": [
        [], "A=1", {"A": 1}, {"A": "x\0"}, {"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"1A": "x"}, {"Ü": "x"},
        {"LEASEHOLD_RUN": "x"}, {"LLM_SOCKET": "/tmp/s"},
    ],
    "cwd": ["data", "", "/a\0", "/" + "a" * 5000, 1],
}  # fmt: skip
BAD_PATHS = [MISSING, None, 5, "", "/etc", "..", "a/../..", "a//b", "a/", ".", "a\0", "x" * 256]
BAD_FIELDS: dict[str, dict[str, list[Any]]] = {
    "leases/{id}/file-urls": {
        "root": ["etc"], "path": BAD_PATHS, "method": [MISSING, "DELETE", "get", None, 5],
        "max_bytes": [-1, (64 << 20) + 1, "5"],
        "expires_seconds": [0, -1, 86401, "60", 1.5, True],
    },
    "leases/{id}/mkdir": {"root": ["etc", None, 5, ""], "path": BAD_PATHS},
    "leases/{id}/move": {
        "root": ["etc", None], "target_root": ["data", "etc", 5], "path": BAD_PATHS, "target": BAD_PATHS,
        "overwrite": [1, None],
    },
    "leases": {
        "environment_type": ["chess", "Ünfug", None, ["rpg"]],
        "agent_did": [
            "", "ada", "did:plc:a b", " did:plc:ada", "did:plc:ada\n", "did:plc:🦊", "did:plc:" + "a" * 10_000, "did:plc:a\0b",
            5, None,
        ],
        "environment_id": ["", "a/b", "x" * 201, "a\0", 7, True],
        "expiry_conditions": [
            "game.finished", {"a": 1}, [1], [None], ["a", "a"], ["a b"], ["a\0"], [f"c{n}" for n in range(33)],
        ],
        "ttl_seconds": [*SECONDS, 24 * 3600 + 1],  # more than the maximum of the type
        "max_ttl_seconds": [*SECONDS, 24 * 3600 + 1],
        "auto_stop_seconds": [-1, 1.5, "60", True, 10**12], "auto_delete_seconds": [-1, "never", []],
        "sleep_after": [0, -1, "", "5 minutes", "5m ago", 10**12, True, 1.5, [], "99999999d"],
        "pool": ["no-such-pool", "a\0", 1],
    },
    "environments/game-2/join": {"environment_type": [MISSING, "chess"], "agent_did": [MISSING, "ada"]},
    "environments/game-1/conditions": {
        "condition": [MISSING, None, 5, "", "a b", "a\0", "x" * 65, ["agent.death"], "ü"], "agent_did": ["ada", 5, ["ada"]],
    },
    "environments": {
        "environment_id": [MISSING, "", "a/b", "x" * 201, "a\0", 7], "type": [MISSING, "chess", "Ünfug", None],
        "phase": ["x" * 65, "a\0", 5, None],
    },
    "agents": {"did": [MISSING, "x"], "name": ["n" * 101, "\0"]},
    "leases/{id}/shells": {
        "name": [MISSING, None, 5, "", "a b", "a/b", ".a", "x" * 101], "env": COMMAND["env"], "cwd": COMMAND["cwd"],
    },
    "leases/{id}/exec": COMMAND | {
        "shell": [5, "", "a b", "x" * 101], "stdin": [1, None],
        "timeout_seconds": [0, -1, 3601, 10**12, True, 1.5, "60", []],
    },
    "leases/{id}/agent-runs": {
        "prompt": [MISSING, None, 5, "", "x" * (1 << 20) + "x"], "cli": [None, "other", 5], "model": ["", "a b", 5],
        "permission_mode": ["none", None], "system_prompt": [5, "x" * 65537], "session_id": ["", "a/b", "../x", "x" * 129, 5],
        "resume": ["yes", 1, None], "allowed_tools": ["Bash", ["a,b"], [5], ["x"] * 65],
        "denied_commands": [["a)"], ["("], [""]], "max_turns": [0, -1, "5", 10_001], "max_cost_usd": ["-1", "x", [], "NaN"],
        "argv": [[], "true"], "env": COMMAND["env"],
        "cwd": COMMAND["cwd"], "shell": [5, "a b"], "timeout_seconds": [0, 43201, "60"],
    },
    "leases/{id}/processes": COMMAND | {
        "name": ["x" * 101], "wait_seconds": [0, 301], "wait_for": ["x" * 1001, ["x"]],
        "wait_for_port": [0, 65536, "80"], "restart": ["sometimes", None, True], "max_restarts": [0, 101, "5"],
        "restart_window_seconds": [9, 86401, "60"], "restart_after_wake": [1, None],
    },
    f"leases/{{id}}/processes/{uuid.UUID(int=1)}/wait": {
        "pattern": [MISSING, None, 5, "", "(", "[", "x{2,1}", "(?=a)", "\\1", "a\0b", "x" * 501, "(?:x{30}){30}", ["x"]],
        "start": [-1, "0", 10**18, True], "wait_seconds": [0, 301, "5"],
    },
    "runs": COMMAND | {
        "agent_did": [None, "ada"], "stdin": [5], "pool": ["no-such-pool"], "environment_type": ["chess"],
        "return_workspace": ["yes"], "workspace": [5, "?", "", "AAAA"], "limits": [5],
        "limits.timeout_seconds": [0, -1, "60", True, 1.5, 3601],
        "limits.memory_mib": [0, 15, -1, "64", True, 4097, 10**400],
    },
    "environments/game-1/events": {
        "type": [MISSING, None, 5, "move"], "agent_did": [MISSING, "ada", 5],
        "turn_number": [MISSING, -1, 2**62 + 1, "1", 1.0, True],
        "state": [MISSING, None, [], "x"],
    },
    "leases/{id}/turns": {
        "turn_number": [MISSING, -1, 2**62 + 1, 10**400, "1", 1.0, True, None, []], "state": [MISSING, None, [], "x", 1, [{}]],
    },
    "leases/{id}/terminals": {
        "argv": [None, [], [""], "sh"], "rows": [0, 1001, "24", 1.5, None], "columns": [0, 1001, True],
        "expires_seconds": [0, 86401, "1", None], "keep_awake": [1], "cwd": ["tmp"], "shell": ["a b"],
    },
    f"leases/{{id}}/terminals/{uuid.UUID(int=1)}/url": {"view_only": ["yes", None, 1], "expires_seconds": [0, 86401]},
    "leases/{id}/previews": {"port": [MISSING, 0, 65536, "80", None, 1.5], "expires_seconds": [0, 86401, True]},
    "leases/{id}/snapshots": {"name": [5, None, [], "x" * 101, "a\0b"]},
    "leases/{id}/restore": {"snapshot_id": [MISSING, 5, None, "", "x", [], {}, True, "0" * 31]},
    "leases/{id}/fork": {
        "snapshot_id": [5, "", "x", [], {}, True, "0" * 31], "environment_id": [MISSING, None, "a/b"], "agent_did": ["bob", 5],
        "environment_type": [[]], "ttl_seconds": [0], "max_ttl_seconds": ["1"], "sleep_after": ["soon"],
        "auto_stop_seconds": [-1], "auto_delete_seconds": ["0"],
    },
    "leases/{id}/chat": {"role": [MISSING, "", 5, "x" * 65], "content": [MISSING]},
    "leases/{id}/audit": {"action": [MISSING, ["x"], "x" * 201]},
    "leases/{id}/service-token": {
        "aud": [
            MISSING, None, "", 5, "relay.example", "did:web:", "did:web:x#", "did:web:x#a#b", "did:web:x y", "did:web:x\n",
            f"did:web:{'x' * 330}",
        ],
        "lxm": [
            MISSING, None, "", 5, "com.example", "com.example.foo.*", "com.example-.foo", "1.0.0.127.record", "a-0.b-1.c-3",
            "one.two.three\n", "com.atproto.feed.p@st", "com.example.fooBar.2", ".one.two.three", "one.two..three",
            f"com.{'o' * 64}.foo",
        ],
        "lifetime_seconds": [0, -1, 301, 1.5, "60", True],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", BAD_FIELDS)
def test_invalid_fields_are_named(operator: ApiClient, acquire_body, lease, path: str) -> None:
    url = path.format(**lease)
    known = select_fields("POST", url, ANY_BODY | acquire_body(environment_id="fork-1"))
    for field, value in [(field, value) for field, values in BAD_FIELDS[path].items() for value in values]:
        outer, _, inner = field.partition(".")
        body = known | {outer: {inner: value} if inner else value}
        assert_refused(operator, "POST", url, {k: v for k, v in body.items() if v is not MISSING}, 400, field)


BAD_EVENT_PAGES = {
    "order": ["up"], "limit": ["0", "201", "x"],
    "cursor": ["x", "%00", "000000000000000001-000000000000000z-0000000001"],
}  # fmt: skip
BAD_DIRECTORIES = {"root": ["etc", ""], "path": ["/etc", "..", "a/../..", "a//b", "a/", ".", "%00", "a%00", "x" * 256]}
BAD_COST_FILTERS = {
    "agent": ["", "%00", "a" * 256, "did:plc:a&agent=did:plc:b"], "account": ["", "a%00", "a" * 64],
    "environment": ["%00", "a" * 201], "provider": ["%00", "a" * 33, "a&provider=a"],
}  # fmt: skip
OUT_OF_RANGE_CURSOR = "MjAyNi0xMS0yMVQwMDowMDowMCswMDowMCA5OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk5OQ=="  # more than 64 bits
BAD_PARAMETERS: dict[str, dict[str, list[str]]] = {
    "leases?": {
        "status": ["asleep", "%00"], "agent_did": ["ada", "did:plc:%00"], "environment_id": ["%00"],
        "limit": ["0", "-1", "201", "x", "1.5", "9" * 50, "%C2%B2"],
        "cursor": ["x", "%00", "é", "MjAyNg==", "MDAwMS0wMS0wMVQwMDowMCsyMzo1OSB4", "A" * 5000, "===="],
    },
    "leases/{id}/turns?": {"cursor": [OUT_OF_RANGE_CURSOR]},
    "leases/{id}/chat?": BAD_EVENT_PAGES,
    "leases/{id}/audit?": BAD_EVENT_PAGES,
    "leases/{id}/files?": BAD_DIRECTORIES | {"deep": ["2", "yes"]},
    "leases/{id}/watch?path=&": {"root": ["etc", ""]},
    "leases/{id}/watch?": {"path": BAD_DIRECTORIES["path"]},
    "leases/{id}/archive?": BAD_DIRECTORIES | {"compression": ["", "zstd", "gzip%00"]},
    "leases/{id}/files/a?": {"root": ["etc"]},
    "pool?": {"agent_did": ["unknown"]},
    "costs?": BAD_COST_FILTERS | {
        "by": ["moon", "", "day&by=agent"], "since": ["x", "2026-02-30"], "until": ["%00", "2026-11-02&since=2026-11-02"],
        "lease": ["x"], "limit": ["0", "99999", "9" * 2000],
    },
    "estimate?": {"agents": ["", "0", "1e3", "9" * 5000, "1&agents=2"]},
    "estimate?agents=1&": {
        "hours_per_day": ["25", "NaN", "1e-9"], "days": ["0"], "instance": ["huge"], "cpu_utilisation": ["-1", "Infinity"],
        "provider": ["nowhere", "%00", "A B"], "suspended_hours_per_day": ["-1", "1"],
    },
    "estimate/comparison?agents=1&": {"providers": ["", "nowhere", "modal,,daytona", "A", "a," * 20 + "a", "%00"]},
    "forecast?": BAD_COST_FILTERS | {
        "last": ["0", "367", "-1", "", "1.5", "9" * 5000, "%00", "1&last=1"],
        "budget": [
            "0", "-1", "", "NaN", "-Infinity", "1e9", "1e-10", "1e999999999", "1e-999999999", "9" * 5000, "1%00", "1&budget=2",
        ],
    },
    "statements?": {"month": ["2026", "%00", "2026-00"], "limit": ["0", "1&limit=2"], "account": ["", "a&account=b"]},
}  # fmt: skip


@pytest.mark.parametrize("path", BAD_PARAMETERS)
def test_invalid_query_parameters_are_named(operator: ApiClient, lease, path: str) -> None:
    for name, value in [(name, value) for name, values in BAD_PARAMETERS[path].items() for value in values]:
        assert_refused(operator, "GET", f"{path.format(**lease)}{name}={value}", None, 400, name)


def test_repeated_query_parameters_are_named(operator: ApiClient, lease) -> None:
    for path in ("leases?status=active", "leases/{id}/runs?limit=1", "leases/{id}/files?root=data", "pool?agent_did=x"):
        name, _, value = path.partition("?")[2].partition("=")
        assert_refused(operator, "GET", f"{path.format(**lease)}&{name}={value}", None, 400, name)
    path = f"leases/{lease['id']}/exec?encoding=base64&encoding=utf-8"
    assert_refused(operator, "POST", path, {"argv": ["true"]}, 400, "encoding")


def test_unknown_query_parameters_of_billing_are_named(operator: ApiClient) -> None:
    for url in ("costs?", "estimate?agents=1&", "estimate/comparison?agents=1&", "forecast?", "statements?"):
        assert_refused(operator, "GET", f"{url}agnet=x", None, 400, "agnet")
        assert operator.get(f"{url}format=json").status_code == 200


def test_parameters_that_contradict_or_lack_each_other_are_named(operator: ApiClient, lease, acquire_body) -> None:
    body = acquire_body(environment_id="game-2", ttl_seconds=600, max_ttl_seconds=60)
    assert_refused(operator, "POST", "leases", body, 400, "ttl_seconds")
    assert_refused(operator, "GET", "estimate", None, 400, "agents")
    for query, field in (("root=etc", "root"), ("path=..", "path")):
        assert_refused(operator, "PUT", f"leases/{lease['id']}/archive?{query}", bytes(1024), 400, field)


# --- bodies -----------------------------------------------------------------------------------------------------------


def test_a_body_that_is_no_json_object_is_rejected(operator: ApiClient) -> None:
    for body in (
        b"", b"{", b"[]", b'"did"', b"null", b'{"agent_did": NaN}', b'{"agent_did": 1e999}',
        b'{"agent_did": ' + b"1" * 5000 + b"}", b'{"agent_did": "\xff"}', b'{"agent_did": "did:plc:\\ud800"}',
        b'{"agent_did": "did:plc:\\u0000"}', b"\xef\xbb\xbf{}", '{"agent_did": "did:plc:a"}'.encode("utf-16"), b"[" * 30_000,
        TOO_DEEP,
    ):  # fmt: skip
        assert_refused(operator, "POST", "leases", body, 400)


def test_every_json_operation_rejects_other_bodies_and_content_types(builder: ApiClient, lease) -> None:
    for method, url in [
        (method, path.format(**lease)) for method, path in list_operations(status=415, media_type="application/json")
    ]:
        for body in (b"{", b"[]"):
            assert_refused(builder, method, url, body, 400)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx", ""):
            assert_refused(builder, method, url, ANY_BODY, 415, content_type=kind)


OPEN_DOCUMENTS = ("chat", "audit", "sessions/s")  # further fields are stored


def test_unknown_and_repeated_fields_are_named(builder: ApiClient, lease, acquire_body) -> None:
    """Renew and exec included, which do not take the steps of other views."""
    for method, url in [
        (method, path.format(**lease)) for method, path in list_operations(status=415, media_type="application/json")
    ]:
        body = select_fields(method, url, ANY_BODY | acquire_body())
        if not url.endswith(OPEN_DOCUMENTS):
            problem = assert_refused(builder, method, url, {**body, "ttl": 1, "a.b": {}}, 400)
            assert [row["field"] for row in problem["errors"]] == ["a.b", "ttl"], url
        assert_refused(builder, method, url, b'{"ttl": 1, "ttl": 2}', 400, "ttl")


def test_unknown_and_repeated_inner_fields_are_named(operator: ApiClient, lease, acquire_body) -> None:
    run = select_fields("POST", "runs", ANY_BODY | acquire_body()) | {
        "stdinn": "",
        "limits": {"memory": 1, "timeout_seconds": 0},
    }
    problem = assert_refused(operator, "POST", "runs", run, 400)
    assert [row["field"] for row in problem["errors"]] == ["limits.timeout_seconds", "limits.memory", "stdinn"]
    turn = b'{"turn_number": 1, "state": {"hand": [{"card": 1, "card": 2}]}}'
    assert_refused(operator, "POST", f"leases/{lease['id']}/turns", turn, 400, "card")
    many = {f"field{number:05}": 1 for number in range(5000)}
    assert len(assert_refused(operator, "POST", f"leases/{lease['id']}/exec", many, 400)["errors"]) == 51  # 50, and argv


# --- fields of each endpoint ------------------------------------------------------------------------------------------


def test_invalid_environment_ids_in_the_path_are_rejected(operator: ApiClient, acquire_body) -> None:
    for environment, act in product(["a%20b", "%00", "x" * 201, "%F0%9F%A6%8A", "-a"], ["join", "conditions"]):
        path = f"environments/{environment}/{act}"
        body = select_fields("POST", path, ANY_BODY | acquire_body())
        assert_refused(operator, "POST", path, body, 400, "environment_id")


def test_large_fields_of_exec_are_rejected(ada: ApiClient, lease) -> None:
    for argv in (["echo", "x" * (1 << 20)], ["echo", "ü" * (100 << 10)], ["echo"] + ["x"] * (100 << 10)):
        assert_refused(ada, "POST", f"leases/{lease['id']}/exec", {"argv": argv}, 413, "argv")
    assert_refused(ada, "POST", f"leases/{lease['id']}/exec", {"argv": ["true"], "env": {"A": "x" * (1 << 20)}}, 413, "env")


def test_invalid_encodings_are_rejected(ada: ApiClient, lease) -> None:
    assert_refused(ada, "POST", f"leases/{lease['id']}/exec?encoding=latin-1", {"argv": ["true"]}, 400, "encoding")
    payload = {"argv": ["cat"], "stdin": "not base64!"}
    assert_refused(ada, "POST", f"leases/{lease['id']}/exec?encoding=base64", payload, 400, "stdin")


def test_lone_surrogates_are_rejected(ada: ApiClient, lease) -> None:
    for payload in (b'{"argv": ["\\ud800"]}', b'{"argv": ["true"], "stdin": "\\udfff"}', b'{"argv": ["a"], "\\ud800": 1}'):
        assert_refused(ada, "POST", f"leases/{lease['id']}/exec", payload, 400)
    assert ada.post(f"leases/{lease['id']}/exec", b'{"argv": ["echo", "\\ud83e\\udd8a"]}').json()["stdout"] == "🦊\n"


def test_states_that_are_no_json_or_too_deep_are_rejected(ada: ApiClient, lease) -> None:
    for state in (b'{"a": NaN}', b'{"a": 1e400}', b'{"a": "\\ud800"}', TOO_DEEP, SLIGHTLY_TOO_DEEP):
        assert_refused(ada, "POST", f"leases/{lease['id']}/turns", b'{"turn_number": 1, "state": ' + state + b"}", 400)


FILE_PATHS = [
    "", "/etc/passwd", "%2fetc/passwd", "../x", "a/../../x", "%2e%2e/x", "a/./b", "a//b", "a/", ".", "%00", "a%00b", "a" * 256,
    "/".join(["a" * 200] * 21),
]  # fmt: skip


def test_invalid_file_paths_are_rejected(ada: ApiClient, lease) -> None:
    for method, path in product(["GET", "PUT", "DELETE"], FILE_PATHS):
        assert_refused(ada, method, f"leases/{lease['id']}/files/{path}", b"x", 400, "path")


def test_unknown_leases_are_not_found(ada: ApiClient, lease) -> None:
    for pk in ("1", "x", "None", str(uuid.UUID(int=0)), "%00", "0" * 32):
        for method, act in (("GET", ""), ("POST", "/renew"), ("POST", "/exec"), ("GET", "/files/a")):
            assert_refused(ada, method, f"leases/{pk}{act}", {"argv": ["true"]}, 404)


def test_invalid_idempotency_keys_are_rejected(ada: ApiClient, lease) -> None:
    for key, act in product(["", "x" * 256, "a b", "ü", "\x7f"], ["renew", "release"]):
        assert_refused(ada, "POST", f"leases/{lease['id']}/{act}", None, 400, "Idempotency-Key", idempotency_key=key)


# --- request bodies at the WSGI boundary ----------------------------------------------------------------------------


MAX_BODY_BYTES = {
    "exec": 16 << 20, "exec/stream": 16 << 20, "turns": (1 << 20) + 1024, "processes": 1 << 20, "files/a": 64 << 20,
    "archive": 1 << 30, "chat": 256 << 10, "audit": 256 << 10, "artifacts/a": 64 << 20, "runs": 32 << 20,
    "agent-runs": 2 << 20, "terminals": 1 << 20, "environments/game-1/events": (1 << 20) + 1024,
    "agent-catalog/sandbox:none/runs": 2 << 20,
    f"processes/{uuid.UUID(int=1)}/stdin": 2 << 20, "templates": templates.MAX_BODY_BYTES,
}  # fmt: skip


def test_every_body_is_read_up_to_its_limit_only(builder: ApiClient, lease) -> None:
    """A body that no handler needs is read, too: otherwise the server would close the connection under the next request."""
    before, headers = read_rows(), {"Authorization": f"Bearer {builder.key}"}
    for method, path in [row for row in list_operations(status=413) if row[0] != "GET"]:
        limit, url = MAX_BODY_BYTES.get(path.removeprefix("leases/{id}/"), 64 << 10), f"/api/v1/{path.format(**lease)}"
        for announced, status, bytes_read in (
            (limit, 400, 100),
            (limit + 1, 413, 0),
        ):  # the body ends before its Content-Length
            environ = {"CONTENT_LENGTH": str(announced), "wsgi.input": (stream := io.BytesIO(b" " * 100))}
            response = builder.client.generic(method, url, b"", "application/json", headers=headers, **environ)
            check_response(method, url, response)
            assert (response.status_code, stream.tell(), read_rows()) == (status, bytes_read, before), (method, path)


def test_no_body_is_read_with_an_encoding_that_is_not_decoded(builder: ApiClient, lease) -> None:
    before, body = read_rows(), gzip.compress(b"{}")
    operations = [row for row in list_operations(status=413) if row[0] != "GET"]
    assert operations == [row for row in list_operations(status=415) if row[0] != "GET"]
    for method, path in operations:
        url, encoding = path.format(**lease), "br" if path.endswith("/archive") else "gzip"
        response = builder(method, url, body, content_encoding=encoding)
        assert (response.status_code, response.json()["field"], read_rows()) == (415, "Content-Encoding", before), (
            method,
            path,
        )
        assert "identity" in response["Accept-Encoding"]
    assert read_rows() == before


def build_request(stream: io.BytesIO, **environ: Any) -> Any:
    return RequestFactory().generic("POST", "/", **environ, **{"wsgi.input": stream})


def test_a_chunked_body_is_read_no_further_than_its_limit() -> None:
    chunked = {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
    assert parsers.read_body(build_request(io.BytesIO(b"x" * 100), **chunked), 100) == b"x" * 100
    stream = io.BytesIO(b"x" * (1 << 20))
    with pytest.raises(RequestTooLarge):
        parsers.read_body(build_request(stream, **chunked), 100)
    assert stream.tell() <= parsers.CHUNK_BYTES
    with pytest.raises(LengthRequired):  # the server does not mark the end of the body
        parsers.read_body(build_request(stream, HTTP_TRANSFER_ENCODING="chunked"), 100)


def test_a_body_that_is_not_as_long_as_announced_is_refused() -> None:
    for length in ("5", "-1", "x", "²", "1e3"):
        with pytest.raises(InvalidRequest):
            parsers.read_body(build_request(io.BytesIO(b"four"), CONTENT_LENGTH=length), 100)
