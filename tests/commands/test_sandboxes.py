"""manage.py sandboxes: list, show, destroy and adopt, as text and as the document of the HTTP API."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError
from django.utils import timezone

from leases.models import Lease
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.commands.manage import call
from tests.support.leases import get_sandbox, run

pytestmark = pytest.mark.django_db


@pytest.fixture
def orphan(pool: Pool, memory: MemoryProvider, settings: Any) -> str:
    settings.ORPHAN_GRACE = timedelta(0)
    name = f"leasehold-{uuid4().hex}-1"
    memory.create(SandboxSpec(name, str(pool.owner)))
    return name


def test_sandboxes_are_listed_shown_destroyed_and_adopted(orphan: str, grant: Any, pool: Pool, memory: MemoryProvider) -> None:
    lease: Lease = grant(now=timezone.now())
    run(lease, now=timezone.now())
    lines = call("sandboxes", "list").splitlines()
    assert lines[0].endswith("(memory): 2 listed")
    assert lines[1].startswith(f"no_row  memory  {orphan}  pool {pool.name}  running  {datetime.now(UTC):%Y}")
    assert lines[2].startswith(f"none  memory  {get_sandbox(lease).name}  did:plc:ada::game-1  waiting/running")
    [listed] = json.loads(call("sandboxes", "list", "--json", "--finding", "no_row"))["sandboxes"]
    assert json.loads(call("sandboxes", "show", "memory", orphan, "--json")) == listed
    assert f"name: {orphan}" in call("sandboxes", "show", "memory", orphan)
    act = ("memory", orphan, "--reason", "not needed")
    assert "would be destroyed" in call("sandboxes", "destroy", *act, "--dry-run")
    assert f"would be adopted into the pool {pool.name}" in call("sandboxes", "adopt", *act, "--dry-run")
    assert "in quarantine, its files are the snapshot" in call("sandboxes", "adopt", *act, "--lease", str(lease.pk))
    row = Sandbox.objects.get(quarantined_at__isnull=False)
    assert (row.name, row.agent_did, row.holder) == (orphan, lease.agent_did, None)
    with pytest.raises(CommandError, match="A row of this installation"):
        call("sandboxes", "destroy", *act)
    with memory.fail("list", Unavailable("out of order")), pytest.raises(CommandError, match="not complete"):
        call("sandboxes", "list")
    Sandbox.objects.filter(pk=row.pk).update(incarnation=2, ref="moved")
    assert call("sandboxes", "destroy", *act).strip() == f"{orphan}: destroyed"
    assert call("sandboxes", "destroy", *act).strip() == f"{orphan}: not listed any more"
    for arguments, text in (
        (("show", "memory", "other"), "No such sandbox"),
        (("destroy", "daytona", "x", "--reason", "r"), "DAYTONA"),
    ):
        with pytest.raises(CommandError, match=text):
            call("sandboxes", *arguments)
