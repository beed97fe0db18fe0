"""Renewals as the web server's WSGI application receives them: which it answers itself, and which Django does."""

from typing import Any

import pytest
from django.db import OperationalError, connection
from django.http import HttpResponse, StreamingHttpResponse

from controlplane.application import Application
from tests.api.conftest import ApiClient
from tests.support.web_server import WebServer

# A request begins by closing a connection whose transaction was left open.
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def server(ada: ApiClient) -> WebServer:
    return WebServer(ada.key)


@pytest.fixture
def renew_path(ada: ApiClient, lease) -> str:
    """Path of a renewal. The key's use is recorded, so that one statement can renew."""
    ada.post(f"leases/{lease['id']}/renew")
    return f"/api/v1/leases/{lease['id']}/renew"


def test_a_renewal_is_answered_without_django_as_by_django(server: WebServer, renew_path: str, ada: ApiClient, lease) -> None:
    status, headers, body = server.send("POST", renew_path)
    assert (status, server.django_requests) == (200, 0)
    assert body == {"expires_at": ada.get(f"leases/{lease['id']}").json()["expires_at"]}
    by_django = server.send("POST", renew_path, HTTP_IDEMPOTENCY_KEY="k1")
    assert ((200, headers, body.keys()), 1) == ((*by_django[:2], by_django[2].keys()), server.django_requests)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"method": "GET"}, 405),
        ({"body": b"{}"}, 200),
        ({"body": b'{"ttl": 1}'}, 400),
        ({"QUERY_STRING": "a=1&a=2"}, 400),
        ({"HTTP_AUTHORIZATION": ""}, 401),
        ({"HTTP_AUTHORIZATION": "Bearer lh_00000000_" + 43 * "x"}, 401),
        ({"path": "/api/v1/leases/00000000-0000-0000-0000-000000000000/renew"}, 404),
        ({"path": "/api/v1/leases/renew"}, 400),
    ],
    ids=str,
)
def test_every_other_request_reaches_django(server: WebServer, renew_path: str, changes: dict[str, Any], status: int) -> None:
    answer = server.send(**{"method": "POST", "path": renew_path} | changes)
    assert (answer[0], server.django_requests) == (status, 1)


def test_a_renewal_that_the_database_interrupts_gets_a_problem_document(server: WebServer, renew_path: str) -> None:
    def fail(*args: Any) -> Any:
        raise OperationalError("server closed the connection unexpectedly")

    with connection.execute_wrapper(fail):
        status, headers, problem = server.send("POST", renew_path)
    assert (status, headers["Content-Type"], problem["code"]) == (503, "application/problem+json", "unavailable")


def test_a_complete_body_is_sent_in_one_piece_and_a_stream_in_its_own() -> None:
    """granian sends a list at once, with its length."""
    closed = []
    complete, stream = HttpResponse("abc"), StreamingHttpResponse(iter([b"a", b"b"]))
    for response in (complete, stream):
        response._resource_closers.append(lambda response=response: closed.append(response))  # type: ignore[attr-defined]
    answer = Application(lambda *_: complete)({"PATH_INFO": "/x"}, lambda *_: None)  # type: ignore[arg-type,return-value]
    assert (answer, closed) == ([b"abc"], [complete])
    assert Application(lambda *_: stream)({"PATH_INFO": "/x"}, lambda *_: None) is stream  # type: ignore[arg-type,return-value]
    assert closed == [complete]
