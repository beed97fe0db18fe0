"""Fixtures of the console tests: signed-in users by role, a lease and its sandbox."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import pytest
from django.contrib.auth.models import Group, User
from django.core.cache import cache
from django.test import Client
from django.utils import timezone

from leases import execution
from leases.models import Lease
from sandboxes.models import Run, Sandbox
from sandboxes.pool import allocation
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE

NOW = timezone.now() - timedelta(minutes=10)  # pages read the real clock, so rows are made relative to it
ADA = "did:plc:ada"


@pytest.fixture
def grant(grant: Callable[..., Lease]) -> Callable[..., Lease]:
    return partial(grant, now=NOW)


@pytest.fixture(autouse=True)
def clear_cache() -> Iterator[None]:
    """The cached dashboard outlives a test and would show another test's numbers."""
    cache.clear()
    yield
    cache.clear()


@pytest.fixture
def as_role(db: None) -> Callable[..., Client]:
    """Sign in as a member of one role: as_role("Operator")."""

    def sign_in(role: str, **client: bool) -> Client:
        user, _ = User.objects.get_or_create(username=role.lower(), is_staff=True)
        user.groups.set(Group.objects.filter(name=role))
        browser = Client(**client)  # type: ignore[arg-type]
        browser.force_login(user)
        return browser

    return sign_in


@pytest.fixture
def viewer(as_role: Callable[..., Client]) -> Client:
    return as_role("Viewer")


@pytest.fixture
def operator(as_role: Callable[..., Client]) -> Client:
    return as_role("Operator")


@pytest.fixture
def administrator(as_role: Callable[..., Client]) -> Client:
    return as_role("Administrator")


@pytest.fixture
def superuser(db: None) -> Client:
    browser = Client()
    browser.force_login(User.objects.create_superuser("root"))
    return browser


@pytest.fixture
def lease(grant: Callable[..., Lease]) -> Lease:
    granted = grant()
    execution.ensure_sandbox_ready(granted.pk, now=granted.leased_at)
    return granted


def ensure_sandbox(lease: Lease) -> Sandbox:
    """The lease's sandbox, started if it has none."""
    return allocation.find_by_holder(lease.pk) or execution.ensure_sandbox_ready(lease.pk, now=lease.leased_at)


def get_state(sandbox: Sandbox) -> str:
    return Sandbox.objects.get(pk=sandbox.pk).state


def list_events(lease: Lease) -> list[tuple[str, str, str]]:
    """Events after the grant, newest first: kind, actor and reason."""
    return [(each.kind, each.actor, each.reason) for each in lease.events.exclude(kind="granted")]


def run(lease: Lease, *argv: str, now=NOW) -> Run:
    return execution.exec_command(lease.pk, Command(argv=argv, timeout=MINUTE), now=now)[0]
