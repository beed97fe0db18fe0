"""Remote providers on the emulators of their vendors, with faults."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings as live_settings

from leases import sweeps
from sandboxes import providers
from sandboxes.models import GONE_STATES, Pool, Run, Sandbox, names
from sandboxes.models.names import build_name
from sandboxes.providers import load_class
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.remote.provider import RemoteProvider
from tests.emulators.base import Emulator, Fault
from tests.emulators.registry import EMULATORS
from tests.support.remote import GetEmulator, configure, connect_provider, emulators  # noqa: F401 - fixture
from tests.support.selection import MATRIX_REASONS, mark_matrix

LISTING = sorted(name for name in EMULATORS if load_class(name).can_list)
MakeProvider = Callable[..., RemoteProvider]
CREATE = {
    "daytona": "POST /api/sandbox$", "langsmith": "POST .*/boxes$", "modal": "RPC /SandboxCreateV2",
    "runloop": "POST /v1/devboxes$",
}  # fmt: skip
EXECUTE = {
    "daytona": "POST .*/process/execute", "langsmith": "GET .*/execute/ws", "modal": "RPC /TaskExecStart",
    "runloop": "POST .*/execute_async",
}  # fmt: skip
LIST = {
    "daytona": "GET /api/sandbox$", "langsmith": "GET .*/boxes$", "modal": "RPC /SandboxListV2",
    "runloop": "GET /v1/devboxes$",
}  # fmt: skip
LOOK_UP = "GET |RPC /SandboxGetFromName"
DESTROY = "DELETE|/shutdown|RPC /SandboxTerminate"
ATTEMPTS = defaultdict(lambda: 1, modal=4)  # of one call by the vendor's client, which repeats failed calls


def pytest_itemcollected(item: pytest.Item) -> None:
    mark_matrix(item, MATRIX_REASONS)


@dataclass
class Remote:
    """One vendor's provider and emulator, and the owner of the sandboxes of this test."""

    kind: str
    provider: RemoteProvider
    emulator: Emulator
    owner: str

    def spec(self, name: str = "") -> SandboxSpec:
        return SandboxSpec(name or f"lhr-{uuid4().hex[:16]}", self.owner)

    def start(self) -> str:
        """Create a sandbox and return its ref."""
        ref = self.provider.create(self.spec())
        self.provider.wait_ready(ref, timeout=timedelta(seconds=30))
        return ref

    def run(self, ref: str, *argv: str, mark: str = "", retain: bool = False) -> ExecResult:
        timeout = timedelta(seconds=30)
        return self.provider.exec(ref, argv, env={}, timeout=timeout, mark=mark or uuid4().hex, retain=retain)

    def fail(self, pattern: str, outcome: int | str | None, times: int = 1) -> None:
        """Let the next requests that match the pattern fail."""
        self.emulator.faults.append(Fault(pattern, outcome, times))


@pytest.fixture(params=LISTING)
def remote(request: pytest.FixtureRequest, emulators: GetEmulator) -> Iterator[Remote]:  # noqa: F811
    emulator = emulators(request.param)
    provider = connect_provider(request.param, emulator)
    provider.retry_delays_seconds = (0.0, 0.0, 0.0)
    remote = Remote(request.param, provider, emulator, owner=uuid4().hex)
    yield remote
    emulator.faults.clear()
    emulator.is_listing_late = False
    for found in provider.list(remote.owner):
        provider.destroy(found.ref)


@pytest.fixture
def make_provider(emulators: GetEmulator) -> MakeProvider:  # noqa: F811
    """Connect a provider to its emulator, with changes of its configuration."""
    return lambda kind, **changes: connect_provider(kind, emulators(kind), **changes)


@pytest.fixture
def move_pool(settings: Any, pool: Pool, emulators: GetEmulator) -> Iterator[Callable[[str], Pool]]:  # noqa: F811
    """Move the test's pool to a vendor, whose emulator serves its sandboxes: move_pool("daytona")."""
    moved: list[str] = []

    def move(kind: str) -> Pool:
        emulator = emulators(kind)
        settings.REMOTE_PROVIDERS = {**live_settings.REMOTE_PROVIDERS, kind: configure(kind, emulator)}
        settings.SANDBOX_PROVIDER = kind
        providers._create_provider.cache_clear()
        Pool.objects.filter(pk=pool.pk).update(provider=kind)
        moved.append(kind)
        return pool

    yield move
    for kind in moved:
        emulators(kind).faults.clear()
        emulators(kind).foreign_answer = None
        provider = providers.get_provider(kind)
        for found in provider.list(str(pool.owner)) if provider.can_list else ():
            provider.destroy(found.ref)
    providers._create_provider.cache_clear()


@pytest.fixture(autouse=True)
def same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let build_name give the same name again, so that a test can ask a vendor for the sandboxes of all incarnations."""
    monkeypatch.setattr(names, "token_hex", lambda size: "0" * 2 * size)


@dataclass
class Account:
    """A pool at a vendor, and the vendor's emulator."""

    pool: Pool
    emulator: Emulator

    def sweep(self, now: datetime) -> None:
        sweeps.expire_due_leases(now=now)
        sweeps.recover_stalled(now=now)
        sweeps.reclaim(now=now)
        sweeps.reconcile(now=now, grace=timedelta(0))

    def find_existing(self) -> set[str]:
        """Return the names of the pool's sandboxes that the vendor has, of all incarnations."""
        rows = Sandbox.objects.filter(pool=self.pool)
        issued = {build_name(sandbox.pk, number) for sandbox in rows for number in range(1, sandbox.incarnation + 1)}
        return {name for name in issued if self.emulator.find_machines(name)}

    def assert_converged(self) -> None:
        rows = Sandbox.objects.filter(pool=self.pool)
        existing = {sandbox.name for sandbox in rows.exclude(state__in=(*GONE_STATES, "cold"))}
        assert self.find_existing() == existing
        assert all(len(self.emulator.find_machines(name)) == 1 for name in existing)
        assert Pool.objects.get(pk=self.pool.pk).used == rows.exclude(state="destroyed").count()
        assert not Run.objects.filter(ended_at__isnull=True).exists()


@pytest.fixture
def account(vendor: str, move_pool: Callable[[str], Pool], emulators: GetEmulator) -> Account:  # noqa: F811
    """Account of the vendor that the test names, with the test's pool."""
    return Account(move_pool(vendor), emulators(vendor))
