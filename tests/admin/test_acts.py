"""Actions on leases and sandboxes: confirmation, one domain call, a message, and entries in both histories."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db.models import Model, signals
from django.test import Client
from django.utils import timezone

from leases import api_keys, execution, leasing, sweeps
from leases.models import Agent, AgentKey, EnvironmentType, Lease, LeaseEvent
from sandboxes import destruction
from sandboxes.errors import SandboxBusy
from sandboxes.models import Policy, Pool, Sandbox, Transition, TransitionReason
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.admin.conftest import ADA, NOW, ensure_sandbox, get_state
from tests.conftest import MINUTE
from tests.support.console import ENVIRONMENT_TYPE_FORM, WHY, fetch, get_fields, list_messages, list_rows, row_url, submit_bulk

pytestmark = pytest.mark.django_db


# --- end a lease --------------------------------------------------------------------------------------------------


def test_an_operator_ends_a_lease_and_says_why(operator: Client, lease: Lease) -> None:
    sandbox = ensure_sandbox(lease)
    for reason in ("x", "y" * 201):
        assert "HX-Redirect" not in operator.post(row_url(lease, "end_lease"), WHY | {"reason": reason}).headers
    answer = operator.post(row_url(lease, "end_lease"), WHY)
    assert answer.headers["HX-Redirect"] == row_url(lease)
    assert list_messages(answer) == ["1 lease ended."]
    lease.refresh_from_db()
    assert (lease.status, lease.end_reason, get_state(sandbox)) == ("expired", "operator", "destroying")
    event = lease.events.first()
    assert event
    assert (event.kind, event.actor, event.reason) == ("ended", "operator", "operator: it was agreed")
    assert LogEntry.objects.get().get_change_message() == "End lease: it was agreed"
    assert "End lease" not in fetch(operator, row_url(lease))
    assert list_messages(operator.post(row_url(lease, "end_lease"), WHY))[-1] == "Nothing changed: no longer active."
    assert (lease.events.filter(kind="ended").count(), LogEntry.objects.count()) == (1, 1)


# --- bulk actions -------------------------------------------------------------------------------------------------


def test_several_leases_end_after_a_confirmation(operator: Client, grant: Callable[..., Lease]) -> None:
    leases = [grant(environment=f"game-{n}") for n in range(4)]
    chosen = [lease.pk for lease in leases[:3]]
    page = submit_bulk(operator, "leases/lease/", "end_leases", chosen)
    assert b"3 selected" in page.content
    assert b'name="confirm"' in page.content
    assert Lease.objects.filter(status="active").count() == 4
    leasing.end(leases[0].pk, reason="released", now=NOW)
    done = submit_bulk(operator, "leases/lease/", "end_leases", chosen, confirm="1", select_across="1", **WHY)
    assert list_messages(done) == ["2 leases ended. 1 skipped: no longer active."]
    assert LogEntry.objects.count() == 2
    assert [lease.end_reason for lease in Lease.objects.order_by("environment_id")] == ["released", "operator", "operator", ""]


@pytest.mark.parametrize(
    ("error", "explanation"),
    [(SandboxBusy(), str(SandboxBusy())), (ZeroDivisionError("secret"), "internal error, see the log")],
)
def test_a_failing_row_leaves_the_log_entries_of_the_others(
    operator: Client, grant: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch, error: Exception, explanation: str
) -> None:
    leases = [grant(environment=f"game-{n}") for n in range(3)]
    end, calls = leasing.end, []

    def fail_second(pk: UUID, **fields: Any) -> bool:
        calls.append(pk)
        if len(calls) == 2:
            raise error
        return end(pk, **fields)

    monkeypatch.setattr(leasing, "end", fail_second)
    done = submit_bulk(operator, "leases/lease/", "end_leases", [lease.pk for lease in leases], confirm="1", **WHY)
    names = {lease.pk: str(lease) for lease in leases}
    first, second, third = (names[pk] for pk in calls)
    assert list_messages(done) == [f"2 leases ended: {first}, {third}. 1 failed: {second} ({explanation})."]
    assert {entry.object_id for entry in LogEntry.objects.all()} == {str(calls[0]), str(calls[2])}
    assert Lease.objects.get(status="active").pk == calls[1]


@pytest.mark.parametrize("pk", ["no-id", "", "00000000", "9" * 40, "\x00", "' OR 1=1"])
def test_a_malformed_row_id_is_a_bad_request(operator: Client, administrator: Client, lease: Lease, pk: str) -> None:
    for client, page, action in (
        (operator, "leases/lease/", "end_leases"),
        (operator, "sandboxes/sandbox/", "evict_all"),
        (administrator, "leases/agentkey/", "revoke_all"),
    ):
        for more in ({}, {"confirm": "1", **WHY}):
            assert submit_bulk(client, page, action, [lease.pk, pk], **more).status_code == 400
    lease.refresh_from_db()
    assert lease.status == "active"


# --- destroy a sandbox --------------------------------------------------------------------------------------------


def test_destroying_a_held_sandbox_ends_its_lease(operator: Client, lease: Lease) -> None:
    sandbox = ensure_sandbox(lease)
    assert list_messages(operator.post(row_url(sandbox, "destroy_now"), WHY)) == ["1 sandbox being destroyed."]
    lease.refresh_from_db()
    assert (lease.status, lease.end_reason, get_state(sandbox)) == ("expired", "operator", "destroying")
    assert LogEntry.objects.get().object_id == str(sandbox.pk)


def test_destroying_an_unclaimed_or_destroyed_sandbox_ends_no_lease(operator: Client, lease: Lease) -> None:
    old = ensure_sandbox(lease)
    destruction.schedule_destroy(old.pk, now=NOW, code=TransitionReason.OPERATOR)
    new = execution.ensure_sandbox_ready(lease.pk, now=NOW)
    answer = operator.post(row_url(old, "destroy_now"), WHY)
    assert list_messages(answer) == ["Nothing changed: already being destroyed."]
    assert get_state(new) == "warm"
    Sandbox.objects.filter(pk=new.pk).update(holder=None)
    operator.post(row_url(new, "destroy_now"), WHY)
    last = Transition.objects.filter(sandbox=new).first()
    assert last
    assert (last.to, last.reason, last.actor) == ("destroying", "operator: it was agreed", "operator")
    lease.refresh_from_db()
    assert lease.status == "active"


def test_a_sandbox_is_destroyed_without_storing_its_state(operator: Client, lease: Lease) -> None:
    sandbox = ensure_sandbox(lease)
    answer = operator.post(row_url(sandbox, "discard"), WHY)
    assert list_messages(answer) == ["1 sandbox being destroyed without storing its state."]
    recorded = Transition.objects.filter(sandbox=sandbox).first()
    assert recorded and (recorded.to, recorded.code, recorded.actor) == ("destroying", "discarded", "operator")
    assert LogEntry.objects.get().get_change_message() == "Discard unsaved state and destroy: it was agreed"
    assert row_url(sandbox, "discard") not in fetch(operator, row_url(sandbox))
    answer = operator.post(row_url(sandbox, "discard"), WHY)
    assert list_messages(answer) == ["Nothing changed: destroyed or discarded already."]


def test_a_retried_destroy_leaves_quarantine_and_the_next_sweep_destroys_it(
    operator: Client, lease: Lease, memory: MemoryProvider, settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DESTROY_TRIES = 1
    sandbox = ensure_sandbox(lease)
    done = submit_bulk(operator, "sandboxes/sandbox/", "retry_all", [sandbox.pk], confirm="1", **WHY)
    assert list_messages(done) == ["1 skipped: not in quarantine."]
    assert row_url(sandbox, "retry_destroy") not in fetch(operator, row_url(sandbox))
    with memory.fail("destroy", Unavailable("engine down")):
        leasing.end(lease.pk, reason="released", now=NOW)
        sweeps.reclaim(now=NOW)
    assert Sandbox.objects.get(pk=sandbox.pk).quarantined_at
    with caplog.at_level("INFO"):
        operator.post(row_url(sandbox, "retry_destroy"), WHY)
    assert any("destroy retried" in line and "'actor': 'operator'" in line for line in caplog.messages)
    assert not Sandbox.objects.get(pk=sandbox.pk).quarantined_at
    sweeps.reclaim(now=timezone.now() + MINUTE)
    assert get_state(sandbox) == "destroyed"
    assert LogEntry.objects.get().get_change_message() == "Retry destroy: it was agreed"


# --- keys ---------------------------------------------------------------------------------------------------------


def test_a_key_for_valid_agents_is_issued_and_shown_once(administrator: Client) -> None:
    for dids in ("", "nonsense", "did:plc:ada\n<b>"):
        assert (
            administrator.post("/admin/leases/agentkey/add/", {"name": "", "dids": dids, "scopes": "leases"}).status_code == 200
        )
    assert not AgentKey.objects.exists()
    form = {"name": "ci", "dids": "did:plc:ada\n\ndid:plc:bob", "scopes": ["read", "costs"]}
    past = {"expires_at_0": "2020-01-01", "expires_at_1": "00:00:00"}
    for wrong in ({"scopes": []}, {"scopes": ["all"]}, past):
        assert administrator.post("/admin/leases/agentkey/add/", form | wrong).status_code == 200
    assert not AgentKey.objects.exists()
    done = administrator.post("/admin/leases/agentkey/add/", form, follow=True)
    row = AgentKey.objects.get()
    assert (row.name, row.dids, row.operator, row.scopes) == ("ci", ["did:plc:ada", "did:plc:bob"], False, ["read", "costs"])
    key = next(word for word in done.content.decode().split() if word.startswith("lh_") and len(word) == 55)
    assert api_keys.find_active_key(key, now=NOW) == row
    for page in ("/admin/leases/agentkey/", row_url(row), row_url(row, "history")):
        assert key not in administrator.get(page).content.decode()
    assert key not in str(LogEntry.objects.values_list("object_repr", "change_message"))


def test_allow_lists_of_a_key_are_edited_and_its_agents_are_not(administrator: Client, pool: Pool) -> None:
    row, _ = api_keys.issue_key([ADA], name="ci", now=NOW)
    form = {
        "name": "ci", "dids": "did:plc:eve", "operator": "on", "scopes": "leases", "allowed_environment_types": "coding",
        "allowed_pools": "",
    }  # fmt: skip
    for field in ("allowed_environment_types", "allowed_pools"):
        page = administrator.post(row_url(row), form | {field: "none"})
        assert page.status_code == 200 and "There is no" in page.content.decode()
    assert administrator.post(row_url(row), form | {"allowed_pools": pool.name}).status_code == 302
    after = AgentKey.objects.get()
    assert (after.allowed_environment_types, after.allowed_pools) == (["coding"], [pool.name])
    assert (after.dids, after.operator, after.digest) == ([ADA], False, row.digest)
    assert get_fields(administrator, row_url(row))["Environment types"].value == "coding"
    api_keys.revoke_key(row, now=NOW)
    assert administrator.post(row_url(row), form).status_code == 403


def test_an_expired_key_is_shown_as_expired(administrator: Client) -> None:
    row, _ = api_keys.issue_key([ADA], expires_at=timezone.now() + 60 * MINUTE, now=NOW)
    assert get_fields(administrator, row_url(row))["State"].note == "expires in 59 m"
    assert row_url(row, "rotate") in fetch(administrator, row_url(row))
    AgentKey.objects.update(expires_at=timezone.now() - 60 * MINUTE)
    assert "expired" in get_fields(administrator, row_url(row))["State"].value
    assert row_url(row, "rotate") not in fetch(administrator, row_url(row))
    assert row not in list_rows(administrator, "/admin/leases/agentkey/")
    assert row in list_rows(administrator, "/admin/leases/agentkey/?slice=history")
    assert ">expired<" in fetch(administrator, row_url(Agent.objects.get(did=ADA)))


def test_a_rotated_key_is_shown_once_and_logged(administrator: Client) -> None:
    row, old = api_keys.issue_key([ADA], now=NOW)
    assert 'value="1d"' in administrator.get(row_url(row, "rotate")).content.decode()
    done = administrator.post(row_url(row, "rotate"), WHY | {"overlap": "1h"})
    [shown] = [message for message in list_messages(done) if message.startswith("Copy")]
    new = shown.split()[-1]
    assert [api_keys.find_active_key(key, now=timezone.now()) for key in (old, new)] == [row, row]
    entry = LogEntry.objects.get()
    assert entry.get_change_message() == "Rotate key: it was agreed"
    assert [new in fetch(administrator, row_url(row)) for _ in range(2)] == [True, False]
    assert get_fields(administrator, row_url(row))["Rotated"].note.startswith("previous secret expires in")
    again = administrator.post(row_url(row, "rotate"), WHY | {"overlap": "1h"})
    assert "previous secret is accepted until" in again.content.decode()
    administrator.post(row_url(row, "rotate"), WHY | {"overlap": "0"})
    assert api_keys.find_active_key(old, now=timezone.now()) is None


def test_a_revoked_key_is_refused(administrator: Client) -> None:
    row, key = api_keys.issue_key([ADA], now=NOW)
    assert list_messages(administrator.post(row_url(row, "revoke"), WHY)) == ["1 API key revoked."]
    assert api_keys.find_active_key(key, now=NOW) is None


def test_leases_of_a_revoked_key_end_if_the_operator_says_so(administrator: Client, grant: Callable[..., Lease]) -> None:
    row, _ = api_keys.issue_key([ADA], now=NOW)
    kept, ended = grant(), grant(environment="game-2")
    LeaseEvent.objects.filter(lease=ended, kind="granted").update(actor=f"key {row.prefix}")
    administrator.post(row_url(row, "revoke"), WHY | {"end_leases": "on"})
    assert {*Lease.objects.values_list("pk", "status", "end_detail")} == {
        (kept.pk, "active", ""), (ended.pk, "expired", f"API key {row.prefix} revoked: {WHY['reason']}"),
    }  # fmt: skip


def test_end_of_leases_needs_its_permission(as_role: Callable[..., Client], lease: Lease) -> None:
    row, _ = api_keys.issue_key([ADA], now=NOW)
    LeaseEvent.objects.filter(kind="granted").update(actor=f"key {row.prefix}")
    client = as_role("Viewer")
    User.objects.get().user_permissions.add(Permission.objects.get(codename="revoke_key"))
    page = client.post(row_url(row, "revoke"), WHY | {"end_leases": "on"})
    assert "may not end leases" in page.content.decode()
    assert (AgentKey.objects.get().revoked_at, Lease.objects.get().status) == (None, "active")


# --- editable fields ----------------------------------------------------------------------------------------------


def test_an_administrator_edits_a_pool_but_not_its_name_or_its_counters(administrator: Client, pool: Pool) -> None:
    form = {
        "capacity": 7, "warm_target": 0, "provider": "memory", "image": "", "memory_mib": 64, "millicpus": 1000, "pids": 256,
        "workspace_limit_mib": 2048, "name": "other", "used": 99,
    }  # fmt: skip

    def meanwhile(instance: Pool, **signal: object) -> None:
        Pool.objects.filter(pk=instance.pk).update(used=5, draining=True)

    signals.pre_save.connect(meanwhile, sender=Pool)
    try:
        administrator.post(row_url(pool), form)
    finally:
        signals.pre_save.disconnect(meanwhile, sender=Pool)
    after = Pool.objects.get(pk=pool.pk)
    assert (after.capacity, after.memory_mib, after.name, after.used, after.draining) == (7, 64, pool.name, 5, True)


def test_an_environment_type_is_edited_as_durations_lines_and_amounts(
    administrator: Client, lease: Lease, grant: Callable[..., Lease]
) -> None:
    kind, policy = EnvironmentType.objects.get(name="catan"), Policy.objects.create(name="relaying", relay=True)
    page, form = row_url(kind), ENVIRONMENT_TYPE_FORM
    shown = fetch(administrator, page)
    assert 'value="4h"' in shown
    assert "game.finished</textarea>" in shown
    assert get_fields(administrator, page)["Spend limit"].value == "no limit"
    changes = {
        "ttl": "90m", "max_ttl": "2d", "expiry_conditions": "game.finished\nrain", "turn_argv": "python3\nplay.py",
        "snapshot_excludes": "node_modules\n*.pyc\n\n", "policy": policy.pk, "llm_limit": "2.50", "llm_token_limit": "70000",
    }  # fmt: skip
    assert administrator.post(page, form | changes).status_code == 302
    kind.refresh_from_db()
    assert (kind.ttl, kind.max_ttl, kind.policy) == (timedelta(minutes=90), timedelta(days=2), policy)
    assert (kind.expiry_conditions, kind.turn_argv) == (["game.finished", "rain"], ["python3", "play.py"])
    assert kind.snapshot_excludes == ["node_modules", "*.pyc"]
    shown, listed = fetch(administrator, page), fetch(administrator, "/admin/leases/environmenttype/")
    assert "node_modules\n*.pyc</textarea>" in shown
    assert 'value="2.5"' in shown and "Those of an existing lease" in shown
    assert "2.5 USD" in listed and "70,000 tokens" in listed and "relaying" in listed
    assert get_fields(administrator, page)["Spend limit"].value == "2.5 USD"
    lease.refresh_from_db()
    assert (lease.llm_limit, grant(environment="next").llm_limit) == (None, kind.llm_limit)
    assert administrator.post(page, form | {"llm_limit": "", "llm_token_limit": ""}).status_code == 302
    assert grant(environment="third").llm_limit is None


LIMITS = {
    "max_memory_mib": 4096, "max_millicpus": 2000, "max_disk_mib": 20_480, "max_gpus": 0, "allowed_images": "a:1\nb:1",
    "allowed_sizes": "basic", "allowed_gpu_types": "H100",
}  # fmt: skip


@pytest.mark.parametrize("model", [AgentKey, EnvironmentType, Pool])
def test_limits_of_resources_are_edited_on_each_level(administrator: Client, pool: Pool, model: type[Model]) -> None:
    key, _ = api_keys.issue_key([ADA], now=NOW)
    pool_form = {
        "capacity": 7, "warm_target": 0, "provider": "memory", "memory_mib": 64, "millicpus": 1000, "pids": 256,
        "workspace_limit_mib": 2048,
    }  # fmt: skip
    row, form = {
        AgentKey: (key, {"name": "ci", "scopes": "leases"}),
        EnvironmentType: (EnvironmentType.objects.get(name="catan"), ENVIRONMENT_TYPE_FORM),
        Pool: (pool, pool_form),
    }[model]
    wrong = administrator.post(row_url(row), form | LIMITS | {"allowed_gpu_types": "h100"})
    assert "in capitals" in str(wrong.context["adminform"].form.errors["allowed_gpu_types"])
    assert administrator.post(row_url(row), form | LIMITS).status_code == 302
    row.refresh_from_db()
    lists = {"allowed_images": ["a:1", "b:1"], "allowed_sizes": ["basic"], "allowed_gpu_types": ["H100"]}
    assert {name: getattr(row, name) for name in LIMITS} == LIMITS | lists


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("ttl", "soon", "is not a duration"), ("snapshot_excludes", "x\n" * 65, "at most 64"),
        ("llm_limit", "-0.01", "greater than"), ("llm_limit", "1e-10", "decimal places"),
        ("llm_limit", "NaN", "Enter a number"), ("llm_limit", "five", "Enter a number"),
    ],
)  # fmt: skip
def test_an_invalid_field_of_an_environment_type_is_explained(administrator: Client, field: str, value: str, why: str) -> None:
    kind, before = EnvironmentType.objects.get(name="catan"), EnvironmentType.objects.values().get(name="catan")
    answer = administrator.post(row_url(kind), ENVIRONMENT_TYPE_FORM | {field: value})
    assert why in str(answer.context["adminform"].form.errors[field])
    assert EnvironmentType.objects.values().get(name="catan") == before
