"""Requests whose sender has proved no identity: how many may be in progress, and what they cost."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from controlplane import api_document, health
from controlplane.middleware import AnonymousRequestLimitMiddleware

GUESSED = {"sessionid": "guessed"}


def build_request(path: str, *, user: Any = None, cookies: dict[str, str] | None = None, **headers: str) -> HttpRequest:
    request = RequestFactory().get(path, headers=headers)
    request.COOKIES.update(cookies or {})
    request.user = user or AnonymousUser()
    return request


@pytest.fixture
def call_beside_slow_requests(settings: Any) -> Any:
    """Function that sends a request while as many requests to the log-in page as may be in progress are."""
    settings.WEB_THREADS = 16
    begun, finish = threading.Semaphore(0), threading.Event()

    def respond(request: HttpRequest) -> HttpResponse:
        if request.path_info == "/admin/login/":
            begun.release()
            assert finish.wait(30)
        return HttpResponse()

    middleware = AnonymousRequestLimitMiddleware(respond)
    with ThreadPoolExecutor(4) as threads:
        slow = [threads.submit(middleware, build_request("/admin/login/", cookies=GUESSED)) for _ in range(4)]
        for _ in slow:
            assert begun.acquire(timeout=30)
        yield middleware
        finish.set()
        assert {future.result().status_code for future in slow} == {200}
    assert middleware(build_request("/admin/login/")).status_code == 200  # the places are free again


@pytest.mark.parametrize(
    "request_", [
        build_request("/admin/login/"), build_request("/admin/leases/lease/"), build_request("/admin/", cookies=GUESSED),
        build_request("/api/schema"), build_request("/api/docs"), build_request("/readyz"), build_request("/healthz"),
        build_request("/metrics"), build_request("/nothing"), build_request("/api/schema", authorization="Bearer guessed"),
    ],
    ids=lambda request: f"{request.path} {request.headers.get('Authorization', '')}{request.COOKIES.get('sessionid', '')}",
)  # fmt: skip
def test_strangers_have_a_quarter_of_the_threads(
    request_: HttpRequest, call_beside_slow_requests: Callable[[HttpRequest], HttpResponse]
) -> None:
    response = call_beside_slow_requests(request_)
    assert (response.status_code, response["Retry-After"]) == (503, "1")


def test_others_are_served_beside_them(call_beside_slow_requests: Callable[[HttpRequest], HttpResponse]) -> None:
    signed_in = build_request("/admin/", user=User(username="ada"), cookies={django_settings.SESSION_COOKIE_NAME: "x"})
    for request in (signed_in, build_request("/livez"), build_request("/api/v1/leases"), build_request("/mcp")):
        assert call_beside_slow_requests(request).status_code == 200


def test_health_report_is_built_once_for_all_requests_of_a_moment(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.HEALTH_REPORT_SECONDS = 1.0
    clock, built = [100.0], list[float]()

    def build(**_: Any) -> dict[str, Any]:
        built.append(clock[0])
        return {"number": len(built)}

    monkeypatch.setattr(health, "check_health", build)
    monkeypatch.setattr(health.time, "monotonic", lambda: clock[0])
    report = health.SharedReport()
    with ThreadPoolExecutor(8) as threads:
        assert {answer["number"] for answer in threads.map(lambda _: report.get(), range(16))} == {1}
    clock[0] += 0.9
    assert report.get() == {"number": 1}
    clock[0] += 0.1
    assert report.get() == {"number": 2}


@pytest.mark.parametrize(
    ("query", "accept", "content_type"),
    [
        ("", "", api_document.YAML), ("", "*/*", api_document.YAML), ("", "application/json", api_document.JSON),
        ("", "application/json, */*;q=0.1", api_document.JSON),
        ("", f"{api_document.YAML}, application/json;q=0.5", api_document.YAML),
        ("?format=json", "*/*", api_document.JSON), ("?format=yaml", "application/json", api_document.YAML),
    ],
)  # fmt: skip
def test_api_document_is_served_as_the_client_asks(query: str, accept: str, content_type: str) -> None:
    request = RequestFactory().get(f"/api/schema{query}", headers={"accept": accept} if accept else {})
    response = api_document.show_document(request)
    assert (response.status_code, response["Content-Type"]) == (200, content_type)
    again = RequestFactory().get(f"/api/schema{query}", headers={"if-none-match": response["ETag"], "accept": accept})
    assert api_document.show_document(again).status_code == 304
