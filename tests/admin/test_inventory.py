"""Inventory page: findings first, engines without a response, actions with their permission and their log entries."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from leases.models import Lease
from sandboxes.models import Pool, Sandbox
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.admin.conftest import ensure_sandbox, run
from tests.support.console import MARKUP, fetch, get_fields, list_messages

pytestmark = pytest.mark.django_db
PAGE = "/admin/inventory/"


@pytest.fixture
def orphan(pool: Pool, memory: MemoryProvider, settings: Any) -> str:
    settings.ORPHAN_GRACE = timedelta(0)
    name = f"leasehold-{uuid4().hex}-1"
    memory.create(SandboxSpec(name, str(pool.owner)))
    return name


def act_url(act: str, name: str) -> str:
    return f"{PAGE}{act}/?{urlencode({'provider': 'memory', 'name': name})}"


def test_an_empty_inventory_says_what_would_appear(viewer: Client, pool: Pool) -> None:
    page = fetch(viewer, PAGE)
    assert "Every sandbox at the engines has a row" in page and "No sandboxes with a process." in page


def test_findings_are_shown_before_held_sandboxes_and_text_of_an_engine_is_escaped(
    viewer: Client, lease: Lease, orphan: str, memory: MemoryProvider
) -> None:
    run(lease, "true")
    memory.create(SandboxSpec("by-hand", MARKUP))
    page, facts = fetch(viewer, PAGE), get_fields(viewer, PAGE)
    assert page.index(orphan) < page.index("did:plc:ada::game-1") and "<img" not in page
    assert (facts["Without an owner"].value, facts["Without an owner"].alarm) == ("2", True)
    assert facts["Sandboxes"].note == "1 held by leases" and "Destroy…" not in page
    memory.vanish(ensure_sandbox(lease).ref)
    assert get_fields(viewer, PAGE)["Missing at the engine"].value == "1"
    with memory.fail("list", Unavailable("out of order")):
        page, facts = fetch(viewer, PAGE), get_fields(viewer, PAGE)
    assert "out of order" in page and facts["Engines listed"].alarm
    assert facts["Missing at the engine"].note == "1 more not confirmed"


def test_operator_destroys_after_typing_the_name_and_adopts_with_a_reason(
    operator: Client, viewer: Client, lease: Lease, orphan: str, memory: MemoryProvider
) -> None:
    run(lease, "true")
    assert act_url("destroy", orphan).replace("&", "&amp;") in fetch(operator, PAGE)
    for act in ("destroy", "adopt"):
        assert viewer.get(act_url(act, orphan)).status_code == viewer.post(act_url(act, orphan)).status_code == 403
        assert "Recorded in the history" in fetch(operator, act_url(act, orphan))
    form = {"_form_submitted": "on", "reason": "it was agreed", "confirmed_name": "other"}
    refused = operator.post(act_url("destroy", orphan), form)
    assert "This is not the name of the sandbox." in refused.content.decode()
    held = ensure_sandbox(lease).name
    refused = operator.post(act_url("destroy", held), form | {"confirmed_name": held})
    assert "A row of this installation names the sandbox" in refused.content.decode()
    assert "not the id of a lease" in operator.post(act_url("adopt", orphan), form | {"lease": "x"}).content.decode()
    assert not LogEntry.objects.exists()
    adopted = operator.post(act_url("adopt", orphan), form | {"lease": str(lease.pk)})
    assert list_messages(adopted) == [f"{orphan} is adopted, in quarantine. Its files are a snapshot of the lease."]
    row = Sandbox.objects.get(quarantined_at__isnull=False)
    assert LogEntry.objects.get().object_id == str(row.pk)
    Sandbox.objects.filter(pk=row.pk).update(incarnation=2, ref="moved")
    destroyed = operator.post(act_url("destroy", orphan), form | {"confirmed_name": orphan})
    assert list_messages(destroyed)[-1:] == [f"{orphan} is destroyed."]
    assert LogEntry.objects.first().get_change_message() == f"Destroy without an owner: {orphan}: it was agreed"  # type: ignore[union-attr]
    assert {each.name for each in memory.list_all()} == {held}


def test_inventory_takes_a_bounded_number_of_queries(
    viewer: Client, grant: Callable[..., Lease], pool: Pool, django_assert_max_num_queries: Any
) -> None:
    for number in range(4):
        run(grant(agent=f"did:plc:a{number}"), "true")
    fetch(viewer, PAGE)
    with django_assert_max_num_queries(24):
        fetch(viewer, PAGE)
