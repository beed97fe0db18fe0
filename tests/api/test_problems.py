"""Every error under /api/ is a problem document, without HTML, stack traces and secrets."""

import itertools
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
from django.db import OperationalError
from django.test import Client
from requests.exceptions import ConnectionError, ReadTimeout

from leases import leasing, renewal
from leases.errors import InvalidRequest
from leases.models import DID_DESCRIPTION, Lease, LeaseEvent
from sandboxes.agent.client import AgentConnection, NotConnected
from sandboxes.agent.protocol import ProtocolError
from sandboxes.agent.runs import OutcomeUnknown as AgentOutcomeUnknown
from sandboxes.errors import ProviderCallFailed
from sandboxes.failures import find_cause
from sandboxes.models import Host, Run, Sandbox, Transition
from sandboxes.providers.agent.processes import AgentProcessesProvider
from sandboxes.providers.docker import engine
from sandboxes.providers.errors import FailureCause, Missing, OutOfSpace, ProviderError, Rejected, Stopped, Unavailable
from sandboxes.providers.memory import MemoryProvider
from sandboxes.providers.remote.errors import raise_for_answer
from sandboxes.providers.runloop.errors import ERRORS
from sandboxes.redaction.texts import OPENING
from sandboxes.storage.base import StoreError
from sandboxes.stores import lease_stores
from tests.api.conftest import ApiClient

pytestmark = pytest.mark.django_db


@pytest.fixture(params=[True, False], ids=["debug", "no debug"])
def debug(request, settings) -> None:
    settings.DEBUG = request.param


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/", 404), ("GET", "/api/v2/leases", 404), ("GET", "/api/v1/leases/", 404), ("POST", "/api/v1/nope", 404),
        ("DELETE", "/api/v1/leases", 405), ("PATCH", "/api/v1/leases", 405), ("OPTIONS", "/api/v1/leases", 405),
        ("TRACE", "/api/v1/leases", 405), ("PUT", "/api/v1/environments/e/join", 405), ("POST", "/api/schema", 405),
    ],
)  # fmt: skip
def test_unknown_urls_and_methods_are_problem_documents(ada: ApiClient, method: str, path: str, status: int) -> None:
    response = ada(method, path)
    problem = response.json()
    assert (response.status_code, response["Content-Type"]) == (status, "application/problem+json")
    assert (problem["status"], problem["type"]) == (status, f"urn:leasehold:problem:{problem['code']}")
    assert (problem["operation"], problem["provider"], problem["cause"]) == (method, None, None)
    assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "testserver.evil.example", "a b", "testserver@evil.example"]
)
def test_unknown_host_is_refused_before_the_request_has_an_effect(
    ada: ApiClient, lease: dict[str, Any], acquire_body: Callable[..., dict[str, Any]], host: str
) -> None:
    requests = [
        ("POST", f"leases/{lease['id']}/file-urls", {"path": "/workspace/a", "method": "PUT"}), ("GET", "leases?limit=1", None),
        ("POST", "leases", acquire_body(environment_id="another")),
    ]  # fmt: skip
    for method, path, body in requests:
        response = ada(method, path, body, host=host)
        assert (response.status_code, response.json()["field"], response["Content-Type"]) == (
            400, "Host", "application/problem+json",
        )  # fmt: skip
    assert Client().get("/livez", headers={"Host": host}).status_code == 200
    assert Lease.objects.count() == 1


@pytest.mark.usefixtures("debug")
def test_an_unexpected_exception_shows_no_details(
    ada: ApiClient, acquire_body, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    def bug(*args: object, **options: object) -> None:
        raise RuntimeError("the secret ingredient")

    monkeypatch.setattr(leasing, "acquire", bug)
    response = ada.post("leases", acquire_body())
    assert (response.status_code, response.json()["code"]) == (500, "internal")
    assert "ingredient" not in response.content.decode()
    assert "Traceback" not in response.content.decode()
    assert "the secret ingredient" in caplog.text


def test_low_disk_is_disk_full_without_a_path(ada: ApiClient, lease, settings) -> None:
    settings.MIN_FREE_DISK = 1 << 60
    for response in (ada.post(f"leases/{lease['id']}/exec", {"argv": ["true"]}), ada.get(f"leases/{lease['id']}/archive")):
        problem = response.json()
        assert (response.status_code, problem["code"], response["Retry-After"]) == (503, "disk_full", "60")
        assert "MiB are free" in problem["detail"] and str(settings.STATE_DIR) not in problem["detail"]


def test_a_missing_image_is_not_retryable_and_a_full_disk_names_no_directory(ada: ApiClient, lease, memory, settings) -> None:
    memory.missing_images = {settings.SANDBOX_IMAGE}
    response = ada.post(f"leases/{lease['id']}/exec", {"argv": ["true"]})
    problem = response.json()
    assert (response.status_code, problem["code"], problem["cause"]) == (503, "image_missing", "image_unusable")
    assert problem["retryable"] is False and "Retry-After" not in response
    memory.missing_images = set()
    with memory.fail("create", OutOfSpace("mkdir /var/lib/docker/overlay2/0f1e-init: no space left on device")):
        started = ada.post(f"leases/{lease['id']}/exec", {"argv": ["true"]})
    assert ada.post(f"leases/{lease['id']}/exec", {"argv": ["true"]}).status_code == 200
    with memory.fail("write_file", OutOfSpace("[Errno 28] No space left on device: '/srv/leasehold/x'")):
        written = ada.put(f"leases/{lease['id']}/files/f", b"x")
    for each in (started, written):
        problem = each.json()
        assert (each.status_code, problem["code"], problem["cause"]) == (503, "disk_full", "disk_full")
        assert (problem["retryable"], each["Retry-After"]) == (True, "60")
        assert "/var" not in problem["detail"] and "/srv" not in problem["detail"]


def test_a_database_that_does_not_answer_is_unavailable(ada: ApiClient, lease, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*args: object, **options: object) -> None:
        raise OperationalError("database is locked")

    monkeypatch.setattr(renewal, "renew_with_key", locked)
    response = ada.post(f"leases/{lease['id']}/renew")
    assert (response.status_code, response.json()["code"]) == (503, "unavailable")
    assert (response.json()["operation"], response.json()["cause"]) == ("leases_renew", "database_unavailable")
    assert response["Retry-After"] == "5"
    assert "locked" not in response.content.decode()


@pytest.mark.parametrize(
    ("method", "error", "code", "cause"),
    [
        ("create", Unavailable("no engine", cause=FailureCause.ENGINE_UNREACHABLE), "sandbox_not_ready", "engine_unreachable"),
        ("create", Unavailable("slow"), "sandbox_not_ready", "provider_unavailable"),
        ("exec", Unavailable("slow", cause=FailureCause.TIMEOUT), "provider_unavailable", "timeout"),
        ("exec", Stopped("stopped while the command ran"), "provider_unavailable", "sandbox_not_running"),
        ("exec", Rejected("no such directory"), "provider_rejected", None),
        ("exec", Missing("gone"), "lease_ended", "sandbox_missing"),
    ],
)
def test_failure_of_a_provider_names_operation_provider_and_cause(
    ada: ApiClient, lease, memory: MemoryProvider, method: str, error: Exception, code: str, cause: str | None
) -> None:
    memory.fail(method, error, times=1)
    problem = ada.post(f"leases/{lease['id']}/exec", {"argv": ["true"]}).json()
    assert (problem["code"], problem["operation"], problem["provider"]) == (code, "leases_exec", "memory")
    assert problem["cause"] == cause


KEY = "vendor-key-0123456789"
ANSWER = f"debug page of db-7.internal: {{'Authorization': 'Bearer {KEY}'}}"


def build_vendor_error(status: int) -> Exception:
    with pytest.raises(ProviderError) as raised:
        raise_for_answer(ERRORS, "box", status, json.dumps({"message": ANSWER}))
    return raised.value


def build_answer(status: int, message: str, **headers: str) -> Exception:
    with pytest.raises(ProviderError) as raised:
        raise_for_answer(ERRORS, "box", status, json.dumps({"message": message}), headers)
    return raised.value


@pytest.mark.parametrize(
    ("method", "error", "code", "retry_after"),
    [
        ("create", build_answer(403, "Total CPU limit exceeded. Maximum allowed: 10."), "capacity_exhausted", "10"),
        ("create", build_answer(400, "Total disk limit exceeded", **{"Retry-After": "90"}), "capacity_exhausted", "90"),
        ("create", build_answer(429, "sandbox quota exceeded"), "capacity_exhausted", "10"),
        ("create", build_answer(429, "rate limit exceeded", **{"Retry-After": "120"}), "sandbox_not_ready", "120"),
        ("exec", build_answer(429, "Too Many Requests", **{"Retry-After": "120"}), "provider_unavailable", "120"),
        ("exec", build_answer(429, "Too Many Requests"), "provider_unavailable", "5"),
        ("create", build_answer(401, "Unauthorized"), "sandbox_not_ready", None),
        ("exec", build_answer(403, "Forbidden resource"), "provider_unavailable", None),
    ],
)
def test_quota_rate_and_key_of_a_vendor_reach_the_caller_without_its_text(
    ada: ApiClient, lease, memory: MemoryProvider, method: str, error: Exception, code: str, retry_after: str | None
) -> None:
    memory.fail(method, error, times=1)
    response = ada.post(f"leases/{lease['id']}/exec", {"argv": ["true"]})
    problem = response.json()
    assert (response.status_code, problem["code"], response.get("Retry-After")) == (503, code, retry_after)
    assert problem["retryable"] is (retry_after is not None)
    assert not re.search("exceeded|Requests|Unauthorized|Forbidden", response.content.decode())


@pytest.mark.parametrize("method", ["create", "wait_ready", "exec", "start", "write_file"])
@pytest.mark.parametrize("status", [500, 429, 400, 404])
def test_an_agent_gets_nothing_of_a_vendors_answer_and_an_operator_gets_it_without_the_key(
    ada: ApiClient, lease, memory: MemoryProvider, settings, caplog: pytest.LogCaptureFixture, method: str, status: int
) -> None:
    settings.SECRETS = [KEY]
    path = f"leases/{lease['id']}"
    memory.fail(method, build_vendor_error(status), times=1)
    answers = [
        ada.put(f"{path}/files/b", b"x") if method == "write_file" else
        ada.post(f"{path}/processes", {"argv": ["true"]}) if method == "start" else
        ada.post(f"{path}/exec", {"argv": ["true"]}),
    ]  # fmt: skip
    assert answers[0].status_code >= 400
    answers += [ada.get(each) for each in (path, f"{path}/runs", f"{path}/processes", f"{path}/timeline")]
    for answer in answers:
        text = answer.content.decode()
        assert not any(word in text for word in (KEY, "debug page", "db-7.internal", "27ea", OPENING)), text
    kept = [caplog.text]
    for column in (
        (Sandbox.objects, "last_error"),
        (Run.objects, "note"),
        (Transition.objects, "reason"),
        (LeaseEvent.objects, "reason"),
    ):
        kept += column[0].values_list(column[1], flat=True)
    assert KEY not in " ".join(kept)
    assert "db-7.internal" in " ".join(kept) or method == "write_file"


def test_failure_of_a_store_is_the_cause(ada: ApiClient, lease, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise StoreError("s3", "get", "no response from /var/lib/secret")

    monkeypatch.setattr(lease_stores, "open_stores", fail)
    problem = ada.get(f"leases/{lease['id']}/artifacts").json()
    assert (problem["code"], problem["operation"], problem["provider"]) == ("store_unavailable", "leases_artifacts_list", None)
    assert (problem["cause"], "secret" in str(problem)) == (None, False)


def test_cause_of_a_lost_agent_is_found_behind_the_error_of_the_provider() -> None:
    def fail(*chain: Exception) -> Exception:
        for error, cause in itertools.pairwise(chain):
            error.__cause__ = cause
        return chain[0]

    assert find_cause(fail(ProviderCallFailed(), Unavailable("x"), NotConnected("y"))) == "agent_not_connected"
    assert find_cause(fail(Unavailable("x"), AgentOutcomeUnknown("y"), ProtocolError("z"))) == "agent_failed"
    assert find_cause(fail(Unavailable("x"), TimeoutError())) == "timeout"
    assert find_cause(fail(ProviderCallFailed(), Unavailable("x"))) == "provider_unavailable"
    assert find_cause(fail(InvalidRequest("field", "x"), ValueError("/etc/passwd"))) == ""


def test_agent_without_a_gateway_is_not_connected(tmp_path: Path) -> None:
    provider = create_autospec(AgentProcessesProvider)
    with pytest.raises(Unavailable) as raised, AgentProcessesProvider._translating_errors(provider, "ref"):
        AgentConnection(tmp_path / "agent.sock", "container", wait=0.0)
    assert find_cause(raised.value) == "agent_not_connected"


def test_lost_connection_to_the_engine_is_told_from_a_slow_engine() -> None:
    for failed, cause in (
        (ConnectionError("refused"), FailureCause.ENGINE_UNREACHABLE),
        (ReadTimeout("60 s"), FailureCause.TIMEOUT),
    ):
        with pytest.raises(Unavailable) as raised, engine.translate_errors():
            raise failed
        assert raised.value.cause == cause


def test_all_invalid_fields_are_named_and_described(ada: ApiClient, acquire_body) -> None:
    problem = ada.post("leases", acquire_body(ttl_seconds=0, environment_id="a b", expiry_conditions=["ok", "not ok"])).json()
    assert {row["field"] for row in problem["errors"]} == {"ttl_seconds", "environment_id", "expiry_conditions.1"}
    problem = ada.post("leases", acquire_body(agent_did="ada")).json()
    assert problem["detail"].endswith(f"Not {DID_DESCRIPTION}.")


def test_responses_have_security_headers_and_no_cookies(ada: ApiClient, lease) -> None:
    for response in (ada.get("leases"), ada.get("/api/v1/nope")):
        assert response["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert response["X-Content-Type-Options"] == "nosniff"
        assert not response.cookies


def test_no_log_line_holds_a_secret(ada: ApiClient, lease, caplog, capsys) -> None:
    caplog.set_level(logging.INFO, "django.db.backends")
    for name in ("", "django", "django.request"):
        caplog.set_level(logging.DEBUG, name)
    sent = {"argv": ["printenv", "TOKEN"], "env": {"TOKEN": "v-e-r-y"}, "stdin": "q-u-i-e-t"}
    url = f"leases/{lease['id']}/exec"
    assert ada.post(url, sent, idempotency_key="k1").json()["stdout"] == "v-e-r-y\n"
    ada.post(url, sent | {"cwd": "no"})
    ada.post(url, sent | {"timeout_seconds": 0, "env": {"LEASEHOLD_X": "v-e-r-y"}})
    ApiClient("lh_00000000_" + "s" * 43).get("leases")
    logged = caplog.text + "".join(capsys.readouterr())
    for secret in ("v-e-r-y", "q-u-i-e-t", ada.key, "s" * 43):
        assert secret not in logged
    assert "v-e-r-y" not in str(Run.objects.values("argv", "env_names", "note", "cwd"))


def test_a_sandbox_on_another_host_is_a_problem_that_names_the_host(ada: ApiClient, lease, memory) -> None:
    url = f"leases/{lease['id']}/exec"
    with memory.on_engine("engine-a"):
        assert ada.post(url, {"argv": ["true"]}).status_code == 200
    response = ada.post(url, {"argv": ["true"]})
    assert (response.status_code, response["Retry-After"]) == (503, "5")
    problem = response.json()
    assert (problem["code"], problem["host"]) == ("wrong_host", Host.objects.get(engine_id="engine-a").name)
    assert (problem["operation"], problem["provider"], problem["cause"]) == ("leases_exec", "memory", None)
    assert Run.objects.count() == 1
