"""Roles: groups made by a migration bound what each page allows."""

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group
from django.test import Client, RequestFactory

from leases.models import Lease
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin
from tests.admin.conftest import ensure_sandbox

pytestmark = pytest.mark.django_db

VIEWS = {
    "billing": {
        "account", "budget", "costrecord", "credit", "membership", "rate", "statement", "statementline", "usagerecord",
    },
    "leases": {"agent", "agentkey", "environmenttype", "lease", "leaseevent", "turn"},
    "sandboxes": {
        "agentdata", "dataevent", "datafile", "delivery", "event", "llmcall", "mintedtoken", "modelrate", "policy", "pool",
        "process", "quota", "reading", "sandbox", "signingkey", "snapshot", "transition", "run", "sweep", "webhook",
    },
}  # fmt: skip
VIEWER = {f"{app}.view_{model}" for app, models in VIEWS.items() for model in models}
OPERATOR = VIEWER | {
    "leases.end_lease", "sandboxes.act_on_sandbox", "sandboxes.drain_pool", "sandboxes.read_agent_data",
    "sandboxes.send_webhook",
}  # fmt: skip
ADMINISTRATOR = OPERATOR | {
    "leases.add_agent", "leases.change_agent", "leases.add_agentkey", "leases.revoke_key",
    "leases.add_environmenttype", "leases.change_environmenttype", "sandboxes.add_pool", "sandboxes.change_pool",
    "sandboxes.add_quota", "sandboxes.change_quota", "sandboxes.add_policy", "sandboxes.change_policy",
    "sandboxes.manage_identity", "sandboxes.add_modelrate", "sandboxes.change_modelrate", "sandboxes.delete_modelrate",
    "billing.add_rate", "billing.change_rate", "billing.add_account", "billing.change_account", "billing.add_membership",
    "billing.change_membership", "billing.add_credit", "billing.close_statement", "billing.add_budget", "billing.change_budget",
    "sandboxes.manage_webhook",
}  # fmt: skip


@pytest.mark.parametrize(("role", "may"), [("Viewer", VIEWER), ("Operator", OPERATOR), ("Administrator", ADMINISTRATOR)])
def test_a_role_has_exactly_these_permissions(role: str, may: set[str]) -> None:
    held = Group.objects.get(name=role).permissions.values_list("content_type__app_label", "codename")
    assert {f"{app}.{codename}" for app, codename in held} == may


def test_a_viewer_opens_every_page_of_ours_and_is_offered_no_act(viewer: Client, lease: Lease) -> None:
    pages = (
        "leases/lease", "leases/agentkey", "sandboxes/sandbox", "sandboxes/pool", "sandboxes/quota", "sandboxes/sweep",
        "sandboxes/agentdata", "sandboxes/snapshot", "sandboxes/dataevent", "sandboxes/process", "sandboxes/policy",
        "sandboxes/reading", "sandboxes/signingkey", "sandboxes/mintedtoken", "sandboxes/modelrate", "sandboxes/llmcall",
        "billing/costrecord", "billing/usagerecord", "billing/rate", "billing/account", "billing/membership", "billing/credit",
        "billing/statement", "spending", "billing/budget", "sandboxes/webhook", "sandboxes/event", "sandboxes/delivery",
    )  # fmt: skip
    for page in pages:
        shown = viewer.get(f"/admin/{page}/")
        assert shown.status_code == 200
        assert b'name="_selected_action"' not in shown.content
        assert b"/add/" not in shown.content
    assert b"End lease" not in viewer.get(f"/admin/leases/lease/{lease.pk}/change/").content
    shown = viewer.get(f"/admin/sandboxes/sandbox/{ensure_sandbox(lease).pk}/change/").content
    assert b"Destroy now" not in shown
    assert "Evict…" not in shown.decode()
    shown = viewer.get(f"/admin/sandboxes/pool/{lease.pool_id}/change/").content
    assert "Drain…" not in shown.decode()
    assert b"Set one" not in shown
    assert b'name="_save"' not in shown


def test_the_menu_offers_only_permitted_pages(viewer: Client) -> None:
    menu = viewer.get("/admin/").content.decode()
    assert "/admin/sandboxes/run/" in menu
    assert "/admin/auth/user/" not in menu
    assert "/admin/django_q/" not in menu


def test_a_user_without_a_role_sees_no_number(as_role, lease: Lease) -> None:
    page = as_role("None").get("/admin/").content
    assert b"Your account has no role" in page
    assert b"Active leases" not in page


def test_facts_are_read_only_even_for_a_superuser(superuser: Client, lease: Lease) -> None:
    request = RequestFactory().get("/")
    facts = [page for page in admin.site._registry.values() if isinstance(page, ReadOnlyModelAdmin)]
    assert {page.model.__name__ for page in facts} == {
        "Lease", "Turn", "Sandbox", "Run", "Process", "Reading", "Sweep", "AgentData", "DataEvent", "Snapshot", "LlmCall",
        "MintedToken", "Event", "Delivery", "CostRecord", "UsageRecord", "Credit", "Statement",
    }  # fmt: skip
    for page in facts:
        assert not page.has_add_permission(request)
        assert not page.has_change_permission(request)
        assert not page.has_delete_permission(request)
    assert superuser.post(f"/admin/leases/lease/{lease.pk}/change/", {"status": "destroyed"}).status_code == 403
    assert superuser.get("/admin/leases/lease/add/").status_code == 403
    lease.refresh_from_db()
    assert lease.status == "active"


def test_schedules_are_read_only(superuser: Client) -> None:
    """A schedule names a function, so a user who can write schedules could run any function."""
    assert superuser.get("/admin/django_q/schedule/").status_code == 200
    assert superuser.post("/admin/django_q/schedule/add/", {"name": "x", "func": "os.system"}).status_code == 403
