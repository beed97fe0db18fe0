"""Database checks of terminals and previews."""

from datetime import timedelta

import pytest

from leases import execution, leasing
from leases.errors import LeaseEnded, PreviewsForbidden
from leases.models import EnvironmentType, Lease
from leases.stream_server import access
from leases.stream_server.grants import PreviewGrant, TerminalGrant
from sandboxes import processes, suspension
from sandboxes.errors import ProcessEnded, ProviderCallFailed, SandboxNotHeld
from sandboxes.models import Policy, Process, Sandbox, SandboxState
from sandboxes.processes import ProcessSpec
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE, NOW

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


def grant_terminal(process: Process, *, read_only: bool = False) -> TerminalGrant:
    return TerminalGrant(process.holder, process.pk, END, read_only, "did:plc:ada")


def test_input_renews_the_lease_and_delays_eviction_and_suspension(lease: Lease, process: Process) -> None:
    Sandbox.objects.update(suspend_after=MINUTE)
    before, sandbox = Lease.objects.get(), Sandbox.objects.get()
    assert sandbox.state == SandboxState.WAITING
    assert sandbox in suspension.find_due(now=LATER)
    access.use_terminal(grant_terminal(process), now=LATER)
    after = Sandbox.objects.get()
    assert (after.last_used_at, after.idle_at) == (LATER, LATER + sandbox.idle_after)
    assert Lease.objects.get().expires_at > before.expires_at
    assert sandbox not in suspension.find_due(now=LATER)


def test_input_keeps_the_time_of_the_next_try_to_store_the_state(process: Process) -> None:
    Sandbox.objects.update(persist_failures=1, idle_at=NOW + 5 * MINUTE)
    access.use_terminal(grant_terminal(process), now=LATER)
    assert Sandbox.objects.get().idle_at == NOW + 5 * MINUTE


def test_viewing_a_terminal_renews_nothing(lease: Lease, process: Process) -> None:
    before = Lease.objects.get().expires_at
    assert access.open_terminal(grant_terminal(process, read_only=True), now=LATER).startswith("agent of ")
    assert Lease.objects.get().expires_at == before
    access.open_terminal(grant_terminal(process), now=LATER)
    assert Lease.objects.get().expires_at > before


def test_terminal_of_an_ended_lease_or_process_is_refused(lease: Lease, process: Process) -> None:
    assert access.filter_open_terminals([process.pk]) == {process.pk}
    processes.kill_process(process, now=NOW)
    assert access.filter_open_terminals([process.pk]) == set()
    with pytest.raises(ProcessEnded):
        access.open_terminal(grant_terminal(process), now=NOW)
    assert access.filter_active_leases([lease.pk], now=NOW) == {lease.pk}
    leasing.end(lease.pk, reason="released", now=NOW)
    assert access.filter_active_leases([lease.pk], now=NOW) == set()
    for read_only in (True, False):
        with pytest.raises(LeaseEnded):
            access.open_terminal(grant_terminal(process, read_only=read_only), now=NOW)


def test_preview_follows_policy_lease_and_sandbox(lease: Lease, process: Process) -> None:
    grant = PreviewGrant(lease.pk, 80, END)
    with pytest.raises(PreviewsForbidden):
        access.find_preview_agent(grant, now=NOW)
    EnvironmentType.objects.update(policy=Policy.objects.create(name="open", previews=True))
    before = Lease.objects.get().expires_at
    assert access.find_preview_agent(grant, now=LATER).startswith("agent of ")
    assert Lease.objects.get().expires_at == before
    Policy.objects.update(previews=False)
    with pytest.raises(PreviewsForbidden):
        access.find_preview_agent(grant, now=NOW)
    Policy.objects.filter(name="open").update(previews=True)
    Sandbox.objects.update(holder=None)
    with pytest.raises(SandboxNotHeld):
        access.find_preview_agent(grant, now=NOW)


def test_sandbox_without_an_agent_is_unavailable(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryProvider, "find_agent_id", lambda self, ref: None)
    with pytest.raises(ProviderCallFailed):
        access.open_terminal(grant_terminal(process), now=NOW)
