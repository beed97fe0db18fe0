"""Texts of services outside: no secret in messages and logs, quoted for operators, omitted for agents."""

import base64
import html
import json
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
import requests
import structlog
import urllib3
from daytona_api_client.exceptions import ApiException
from docker.errors import APIError, DockerException
from hypothesis import given
from hypothesis import strategies as st
from langsmith.sandbox import SandboxClientError
from modal import exception as modal_errors
from runloop_api_client import RunloopError

from controlplane import logs
from controlplane.env import ENV_VARIABLES
from leases.atproto import service as atproto
from leases.coding.forges.github import GitHubForge
from leases.coding.git import Git
from sandboxes import http_calls
from sandboxes.http_calls import HttpAnswer
from sandboxes.providers.cloudflare import provider as cloudflare
from sandboxes.providers.daytona import provider as daytona
from sandboxes.providers.docker import engine as docker
from sandboxes.providers.errors import ProviderError, Unavailable
from sandboxes.providers.kubernetes import api_client, endings
from sandboxes.providers.kubernetes import errors as kubernetes
from sandboxes.providers.langsmith import provider as langsmith
from sandboxes.providers.modal import provider as modal
from sandboxes.providers.remote.errors import raise_for_answer, raise_for_transport
from sandboxes.providers.runloop import errors as runloop
from sandboxes.redaction.texts import CLOSING, MAX_QUOTED_CHARS, OPENING, omit_answers, quote_answer, redact
from sandboxes.storage.base import StoreError
from tests.commands.manage import load_settings

KEY = "cf-secret/key+0123456789"
ANSWER = f"debug page: {{'Authorization': 'Bearer {KEY}'}}, host db-7.internal"


@pytest.fixture(autouse=True)
def configured(settings: Any) -> None:
    settings.SECRETS = ["another-secret-of-the-settings", KEY]


@pytest.mark.parametrize(
    "form",
    [
        KEY, quote(KEY, safe=""), html.escape(KEY), json.dumps(KEY), KEY.replace("/", "\\/"),
        base64.b64encode(KEY.encode()).decode(),
        base64.b64encode(f"x-access-token:{KEY}".encode()).decode(), base64.urlsafe_b64encode(f"user:{KEY}!".encode()).decode(),
        KEY.replace("/", "\\u002f").replace("+", "\\u002b").replace("-", "\\u002d"),
    ],
)  # fmt: skip
def test_a_configured_secret_is_removed_in_each_form_that_a_service_repeats_it_in(form: str) -> None:
    for text in (form, f"before {form} behind"):
        assert len(redact(text)) == len(text)
        shown = redact(text).replace("before ", "").replace(" behind", "")
        assert shown.count("*") >= len(KEY) and KEY[:9] not in shown, shown
    assert redact("nothing \ud800 to remove é") == "nothing \ud800 to remove é"


def test_a_secret_at_hand_is_removed_as_well() -> None:
    assert redact("token-of-this-repository", "token-of-this-repository") == "*" * 24


@given(st.integers(0, 2 * MAX_QUOTED_CHARS))
def test_a_secret_is_removed_before_the_text_is_cut_off(before: int) -> None:
    quoted = quote_answer("x" * before + KEY, KEY)
    assert not set("cfsetky") & set(quoted) and len(quoted) <= MAX_QUOTED_CHARS + 2


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (f"box: the vendor answered 500: {quote_answer('x')}", "box: the vendor answered 500"),
        (f"Not started: box: {quote_answer('a')} and {quote_answer('b')}. Try again.", "Not started: box and. Try again."),
        (f"box: {quote_answer('inner ' + quote_answer('x') + ' rest')}", "box"),
        (f"box: {quote_answer(f'{CLOSING} told to the agent {OPENING}')}", "box"),
        (f"box: {quote_answer('long text')}"[:9], "box"),
        (quote_answer("x"), ""), ("plain", "plain"), ("", ""),
    ],
)  # fmt: skip
def test_agents_get_a_message_without_quotations(message: str, shown: str) -> None:
    assert omit_answers(message) == shown


def build_api_error(status: int) -> APIError:
    response = requests.Response()
    response.status_code = status
    return APIError("x", response=response, explanation=ANSWER)


FAILURES: dict[str, tuple[Callable[[], AbstractContextManager[None]], Callable[[], Exception]]] = {
    "modal": (lambda: modal._translate_errors("box"), lambda: modal_errors.Error(ANSWER)),
    "modal, not found": (lambda: modal._translate_errors("box"), lambda: modal_errors.NotFoundError(ANSWER)),
    "modal, refused": (lambda: modal._translate_errors("box"), lambda: modal_errors.AuthError(ANSWER)),
    "modal, timeout": (lambda: modal._translate_errors("box"), lambda: modal_errors.TimeoutError(ANSWER)),
    "modal, connection": (lambda: modal._translate_errors("box"), lambda: OSError(ANSWER)),
    "langsmith": (lambda: langsmith._translate_errors("box"), lambda: SandboxClientError(ANSWER)),
    "langsmith, connection": (lambda: langsmith._translate_errors("box"), lambda: httpx2.ConnectError(ANSWER)),
    "runloop": (lambda: runloop.translate_errors("box"), lambda: RunloopError(ANSWER)),
    "daytona": (lambda: daytona._translate_errors("box"), lambda: ApiException(status=500, reason="x", body=ANSWER)),
    "daytona, connection": (lambda: daytona._translate_errors("box"), lambda: urllib3.exceptions.HTTPError(ANSWER)),
    "cloudflare, connection": (lambda: cloudflare._translate_errors("box"), lambda: requests.ConnectionError(ANSWER)),
    "docker": (docker.translate_errors, lambda: build_api_error(500)),
    "docker, conflict": (docker.translate_errors, lambda: build_api_error(409)),
    "docker, connection": (docker.translate_errors, lambda: DockerException(ANSWER)),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_vendors_text_is_redacted_for_operators_and_omitted_for_agents(name: str) -> None:
    translate, build = FAILURES[name]
    with pytest.raises(ProviderError) as raised, translate():
        raise build()
    check_texts(str(raised.value))


@pytest.mark.parametrize("body", [ANSWER, json.dumps({"message": ANSWER})], ids=["page", "document"])
@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 408, 409, 429, 500, 503])
def test_an_answer_of_any_status_is_redacted_for_operators_and_omitted_for_agents(status: int, body: str) -> None:
    with pytest.raises(ProviderError) as raised:
        raise_for_answer(daytona.ERRORS, "box", status, body)
    check_texts(str(raised.value))
    content = json.dumps({"kind": "Status", "message": ANSWER}).encode()
    check_texts(str(kubernetes.build_error(status, content, "pods/box", {})))
    response = requests.Response()
    response.status_code, response._content = status, ANSWER.encode()
    with pytest.raises(ProviderError) as raised:
        cloudflare._require_status(response, "box", 200)
    check_texts(str(raised.value))


def test_texts_of_lost_connections_are_redacted_for_operators_and_omitted_for_agents() -> None:
    with pytest.raises(ProviderError) as raised:
        raise_for_transport("box", OSError(ANSWER))
    check_texts(str(raised.value))
    check_texts(str(api_client._build_transport_error("pods", OSError(ANSWER))))
    assert KEY not in str(StoreError("s3", "get", ANSWER)) and KEY not in str(Unavailable(ANSWER))


@pytest.mark.parametrize("reason", ["Evicted", "DeadlineExceeded", "NodeShutdown", "", "Other"])
def test_the_words_of_a_cluster_about_an_ended_pod_are_redacted_and_omitted_for_agents(reason: str) -> None:
    ending = endings.describe_end({"status": {"phase": "Failed", "reason": reason, "message": ANSWER}})
    assert ending
    check_texts(ending.message)
    for kind, state, describe in (
        ("DisruptionTarget", "True", lambda pod: endings.describe_departure(pod).message),
        ("PodScheduled", "False", endings.find_unschedulable),
    ):
        condition = {"type": kind, "status": state, "reason": "Unschedulable", "message": ANSWER}
        check_texts(describe({"status": {"conditions": [condition]}}))


def check_texts(message: str) -> None:
    """Assert that an operator reads the answer without the key, and an agent the origin of the answer but none of its text."""
    assert KEY not in message and "db-7.internal" in message
    shown = omit_answers(message)
    assert shown and not any(word in shown for word in ("debug page", "Authorization", "db-7.internal", "*"))


def test_texts_of_forges_git_and_repository_servers_have_no_credential_that_was_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = "token-that-no-setting-has"
    document = {"message": f"bad {token}", "error": f"E {token}"}
    answer = HttpAnswer(500, {}, json.dumps(document).encode())
    monkeypatch.setattr(http_calls, "send", lambda *args, **options: answer)
    with pytest.raises(Exception, match="500") as raised:
        GitHubForge("https://forge.example", "a/b", token).pull_request(head="h", base="b", number=1)
    messages = [str(raised.value)]
    basic = base64.b64encode(f"x-access-token:{token}".encode()).decode()
    git_error = Git(tmp_path, tmp_path, secrets=(token, basic))._build_error("push", 1, f"fatal: {basic} {token}".encode())
    messages.append(str(git_error))
    service = atproto.RepositoryService("https://pds.example")
    with pytest.raises(atproto.ServiceError) as failed:
        service.call("x.y.z", json={"password": token}, authorization="")
    messages.append(str(failed.value))
    with pytest.raises(atproto.ServiceError) as failed:
        service.call("x.y.z", json={}, authorization=f"Bearer {token}")
    messages.append(str(failed.value))
    for message in messages:
        assert token not in message and basic not in message and "****" in message
        assert "****" not in omit_answers(message)


def test_the_settings_know_every_secret_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = base64.b64encode(b"k" * 32).decode()
    names = [name for name, variable in ENV_VARIABLES.items() if variable.secret]
    values = {name: f"value-of-{name.lower()}" for name in names}
    values |= {"DATABASE_URL": "postgres://u:password-of-the-database@127.0.0.1/x", "LEASEHOLD_IDENTITY_KEYS": f"{key},{key}"}
    known = load_settings(monkeypatch, tmp_path, **values).SECRETS
    for name in names:
        expected = {"DATABASE_URL": "password-of-the-database", "LEASEHOLD_IDENTITY_KEYS": key}.get(name, values[name])
        assert expected in known, name


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_log_line_has_no_secret(format: str) -> None:
    configuration = logs.build_logging(format, "INFO")
    arguments = dict(configuration["formatters"]["structured"])
    formatter = arguments.pop("()")(**arguments)
    try:
        raise ValueError(ANSWER)
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, f"failed {KEY}: %s", (error,), sys.exc_info())
        line = formatter.format(record)
        event = {"event": "x", "error": ANSWER, "count": 1}
        structured = logging.LogRecord("x", logging.ERROR, "f", 1, event, (), None)
        structured._logger, structured._name = structlog.get_logger("x"), "error"
        line += formatter.format(structured)
    assert KEY not in line and "db-7.internal" in line and "ValueError" in line
