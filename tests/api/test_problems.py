"""Whatever goes wrong under /api/, the answer is a problem document: no HTML, no stack trace, no secret."""

import logging

import pytest
from django.db import OperationalError

from leases import leasing
from sandboxes.models import Run
from tests.api.conftest import ApiClient

pytestmark = pytest.mark.django_db


@pytest.fixture(params=[True, False], ids=["debug", "no debug"])
def debug(request, settings) -> None:
    settings.DEBUG = request.param


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/", 404),
        ("GET", "/api/v2/leases", 404),
        ("GET", "/api/v1/leases/", 404),
        ("POST", "/api/v1/nope", 404),
        ("DELETE", "/api/v1/leases", 405),
        ("PATCH", "/api/v1/leases", 405),
        ("OPTIONS", "/api/v1/leases", 405),
        ("TRACE", "/api/v1/leases", 405),
        ("GET", "/api/v1/environments/e/join", 405),
        ("POST", "/api/schema", 405),
    ],
)
def test_what_is_not_there(ada: ApiClient, method: str, path: str, status: int) -> None:
    answer = ada(method, path)
    problem = answer.json()
    assert (answer.status_code, answer["Content-Type"]) == (status, "application/problem+json")
    assert (problem["status"], problem["type"]) == (status, f"urn:leasehold:problem:{problem['code']}")
    assert ("Allow" in answer.headers) == (status == 405)


@pytest.mark.usefixtures("debug")
def test_a_bug_shows_only_that_there_was_one(ada: ApiClient, ask, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def bug(*args: object, **options: object) -> None:
        raise RuntimeError("the secret ingredient")

    monkeypatch.setattr(leasing, "acquire", bug)
    answer = ada.post("leases", ask())
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "ingredient" not in answer.content.decode()
    assert "Traceback" not in answer.content.decode()
    assert "the secret ingredient" in caplog.text


def test_a_database_that_does_not_answer_is_unavailable(ada: ApiClient, lease, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*args: object, **options: object) -> None:
        raise OperationalError("database is locked")

    monkeypatch.setattr(leasing, "renew", locked)
    answer = ada.post(f"leases/{lease['id']}/renew")
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    assert answer["Retry-After"] == "5"
    assert "locked" not in answer.content.decode()


def test_all_that_is_wrong_is_named(ada: ApiClient, ask) -> None:
    problem = ada.post("leases", ask(ttl_seconds=0, environment_id="a b", expiry_conditions=["ok", "not ok"])).json()
    assert {each["field"] for each in problem["errors"]} == {"ttl_seconds", "environment_id", "expiry_conditions.1"}


def test_headers_of_api_answers(ada: ApiClient, lease) -> None:
    for answer in (ada.get("leases"), ada.get("/api/v1/nope")):
        assert answer["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert answer["X-Content-Type-Options"] == "nosniff"
        assert not answer.cookies


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
