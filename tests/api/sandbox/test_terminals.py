"""Terminals and previews through the API: URLs and refusals. tests/e2e/test_terminals.py connects to them."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from leases.models import EnvironmentType, IdempotentRequest
from leases.stream_server import address
from leases.stream_server.grants import PreviewGrant, TerminalGrant
from sandboxes.models import Policy, Process
from sandboxes.providers.memory import MemoryProvider
from tests.api.conftest import ApiClient, assert_refused
from tests.conftest import NOW

pytestmark = pytest.mark.django_db
PORT = 18765


@pytest.fixture
def stream_server(settings: Any, tmp_path: Any) -> None:
    """The record of a stream server."""
    settings.RUNTIME_DIR = tmp_path
    address.record_port(PORT)


@pytest.fixture
def no_stream_server(settings: Any, tmp_path: Any) -> None:
    settings.RUNTIME_DIR = tmp_path


@pytest.fixture
def terminal_url(ada: ApiClient, lease: dict[str, Any]) -> str:
    """URL of a terminal in the API. The memory provider has none, so the row of another process is changed."""
    process = ada.post(f"leases/{lease['id']}/processes", {"argv": ["sleep", "300"]}).json()
    Process.objects.update(is_terminal=True)
    return f"leases/{lease['id']}/terminals/{process['process_id']}/url"


@pytest.fixture
def previews_allowed() -> Policy:
    policy = Policy.objects.create(name="previews", previews=True)
    EnvironmentType.objects.update(policy=policy)
    return policy


@pytest.mark.usefixtures("no_stream_server")
def test_nothing_is_started_without_a_stream_server(
    ada: ApiClient, lease: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryProvider, "has_terminals", True)
    problem = assert_refused(ada, "POST", f"leases/{lease['id']}/terminals", {}, 503)
    assert problem["code"] == "stream_server_unavailable"


@pytest.mark.usefixtures("stream_server")
def test_provider_without_terminals_refuses_them(ada: ApiClient, lease: dict[str, Any]) -> None:
    problem = assert_refused(ada, "POST", f"leases/{lease['id']}/terminals", {}, 400)
    assert problem["code"] == "provider_rejected"


@pytest.mark.usefixtures("stream_server")
def test_url_grants_access_to_one_terminal_until_it_expires(ada: ApiClient, terminal_url: str) -> None:
    response = ada.post(terminal_url, {"view_only": True, "expires_seconds": 60})
    body = response.json()
    assert (response.status_code, body["view_only"]) == (200, True)
    prefix = f"ws://127.0.0.1:{PORT}/terminals/"
    assert body["url"].startswith(prefix)
    grant = TerminalGrant.decode(body["url"].removeprefix(prefix), now=NOW - timedelta(days=365))
    assert grant.process == UUID(terminal_url.split("/")[3])
    assert grant.read_only


@pytest.mark.usefixtures("stream_server")
def test_terminals_of_other_leases_and_other_processes_are_not_found(ada: ApiClient, terminal_url: str) -> None:
    Process.objects.update(is_terminal=False)
    assert assert_refused(ada, "POST", terminal_url, {}, 404)["code"] == "terminal_not_found"
    Process.objects.update(is_terminal=True, holder=UUID(int=1))
    assert assert_refused(ada, "POST", terminal_url, {}, 404)["code"] == "terminal_not_found"


@pytest.mark.usefixtures("stream_server")
def test_terminal_that_has_ended_and_stdin_by_offset_are_refused(ada: ApiClient, terminal_url: str) -> None:
    process_url = terminal_url.replace("/terminals/", "/processes/").removesuffix("/url")
    assert_refused(ada, "POST", f"{process_url}/stdin", {"content": "x", "offset": 0}, 400)
    assert ada.delete(process_url).status_code == 200
    assert assert_refused(ada, "POST", terminal_url, {}, 409)["code"] == "process_ended"


@pytest.mark.usefixtures("stream_server")
def test_previews_need_a_policy(ada: ApiClient, lease: dict[str, Any]) -> None:
    url = f"leases/{lease['id']}/previews"
    assert assert_refused(ada, "POST", url, {"port": 80}, 403)["code"] == "previews_forbidden"


@pytest.mark.usefixtures("stream_server")
def test_urls_lead_to_the_configured_address(
    ada: ApiClient, lease: dict[str, Any], terminal_url: str, previews_allowed: Policy, settings: Any
) -> None:
    previews_url = f"leases/{lease['id']}/previews"
    assert ada.post(previews_url, {"port": 80}).json()["url"].startswith(f"http://127.0.0.1:{PORT}/previews/")
    settings.STREAM_URL = "https://streams.example.com/x"
    assert ada.post(terminal_url).json()["url"].startswith("wss://streams.example.com/x/terminals/")
    response = ada.post(previews_url, {"port": 80})
    prefix = "https://streams.example.com/x/previews/"
    assert (response.status_code, response.json()["url"].startswith(prefix)) == (201, True)
    settings.PREVIEW_DOMAIN = "preview.example.com"
    label, _, rest = ada.post(previews_url, {"port": 80}).json()["url"].removeprefix("https://").partition(".")
    assert rest == "preview.example.com/"
    assert PreviewGrant.decode(label, now=NOW - timedelta(days=365)).port == 80


@pytest.mark.usefixtures("stream_server")
def test_urls_are_not_stored(ada: ApiClient, lease: dict[str, Any], terminal_url: str, previews_allowed: Policy) -> None:
    for url, body in ((terminal_url, {}), (f"leases/{lease['id']}/previews", {"port": 80})):
        assert ada.post(url, body, idempotency_key="k").status_code in (200, 201)
    assert not IdempotentRequest.objects.filter(key="k").exists()
