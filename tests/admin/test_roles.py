"""Roles: groups made by a migration bound what each page allows."""

from collections.abc import Callable
from decimal import Decimal
from itertools import product
from uuid import UUID, uuid4

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group
from django.db.models import Model
from django.test import Client, RequestFactory
from django.utils import timezone
from django_q.models import OrmQ

from billing import statements
from billing.admin.usage import get_previous_month
from billing.dates import start_of_day
from billing.models import Account, Credit
from leases import api_keys, snapshots
from leases.atproto.accounts import set_account
from leases.atproto.models import AtprotoRecord
from leases.coding import repositories
from leases.coding import tasks as coding_tasks
from leases.environments import lifecycle
from leases.models import Agent, AgentRun, Lease, LeaseEvent, QueuedRun
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin
from sandboxes.egress.allow_list import credentials
from sandboxes.identity import signing
from sandboxes.models import Delivery, Host, ImageTemplate, Policy, Pool, Process, Quota, Sandbox, Snapshot
from sandboxes.models.policies import SEALED_POLICY_NAME
from sandboxes.webhooks import outbox, subscriptions
from tests.admin.conftest import ADA, NOW, ensure_sandbox, run
from tests.support.actors import console_user
from tests.support.billing import (
    BOB,
    HOUR,
    advance_and_price,
    close_month,
    create_budget,
    create_rate,
    create_time_usage,
    join_account,
)
from tests.support.console import WHY, fetch, row_url, submit_bulk
from tests.support.model_rates import create_rates

pytestmark = pytest.mark.django_db

VIEWS = {
    "billing": {
        "account", "budget", "costrecord", "credit", "membership", "rate", "statement", "statementline", "usagerecord",
    },
    "leases": {
        "agent", "agentkey", "agentrun", "atprotoaccount", "atprotorecord", "catalogagent", "codingtask", "environment",
        "environmenttype", "lease", "leaseevent", "project", "queuedrun", "repository", "turn",
    },
    "sandboxes": {
        "agentdata", "dataevent", "datafile", "delivery", "egressconnection", "event", "host", "imagetemplate", "llmcall",
        "mintedtoken", "packversion",
        "modelrate", "tokenrate", "operatoraction",
        "policy", "pool", "process", "quota", "reading", "sandbox", "signingkey", "snapshot", "transition", "run",
        "sweep", "webhook",
    },
}  # fmt: skip
VIEWER = {f"{app}.view_{model}" for app, models in VIEWS.items() for model in models}
OPERATOR = VIEWER | {
    "leases.end_lease", "leases.interrupt_run", "leases.manage_environment", "leases.manage_atprotorecord",
    "leases.enable_repository", "leases.grant_lease",
    "sandboxes.act_on_sandbox",
    "sandboxes.declare_host_lost", "sandboxes.manage_imagetemplate",
    "sandboxes.drain_pool", "sandboxes.open_terminal", "sandboxes.read_agent_data", "sandboxes.send_webhook",
}  # fmt: skip
ADMINISTRATOR = OPERATOR | {
    "leases.add_agent", "leases.change_agent", "leases.add_agentkey", "leases.change_agentkey", "leases.revoke_key",
    "leases.add_project", "leases.add_repository", "leases.change_repository",
    "leases.add_catalogagent", "leases.change_catalogagent",
    "leases.add_environmenttype", "leases.change_environmenttype", "sandboxes.add_pool", "sandboxes.change_pool",
    "sandboxes.change_host",
    "sandboxes.add_quota", "sandboxes.change_quota", "sandboxes.add_policy", "sandboxes.change_policy",
    "sandboxes.manage_identity", "sandboxes.add_tokenrate", "sandboxes.change_tokenrate",
    # Of the version before.
    "sandboxes.add_modelrate", "sandboxes.change_modelrate", "sandboxes.delete_modelrate",
    "billing.add_rate", "billing.change_rate", "billing.add_account", "billing.change_account", "billing.add_membership",
    "billing.change_membership", "billing.add_credit", "billing.close_statement", "billing.add_budget", "billing.change_budget",
    "sandboxes.manage_webhook",
}  # fmt: skip


@pytest.mark.parametrize(("role", "may"), [("Viewer", VIEWER), ("Operator", OPERATOR), ("Administrator", ADMINISTRATOR)])
def test_a_role_has_exactly_these_permissions(role: str, may: set[str]) -> None:
    held = Group.objects.get(name=role).permissions.values_list("content_type__app_label", "codename")
    assert {f"{app}.{codename}" for app, codename in held} == may


def test_every_page_of_ours_has_a_role_and_a_menu_entry(viewer: Client) -> None:
    pages = [page.opts for page in admin.site._registry.values() if page.opts.app_label in VIEWS]
    assert {f"{opts.app_label}.view_{opts.model_name}" for opts in pages} <= VIEWER
    menu = fetch(viewer, "/admin/")
    missing = [opts.label for opts in pages if f'"/admin/{opts.app_label}/{opts.model_name}/"' not in menu]
    assert missing == []


OPERATOR_ACTIONS = {
    "lease": {"end_lease", "limit_calls"}, "cold": {"wake"},
    "sandbox": {"evict", "restart", "take_snapshot", "destroy_now", "discard", "open_terminal"}, "process": {"connect"},
    "broken": {"retry_destroy", "discard"}, "snapshot": {"restore", "fork"}, "pool": {"drain"}, "host": {"declare_lost"},
    "paused_host": {"resume_starts"},
    "drained": {"resume", "warm_again"}, "webhook": {"send_test", "pause"}, "paused": {"resume"}, "delivery": {"again"},
    "agent_run": {"interrupt"}, "queued_run": {"interrupt"}, "repository": {"disable"}, "disabled_repository": {"enable"},
    "environment": {"grant_lease", "start", "set_phase", "restrict", "issue_secret", "stop", "end"},
    "task": {"participants", "open_to_project"}, "agent": {"stop"},
    "record": {"repeat"}, "template": {"rebuild", "remove"},
}  # fmt: skip
ADMINISTRATOR_ACTIONS = {
    "policy": {"remove_credential"},
    "key": {"rotate", "revoke"}, "signing_key": {"rotate", "revoke"}, "webhook": {"rotate", "remove"},
    "budget": {"turn_off", "top_up"},
    "unused": {"turn_on"}, "account": {"grant_credit", "close_month"}, "credit": {"take_back"}, "rate": {"withdraw"},
    "model_rate": {"withdraw"},
}  # fmt: skip
READ_ONLY_ROWS = {
    "coding_task",
    "environment",
    "record",
    "template",
    "account_at_server",
    "process",
    "agent_run",
    "queued_run",
    "lease",
    "sandbox",
    "snapshot",
    "delivery",
    "signing_key",
    "credit",
    "statement",
    "begun",
    "model_rate",
    "sealed",
}


@pytest.fixture
def rows(lease: Lease, grant: Callable[..., Lease]) -> dict[str, Model]:
    """Rows by name, each in a state in which its actions are legal."""
    now, month = timezone.now(), get_previous_month(timezone.now())
    run(lease, "true")
    cold, broken = (ensure_sandbox(grant(environment=name)) for name in ("cold", "broken"))
    Sandbox.objects.filter(pk=cold.pk).update(state="cold")
    Sandbox.objects.filter(pk=broken.pk).update(state="destroying", quarantined_at=NOW, deadline_at=NOW)
    webhook, paused = (subscriptions.add_webhook("https://10.0.0.1/", now=NOW, internal=True)[0] for _ in range(2))
    policy = Policy.objects.create(name="relaying", allowed_domains=["git.example.org"])
    credentials.set_credential(policy, "git.example.org", "Bearer secret", now=NOW)
    repository, _ = repositories.save("calc", clone_url="/srv/git/calc.git", now=NOW)
    outbox.enqueue_event("lease.ended", key="1", payload={}, now=NOW)
    Delivery.objects.update(due_at=None, given_up_at=NOW)
    subscriptions.pause_webhook(paused, now=timezone.now(), actor=console_user())
    account, other = Account.objects.get(name="house"), Account.objects.create(name="other")
    begun = create_rate("time", "0.25")
    create_time_usage(start_of_day(month), HOUR, provider="acme")
    advance_and_price(now)
    return {
        "lease": lease, "sandbox": ensure_sandbox(lease), "cold": cold, "broken": broken, "webhook": webhook, "paused": paused,
        "snapshot": snapshots.take_snapshot(lease.pk, now=NOW), "delivery": webhook.deliveries.get(), "pool": lease.pool,
        "host": ensure_sandbox(lease).host,
        "template": ImageTemplate.objects.create(
            host=ensure_sandbox(lease).host, name="tools", version="0" * 64, base="a", commands=["b"], state="ready", image="c",
            size_bytes=1,
        ),
        "paused_host": Host.objects.create(
            pk=uuid4(), provider="memory", engine_id="other", name="other", created_at=now, starts_paused_until=now + HOUR
        ),
        "drained": Pool.objects.create(name="old", draining=True, warm_target=1, warm_paused_until=now + HOUR),
        "key": api_keys.issue_key([ADA], now=NOW)[0], "signing_key": signing.create_key(ADA, now=NOW),
        "budget": create_budget(), "unused": create_budget(active=False), "account": account,
        "credit": statements.grant_credit(account, Decimal(1), now=NOW, actor="eve", reason="for a start"),
        "rate": create_rate("time", "1", since=f"{now + 48 * HOUR:%Y-%m-%d}"), "begun": begun,
        "statement": close_month(other, month, now=now), "membership": join_account(other, agent=BOB),
        "model_rate": create_rates("m", input=1, since=now + 48 * HOUR)[0],
        "policy": policy, "sealed": Policy.objects.get(name=SEALED_POLICY_NAME),
        "type": lease.environment_type,
        "environment": lifecycle.create(lifecycle.NewEnvironment("new-game", "catan"), now=NOW)[0],
        "task": lifecycle.create(lifecycle.NewEnvironment("task-1", "coding"), now=NOW)[0],
        "repository": repository, "agent": Agent.objects.get(did=ADA),
        "disabled_repository": repositories.save("old", clone_url="/srv/git/old.git", enabled=False, now=NOW)[0],
        "coding_task": coding_tasks.create("task-2", repository="calc", title="Fix add", now=NOW)[0],
        "agent_run": AgentRun.objects.create(lease=lease, cli="codex", started_at=NOW, recorder_deadline=NOW),
        "queued_run": QueuedRun.objects.create(
            agent_did=ADA, lease=lease, pool=lease.pool, request={"kind": "exec", "argv": ["true"]}, queued_at=NOW,
            available_at=NOW, expires_at=NOW + HOUR,
        ),
        "record": AtprotoRecord.objects.create(
            lease=lease, agent_did=ADA, collection="org.example.action", record_key="a", value_text="{}", status="failed",
            created_at=NOW, ended_at=NOW, give_up_at=NOW,
        ),
        "account_at_server": set_account(ADA, service_url="https://pds.example", service_did="did:web:pds.example", now=NOW)[0],
        "process": Process.objects.create(
            sandbox=ensure_sandbox(lease), holder=lease.pk, agent_did=ADA, incarnation=1, argv=["sh"], cwd="/", started_at=NOW,
            starts_by=NOW, is_terminal=True,
        ),
        "quota": Quota.objects.update_or_create(pool=lease.pool, agent_did=ADA, defaults={"most": 4})[0],
    }  # fmt: skip


def list_values(rows: dict[str, Model]) -> list[dict[str, object]]:
    return [type(row).objects.filter(pk=row.pk).values().get() for row in rows.values()]


@pytest.mark.parametrize("role", ["Viewer", "Operator"])
def test_only_administrators_add_and_edit_rows(as_role: Callable[..., Client], rows: dict[str, Model], role: str) -> None:
    client, before = as_role(role), list_values(rows)
    for page in admin.site._registry.values():
        if page.opts.app_label in VIEWS:
            assert client.post(f"/admin/{page.opts.app_label}/{page.opts.model_name}/add/").status_code == 403, page
    for name, row in rows.items():
        assert 'name="_save"' not in fetch(client, row_url(row)), name
        assert client.post(row_url(row), {"amount": "99"}).status_code == 403, name
    assert list_values(rows) == before


def test_rows_are_not_deleted_and_facts_are_not_edited(superuser: Client, rows: dict[str, Model]) -> None:
    before = list_values(rows)
    for name, row in rows.items():
        assert superuser.post(row_url(row, "delete"), {"post": "yes"}).status_code == 403, name
        if name in READ_ONLY_ROWS:
            assert 'name="_save"' not in fetch(superuser, row_url(row)), name
            fields = {"status": "destroyed", "usd": "9", "agent_did": "did:plc:bob", "name": "mine", "dids": "did:plc:eve"}
            assert superuser.post(row_url(row), fields).status_code == 403, name
    assert list_values(rows) == before


def test_every_action_needs_its_role_a_token_a_post_and_a_reason(
    as_role: Callable[..., Client], rows: dict[str, Model]
) -> None:
    declared = {(page.model, name) for page in admin.site._registry.values() for name in getattr(page, "row_actions", {})}
    tables = {"Operator": OPERATOR_ACTIONS, "Administrator": ADMINISTRATOR_ACTIONS}
    assert declared == {(type(rows[row]), act) for table in tables.values() for row, acts in table.items() for act in acts}
    month = f"{get_previous_month(timezone.now()):%Y-%m-%d}"
    fields = {
        **WHY, "usd": "5", "limit": "5", "month": month, "environment": "game-2", "phase": "x", "agent_did": BOB,
        "domain": "git.example.org",
    }  # fmt: skip
    before = list_values(rows)
    OrmQ.objects.all().delete()
    refused = {"Operator": ["Viewer"], "Administrator": ["Viewer", "Operator"]}
    for role, table in tables.items():
        allowed, forged, others = as_role(role), as_role(role, enforce_csrf_checks=True), [*map(as_role, refused[role])]
        for row, acts in [(rows[name], acts) for name, acts in table.items()]:
            shown, hidden = fetch(allowed, row_url(row)), [fetch(client, row_url(row)) for client in others]
            for act in acts:
                url = row_url(row, act)
                assert url in shown and not any(url in page for page in hidden), url
                assert "Recorded in the history" in allowed.get(url, fields).content.decode(), url
                again = allowed.post(url, fields | {"reason": ""})
                assert again.status_code == 200 and "HX-Redirect" not in again.headers, url
                assert {client.post(url, fields).status_code for client in (forged, *others)} == {403}, url
    for row in rows.values():
        listing = row_url(row).removesuffix(f"{row.pk}/change/")
        for act in getattr(admin.site._registry[type(row)], "bulk_actions", {}):
            submit_bulk(as_role("Viewer"), listing, act, [row.pk], confirm="1", **WHY)
    assert list_values(rows) == before
    assert not LogEntry.objects.exists() and not LeaseEvent.objects.exclude(kind__in=["granted", "snapshot"]).exists()
    assert (OrmQ.objects.count(), Lease.objects.count(), Snapshot.objects.count(), Credit.objects.count()) == (0, 3, 1, 1)


def test_an_action_on_a_missing_row_is_not_found(superuser: Client) -> None:
    fields = {**WHY, "usd": "5", "limit": "5", "environment": "game-2", "overlap": "1h", "add": ADA, "agent_did": ADA}
    fields |= {"amount": "5", "request_id": str(UUID(int=1))}
    acts = [(page.model, name) for page in admin.site._registry.values() for name in getattr(page, "row_actions", {})]
    for (model, name), pk in product(acts, [str(UUID(int=0)), "no-id", "_5F", "999", "9" * 40, "-1", "%00"]):
        url = f"/admin/{model._meta.label_lower.replace('.', '/')}/{pk}/{name}/"
        assert superuser.get(url).status_code == 200, url  # the dialog opens
        answer = superuser.post(url, fields)
        # Their choices are those of the row.
        has_no_choice = name in ("close_month", "remove_credential") and answer.status_code == 200
        assert answer.status_code == 404 or (has_no_choice and "HX-Redirect" not in answer.headers), url


def test_a_viewer_opens_every_page_of_ours_and_is_offered_no_act(viewer: Client, lease: Lease) -> None:
    pages = (
        "leases/lease", "leases/agentkey", "sandboxes/sandbox", "sandboxes/pool", "sandboxes/quota", "sandboxes/sweep",
        "sandboxes/operatoraction",
        "sandboxes/agentdata", "sandboxes/snapshot", "sandboxes/dataevent", "sandboxes/process", "sandboxes/policy",
        "sandboxes/reading", "sandboxes/signingkey", "sandboxes/mintedtoken", "sandboxes/tokenrate", "sandboxes/llmcall",
        "sandboxes/egressconnection", "leases/atprotoaccount", "leases/atprotorecord",
        "billing/costrecord", "billing/usagerecord", "billing/rate", "billing/account", "billing/membership", "billing/credit",
        "billing/statement", "spending", "billing/budget", "sandboxes/webhook", "sandboxes/event", "sandboxes/delivery",
        "inventory", "leases/environment", "leases/codingtask", "leases/repository", "leases/catalogagent",
        "sandboxes/packversion",
    )  # fmt: skip
    for page in pages:
        shown = fetch(viewer, f"/admin/{page}/")
        assert 'name="_selected_action"' not in shown
        assert "/add/" not in shown
    assert "Set one" not in fetch(viewer, row_url(lease.pool))


def test_the_menu_offers_only_permitted_pages(viewer: Client) -> None:
    menu = viewer.get("/admin/").content.decode()
    assert "/admin/sandboxes/run/" in menu
    assert "/admin/auth/user/" not in menu
    assert "/admin/django_q/" not in menu


def test_a_user_without_a_role_sees_no_number(as_role, lease: Lease) -> None:
    page = as_role("None").get("/admin/").content
    assert b"Your account has no role" in page
    assert b"Active leases" not in page


def test_facts_are_read_only_even_for_a_superuser() -> None:
    request = RequestFactory().get("/")
    facts = [page for page in admin.site._registry.values() if isinstance(page, ReadOnlyModelAdmin)]
    assert {page.model.__name__ for page in facts} == {
        "Lease", "Turn", "Sandbox", "Run", "Process", "Reading", "Sweep", "AgentData", "DataEvent", "Snapshot", "LlmCall",
        "EgressConnection", "AtprotoAccount", "AtprotoRecord", "OperatorAction",
        "MintedToken", "Event", "Delivery", "CostRecord", "UsageRecord", "Credit", "Statement", "AgentRun", "QueuedRun",
            "PackVersion", "ImageTemplate",
        "Environment", "CodingTask",
    }  # fmt: skip
    for page in facts:
        assert not page.has_add_permission(request)
        assert not page.has_change_permission(request)
        assert not page.has_delete_permission(request)


def test_schedules_are_read_only(superuser: Client) -> None:
    """A schedule names a function, so a user who can write schedules could run any function."""
    assert superuser.get("/admin/django_q/schedule/").status_code == 200
    assert superuser.post("/admin/django_q/schedule/add/", {"name": "x", "func": "os.system"}).status_code == 403
