"""Database checks of terminals and previews."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from leases import api_keys, execution, leasing
from leases.errors import GrantEnded, LeaseEnded, PreviewsForbidden
from leases.grants.issuers import Issuer
from leases.models import AgentKey, EnvironmentType, Lease
from leases.stream_server import access
from leases.stream_server.grants import PreviewGrant, TerminalGrant
from sandboxes import processes, suspension
from sandboxes.errors import ProcessEnded, ProviderCallFailed, SandboxAsleep
from sandboxes.models import Policy, Process, Sandbox, SandboxState
from sandboxes.processes import ProcessSpec
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW
from tests.support.billing import ADA
from tests.support.grants import KEY_ENDS

pytestmark = pytest.mark.django_db
LATER = NOW + 2 * MINUTE
END = int((NOW + timedelta(hours=1)).timestamp())


@pytest.fixture
def process(lease: Lease, memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch) -> Process:
    """The process of a terminal. The memory provider has no terminals and no agents."""
    monkeypatch.setattr(MemoryProvider, "find_agent_id", lambda self, ref: f"agent of {ref}", raising=False)
    with execution.use_lease(lease.pk, now=NOW) as request:
        started = processes.start_process(request, ProcessSpec(["sleep", "300"]), now=NOW)
    Process.objects.update(is_terminal=True)
    return started


@pytest.fixture
def key() -> tuple[AgentKey, str]:
    return api_keys.issue_key([ADA], now=NOW)


@pytest.fixture
def terminal(process: Process, key: tuple[AgentKey, str]) -> TerminalGrant:
    return TerminalGrant(process.holder, process.pk, END, read_only=False, actor="key", issuer=Issuer.of_key(key[0].pk, key[1]))


def test_input_renews_the_lease_and_delays_eviction_and_suspension(
    lease: Lease, process: Process, terminal: TerminalGrant
) -> None:
    Sandbox.objects.update(suspend_after=MINUTE)
    before, sandbox = Lease.objects.get(), Sandbox.objects.get()
    assert sandbox.state == SandboxState.WAITING
    assert sandbox in suspension.find_due(now=LATER)
    access.use_terminal(terminal, now=LATER)
    after = Sandbox.objects.get()
    assert (after.last_used_at, after.idle_at) == (LATER, LATER + sandbox.idle_after)
    assert Lease.objects.get().expires_at > before.expires_at
    assert sandbox not in suspension.find_due(now=LATER)


def test_input_keeps_the_time_of_the_next_try_to_store_the_state(terminal: TerminalGrant) -> None:
    Sandbox.objects.update(persist_failures=1, idle_at=NOW + 5 * MINUTE)
    access.use_terminal(terminal, now=LATER)
    assert Sandbox.objects.get().idle_at == NOW + 5 * MINUTE


def test_viewing_a_terminal_renews_nothing(terminal: TerminalGrant) -> None:
    before = Lease.objects.get().expires_at
    assert access.open_terminal(replace(terminal, read_only=True), now=LATER).startswith("agent of ")
    assert Lease.objects.get().expires_at == before
    access.open_terminal(terminal, now=LATER)
    assert Lease.objects.get().expires_at > before


def test_terminal_of_an_ended_lease_or_process_is_refused(lease: Lease, process: Process, terminal: TerminalGrant) -> None:
    assert access.find_ended([terminal], now=NOW) == {}
    processes.kill_process(process, now=NOW)
    assert describe_end(terminal) == "process_ended"
    with pytest.raises(ProcessEnded):
        access.open_terminal(terminal, now=NOW)
    leasing.end(lease.pk, reason="released", now=NOW)
    assert describe_end(terminal) == "lease_ended"
    for read_only in (True, False):
        with pytest.raises(LeaseEnded):
            access.open_terminal(replace(terminal, read_only=read_only), now=NOW)


def describe_end(grant: TerminalGrant | PreviewGrant, now: datetime = NOW) -> str:
    """Return the code of the error with which an open connection ends, empty if the connection goes on."""
    ended = access.find_ended([grant], now=now)
    return str(ended[grant].code) if ended else ""


@pytest.mark.parametrize("change", KEY_ENDS)
@pytest.mark.parametrize("read_only", [True, False])
def test_terminal_ends_with_the_right_of_its_key(
    terminal: TerminalGrant, key: tuple[AgentKey, str], read_only: bool, change: dict[str, Any]
) -> None:
    grant = replace(terminal, read_only=read_only)
    access.open_terminal(grant, now=NOW)
    AgentKey.objects.update(**change)
    renewed_at = Lease.objects.get().last_activity_at
    assert describe_end(grant) == "grant_ended"
    for use in (access.open_terminal, access.use_terminal):
        with pytest.raises(GrantEnded):
            use(grant, now=LATER)
    assert Lease.objects.get().last_activity_at == renewed_at


def test_terminal_outlives_the_rotation_of_its_key_until_the_end_of_the_overlap(
    terminal: TerminalGrant, key: tuple[AgentKey, str]
) -> None:
    api_keys.rotate_key(key[0].pk, overlap=MINUTE, now=NOW)
    assert describe_end(terminal) == ""
    access.open_terminal(terminal, now=NOW)
    assert describe_end(terminal, NOW + MINUTE) == "grant_ended"


def test_input_after_the_expiry_of_the_url_renews_nothing(terminal: TerminalGrant) -> None:
    at = NOW + timedelta(minutes=30)
    ending = replace(terminal, expires_at=int(at.timestamp()))
    access.use_terminal(ending, now=at - MINUTE)
    renewed = Lease.objects.get().expires_at
    with pytest.raises(GrantEnded):
        access.use_terminal(ending, now=at)
    assert Lease.objects.get().expires_at == renewed


def test_input_does_not_renew_a_lease_beyond_its_max_ttl(terminal: TerminalGrant) -> None:
    limit = Lease.objects.get().expires_at
    Lease.objects.update(max_expires_at=limit)
    access.use_terminal(terminal, now=LATER)
    assert Lease.objects.get().expires_at == limit


@pytest.fixture
def preview(process: Process, key: tuple[AgentKey, str]) -> PreviewGrant:
    EnvironmentType.objects.update(policy=Policy.objects.create(name="open", previews=True))
    return PreviewGrant(process.holder, 80, END, key_id=key[0].pk)


@pytest.mark.parametrize("change", KEY_ENDS[:-1])
def test_preview_ends_with_the_right_of_its_key(preview: PreviewGrant, change: dict[str, Any]) -> None:
    access.find_preview_agent(preview, now=NOW)
    AgentKey.objects.update(**change)
    assert describe_end(preview) == "grant_ended"
    with pytest.raises(GrantEnded):
        access.find_preview_agent(preview, now=NOW)


def test_preview_outlives_every_rotation_of_its_key(preview: PreviewGrant, key: tuple[AgentKey, str]) -> None:
    api_keys.rotate_key(key[0].pk, overlap=timedelta(0), now=NOW)
    assert describe_end(preview) == ""
    access.find_preview_agent(preview, now=NOW)


def test_each_of_many_open_connections_ends_for_its_own_reason(
    lease: Lease, terminal: TerminalGrant, preview: PreviewGrant
) -> None:
    row, text = api_keys.issue_key([ADA], now=NOW)
    other = replace(terminal, issuer=Issuer.of_key(row.pk, text))
    api_keys.revoke_key(row, now=NOW)
    ended = access.find_ended([terminal, preview, other], now=NOW)
    assert {grant: error.code for grant, error in ended.items()} == {other: "grant_ended"}


def test_preview_follows_policy_lease_and_sandbox(lease: Lease, preview: PreviewGrant) -> None:
    before = Lease.objects.get().expires_at
    assert access.find_preview_agent(preview, now=LATER).startswith("agent of ")
    assert Lease.objects.get().expires_at == before
    Policy.objects.update(previews=False)
    with pytest.raises(PreviewsForbidden):
        access.find_preview_agent(preview, now=NOW)
    EnvironmentType.objects.update(policy=None)
    with pytest.raises(PreviewsForbidden):
        access.find_preview_agent(preview, now=NOW)
    EnvironmentType.objects.update(policy=Policy.objects.create(name="previews", previews=True))
    Sandbox.objects.update(holder=None)
    with pytest.raises(SandboxAsleep):
        access.find_preview_agent(preview, now=NOW)


def test_sandbox_without_an_agent_is_unavailable(terminal: TerminalGrant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryProvider, "find_agent_id", lambda self, ref: None)
    with pytest.raises(ProviderCallFailed):
        access.open_terminal(terminal, now=NOW)
