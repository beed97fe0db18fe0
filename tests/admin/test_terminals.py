"""Terminals in the console: the reason, the page and the operator who may see the page."""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from leases.errors import GrantEnded
from leases.models import Lease
from leases.stream_server import access, address
from leases.stream_server.grants import TerminalGrant
from sandboxes.models import Process, Sandbox
from sandboxes.providers.memory import MemoryProvider, ProgramResult
from tests.admin.conftest import NOW, ensure_sandbox, run
from tests.support.console import WHY, fetch, list_messages, row_url

pytestmark = pytest.mark.django_db
PORT = 18765


@pytest.fixture
def sandbox(lease: Lease, memory: MemoryProvider, settings: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """A sandbox of the memory provider, whose processes count as terminals, beside the record of a stream server."""
    settings.RUNTIME_DIR = tmp_path
    address.record_port(PORT)
    start = MemoryProvider.start

    def start_with_terminal(self: MemoryProvider, *args: Any, terminal: Any = None, **options: Any) -> Any:
        return start(self, *args, **options)

    monkeypatch.setattr(MemoryProvider, "start", start_with_terminal)
    monkeypatch.setattr(MemoryProvider, "has_terminals", True)
    memory.programs["bash"] = lambda call: ProgramResult(took=timedelta(hours=1))
    run(lease, "true")
    return ensure_sandbox(lease)


def read_grant(page: str) -> TerminalGrant:
    match = re.search(rf'data-url="ws://127\.0\.0\.1:{PORT}/terminals/([^"]+)"', page)
    assert match, page
    return TerminalGrant.decode(match[1], now=NOW)


def test_operator_opens_a_terminal_with_a_reason(operator: Client, sandbox: Sandbox) -> None:
    response = operator.post(row_url(sandbox, "open_terminal"), WHY)
    page = operator.get(response.headers["HX-Redirect"])
    process = Process.objects.get()
    grant = read_grant(page.content.decode())
    assert (grant.process, grant.read_only, process.is_terminal) == (process.pk, False, True)
    assert f"connect-src 'self' ws://127.0.0.1:{PORT}" in page.headers["Content-Security-Policy"]
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.get_change_message()) == (str(sandbox.pk), f"Open terminal: {WHY['reason']}")


def test_operator_watches_the_terminal_of_an_agent(operator: Client, sandbox: Sandbox) -> None:
    operator.post(row_url(sandbox, "open_terminal"), WHY)
    process = Process.objects.get()
    for fields, view_only in (({}, False), ({"view_only": "on"}, True)):
        response = operator.post(row_url(process, "connect"), WHY | fields)
        page = fetch(operator, response.headers["HX-Redirect"])
        assert f'data-view-only="{"true" if view_only else "false"}"' in page
        assert read_grant(page).read_only is view_only
    assert LogEntry.objects.filter(object_id=str(process.pk)).count() == 2


def deactivate(user: User) -> None:
    User.objects.filter(pk=user.pk).update(is_active=False)


def take_role(user: User) -> None:
    user.groups.clear()


@pytest.mark.parametrize("change", [deactivate, take_role])
def test_terminal_of_an_operator_ends_with_the_account_or_the_role(
    operator: Client, sandbox: Sandbox, change: Callable[[User], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryProvider, "find_agent_id", lambda self, ref: "agent", raising=False)
    url = operator.post(row_url(sandbox, "open_terminal"), WHY).headers["HX-Redirect"]
    grant = read_grant(fetch(operator, url))
    assert access.open_terminal(grant, now=timezone.now()) == "agent"
    assert access.find_ended([grant], now=timezone.now()) == {}
    change(User.objects.get(username="operator"))
    assert access.find_ended([grant], now=timezone.now())[grant].code == "grant_ended"
    with pytest.raises(GrantEnded):
        access.open_terminal(grant, now=timezone.now())


def test_page_is_for_the_operator_of_the_action_only(
    operator: Client, as_role: Callable[..., Client], sandbox: Sandbox
) -> None:
    url = operator.post(row_url(sandbox, "open_terminal"), WHY).headers["HX-Redirect"]
    process = Process.objects.get()
    assert as_role("Viewer").get(url).status_code == 403
    for client, address_ in ((as_role("Administrator"), url), (operator, url[:-5]), (operator, url.partition("?")[0])):
        response = client.get(address_)
        assert (response.status_code, response.headers["Location"]) == (302, row_url(process))
        assert "not valid" in str(list_messages(client.get(row_url(process))))


def test_page_of_a_terminal_that_has_ended_leads_to_its_process(operator: Client, sandbox: Sandbox) -> None:
    url = operator.post(row_url(sandbox, "open_terminal"), WHY).headers["HX-Redirect"]
    process = Process.objects.get()
    Process.objects.update(state="exited", ended_at=NOW)
    assert operator.get(url).headers["Location"] == row_url(process)
    assert "Connect to terminal" not in fetch(operator, row_url(process))
