"""Actions on leases and sandboxes: confirmation, one domain call, a message, and entries in both histories."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.messages import get_messages
from django.db.models import signals
from django.http import HttpResponse
from django.test import Client
from django.utils import timezone

from leases import api_keys, execution, leasing, sweeps
from leases.models import AgentKey, EnvironmentType, Lease
from sandboxes import destruction
from sandboxes.models import Pool, Sandbox, Transition, TransitionReason
from sandboxes.providers.base import Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.admin.conftest import NOW, ensure_sandbox
from tests.conftest import MINUTE

pytestmark = pytest.mark.django_db
WHY = {"_form_submitted": "on", "reason": "it mines coins"}


def list_messages(response: HttpResponse) -> list[str]:
    return [str(message) for message in get_messages(response.wsgi_request)]  # type: ignore[attr-defined]


def url(lease: Lease) -> str:
    return f"/admin/leases/lease/{lease.pk}/end_lease/"


def bulk(client: Client, page: str, action: str, pks: list[object], **more: str) -> HttpResponse:
    """Submit a bulk action as its confirmation page does."""
    chosen = {"action": action, "_selected_action": [str(pk) for pk in pks]}
    return client.post(f"/admin/{page}/", {**chosen, **more})  # type: ignore[return-value]


def state_of(sandbox: Sandbox) -> str:
    return Sandbox.objects.get(pk=sandbox.pk).state


# --- end a lease --------------------------------------------------------------------------------------------------


def test_an_operator_ends_a_lease_and_says_why(operator: Client, lease: Lease) -> None:
    sandbox = ensure_sandbox(lease)
    answer = operator.post(url(lease), WHY)
    assert answer.headers["HX-Redirect"] == f"/admin/leases/lease/{lease.pk}/change/"
    assert list_messages(answer) == ["1 lease ended."]
    lease.refresh_from_db()
    assert (lease.status, lease.end_reason, state_of(sandbox)) == ("expired", "operator", "destroying")
    event = lease.events.first()
    assert event
    assert (event.kind, event.actor, event.reason) == ("ended", "operator", "operator: it mines coins")
    assert LogEntry.objects.get(object_id=str(lease.pk)).get_change_message() == "End lease: it mines coins"
    assert b"End lease" not in operator.get(f"/admin/leases/lease/{lease.pk}/change/").content


@pytest.mark.parametrize("reason", ["", "x", "y" * 201])
def test_an_action_without_a_reason_changes_nothing(operator: Client, lease: Lease, reason: str) -> None:
    again = operator.post(url(lease), {**WHY, "reason": reason})
    assert again.status_code == 200
    assert "HX-Redirect" not in again.headers
    lease.refresh_from_db()
    assert lease.status == "active"


def test_ending_a_lease_that_has_just_ended_changes_nothing(operator: Client, lease: Lease) -> None:
    leasing.end(lease.pk, reason="released", now=NOW, actor="rival")
    assert list_messages(operator.post(url(lease), WHY)) == ["Nothing changed: no longer active."]
    lease.refresh_from_db()
    assert lease.end_reason == "released"
    assert lease.events.filter(kind="ended").count() == 1
    assert not LogEntry.objects.exists()


def test_a_get_changes_nothing_even_with_every_field(operator: Client, lease: Lease) -> None:
    assert b"Recorded in the history" in operator.get(url(lease), WHY).content
    lease.refresh_from_db()
    assert lease.status == "active"


def test_a_post_without_a_token_is_refused(as_role: Callable[..., Client], lease: Lease) -> None:
    assert as_role("Operator", enforce_csrf_checks=True).post(url(lease), WHY).status_code == 403
    lease.refresh_from_db()
    assert lease.status == "active"


def test_a_viewer_is_refused(viewer: Client, lease: Lease) -> None:
    assert viewer.post(url(lease), WHY).status_code == 403
    bulk(viewer, "leases/lease", "end_leases", [lease.pk], confirm="1", **WHY)
    lease.refresh_from_db()
    assert lease.status == "active"


@pytest.mark.parametrize("object_id", ["00000000-0000-0000-0000-000000000000", "no-id", "_5F"])
def test_an_action_on_a_missing_row_is_not_found(operator: Client, object_id: str) -> None:
    page = f"/admin/leases/lease/{object_id}/end_lease/"
    assert operator.get(page).status_code == 200  # the dialog opens, and is told when it is sent
    assert operator.post(page, WHY).status_code == 404


# --- bulk actions -------------------------------------------------------------------------------------------------


def test_ending_several_leases_asks_for_confirmation(operator: Client, grant: Callable[..., Lease]) -> None:
    leases = [grant(environment=f"game-{n}") for n in range(3)]
    page = bulk(operator, "leases/lease", "end_leases", [lease.pk for lease in leases])
    assert b"3 selected" in page.content
    assert b'name="confirm"' in page.content
    assert Lease.objects.filter(status="active").count() == 3


def test_leases_ended_in_the_meantime_are_counted_as_skipped(operator: Client, grant: Callable[..., Lease]) -> None:
    leases = [grant(environment=f"game-{n}") for n in range(3)]
    leasing.end(leases[0].pk, reason="released", now=NOW)
    done = bulk(operator, "leases/lease", "end_leases", [lease.pk for lease in leases], confirm="1", **WHY)
    assert list_messages(done) == ["2 leases ended. 1 skipped: no longer active."]
    assert LogEntry.objects.count() == 2
    assert set(Lease.objects.values_list("end_reason", flat=True)) == {"released", "operator"}


def test_every_row_of_a_table_cannot_be_chosen_at_once(operator: Client, grant: Callable[..., Lease]) -> None:
    leases = [grant(environment=f"game-{n}") for n in range(3)]
    bulk(operator, "leases/lease", "end_leases", [leases[0].pk], confirm="1", select_across="1", **WHY)
    assert Lease.objects.filter(status="active").count() == 2


@pytest.mark.parametrize("pk", ["no-id", "", "00000000", "9" * 40, "\x00", "' OR 1=1"])
def test_a_malformed_row_id_is_a_bad_request(operator: Client, administrator: Client, lease: Lease, pk: str) -> None:
    for client, page, action in (
        (operator, "leases/lease", "end_leases"),
        (operator, "sandboxes/sandbox", "evict_all"),
        (administrator, "leases/agentkey", "revoke_all"),
    ):
        for more in ({}, {"confirm": "1", **WHY}):
            assert bulk(client, page, action, [lease.pk, pk], **more).status_code == 400
    lease.refresh_from_db()
    assert lease.status == "active"


# --- destroy a sandbox --------------------------------------------------------------------------------------------


def destroy(sandbox: Sandbox) -> str:
    return f"/admin/sandboxes/sandbox/{sandbox.pk}/destroy_now/"


def test_destroying_a_held_sandbox_ends_its_lease(operator: Client, lease: Lease) -> None:
    sandbox = ensure_sandbox(lease)
    assert list_messages(operator.post(destroy(sandbox), WHY)) == ["1 sandbox being destroyed."]
    lease.refresh_from_db()
    assert (lease.status, lease.end_reason, state_of(sandbox)) == ("expired", "operator", "destroying")
    assert LogEntry.objects.get().object_id == str(sandbox.pk)


def test_destroying_an_unclaimed_sandbox_destroys_it_alone(operator: Client, lease: Lease) -> None:
    sandbox = ensure_sandbox(lease)
    Sandbox.objects.filter(pk=sandbox.pk).update(holder=None)
    operator.post(destroy(sandbox), WHY)
    last = Transition.objects.filter(sandbox=sandbox).first()
    assert last
    assert (last.to, last.reason, last.actor) == ("destroying", "operator: it mines coins", "operator")
    lease.refresh_from_db()
    assert lease.status == "active"


def test_destroying_an_already_destroyed_sandbox_does_not_end_its_former_lease(operator: Client, lease: Lease) -> None:
    old = ensure_sandbox(lease)
    destruction.schedule_destroy(old.pk, now=NOW, code=TransitionReason.OPERATOR)
    new = execution.ensure_sandbox_ready(lease.pk, now=NOW)
    assert list_messages(operator.post(destroy(old), WHY)) == ["Nothing changed: already being destroyed."]
    lease.refresh_from_db()
    assert (lease.status, state_of(new)) == ("active", "warm")


@pytest.fixture
def quarantined(lease: Lease, memory: MemoryProvider, settings) -> Sandbox:
    settings.DESTROY_TRIES = 1
    sandbox = ensure_sandbox(lease)
    with memory.fail("destroy", Unavailable("engine down")):
        leasing.end(lease.pk, reason="released", now=NOW)
        sweeps.reclaim(now=NOW)
    sandbox.refresh_from_db()
    assert sandbox.quarantined_at
    return sandbox


def test_a_retried_destroy_leaves_quarantine_and_the_next_sweep_destroys_it(operator: Client, quarantined: Sandbox) -> None:
    page = f"/admin/sandboxes/sandbox/{quarantined.pk}/"
    assert b"Retry destroy" in operator.get(f"{page}change/").content
    operator.post(f"{page}retry_destroy/", WHY)
    assert not Sandbox.objects.get(pk=quarantined.pk).quarantined_at
    sweeps.reclaim(now=timezone.now() + MINUTE)
    assert state_of(quarantined) == "destroyed"
    assert LogEntry.objects.get().get_change_message() == "Retry destroy: it mines coins"


def test_retry_is_for_quarantine_only(operator: Client, lease: Lease) -> None:
    sandbox = ensure_sandbox(lease)
    assert b"Retry destroy" not in operator.get(f"/admin/sandboxes/sandbox/{sandbox.pk}/change/").content.split(b"<main")[0]
    done = bulk(operator, "sandboxes/sandbox", "retry_all", [sandbox.pk], confirm="1", **WHY)
    assert list_messages(done) == ["1 skipped: not in quarantine."]


# --- keys ---------------------------------------------------------------------------------------------------------


def test_a_key_is_shown_once(administrator: Client) -> None:
    done = administrator.post("/admin/leases/agentkey/add/", {"name": "ci", "dids": "did:plc:ada\n\ndid:plc:bob"}, follow=True)
    row = AgentKey.objects.get()
    assert (row.name, row.dids, row.operator) == ("ci", ["did:plc:ada", "did:plc:bob"], False)
    key = next(word for word in done.content.decode().split() if word.startswith("lh_") and len(word) == 55)
    assert api_keys.find_active_key(key, now=NOW) == row
    for page in ("", f"{row.pk}/change/", f"{row.pk}/history/"):
        assert key not in administrator.get(f"/admin/leases/agentkey/{page}").content.decode()
    assert key not in str(LogEntry.objects.values_list("object_repr", "change_message"))


@pytest.mark.parametrize("dids", ["", "nonsense", "did:plc:ada\n<b>"])
def test_a_key_without_a_valid_agent_is_not_issued(administrator: Client, dids: str) -> None:
    assert administrator.post("/admin/leases/agentkey/add/", {"name": "", "dids": dids}).status_code == 200
    assert not AgentKey.objects.exists()


def test_a_revoked_key_is_refused_and_a_key_is_never_edited(administrator: Client, operator: Client) -> None:
    row, key = api_keys.issue_key(["did:plc:ada"], now=NOW)
    page = f"/admin/leases/agentkey/{row.pk}"
    assert operator.post(f"{page}/revoke/", WHY).status_code == 403
    assert administrator.post(f"{page}/change/", {"name": "mine", "dids": "did:plc:eve"}).status_code == 403
    assert list_messages(administrator.post(f"{page}/revoke/", WHY)) == ["1 API key revoked."]
    assert api_keys.find_active_key(key, now=NOW) is None


# --- editable fields ----------------------------------------------------------------------------------------------

POOL = {
    "capacity": 100, "warm_target": 0, "provider": "memory", "image": "", "memory_mib": 512, "millicpus": 1000, "pids": 256,
    "workspace_limit_mib": 2048,
}  # fmt: skip


def test_an_administrator_edits_a_pool_but_not_its_name_or_its_count(administrator: Client, pool: Pool) -> None:
    fields = POOL | {"capacity": 7, "memory_mib": 64}
    administrator.post(f"/admin/sandboxes/pool/{pool.pk}/change/", {**fields, "name": "other", "used": 99, "draining": "on"})
    after = Pool.objects.get(pk=pool.pk)
    assert (after.capacity, after.memory_mib, after.name, after.used, after.draining) == (7, 64, pool.name, 0, False)


def test_saving_a_pool_keeps_counters_that_changed_in_the_meantime(administrator: Client, pool: Pool) -> None:
    def meanwhile(instance: Pool, **signal: object) -> None:
        Pool.objects.filter(pk=instance.pk).update(used=5, draining=True)

    signals.pre_save.connect(meanwhile, sender=Pool)
    try:
        administrator.post(f"/admin/sandboxes/pool/{pool.pk}/change/", POOL | {"capacity": 7})
    finally:
        signals.pre_save.disconnect(meanwhile, sender=Pool)
    after = Pool.objects.get(pk=pool.pk)
    assert (after.capacity, after.used, after.draining) == (7, 5, True)


def test_an_environment_type_is_edited_as_durations_and_lines(administrator: Client) -> None:
    kind = EnvironmentType.objects.get(name="catan")
    page = f"/admin/leases/environmenttype/{kind.pk}/change/"
    shown = administrator.get(page).content.decode()
    assert 'value="4h"' in shown
    assert "game.finished</textarea>" in shown
    fields = {
        "ttl": "90m",
        "max_ttl": "2d",
        "expiry_conditions": "game.finished\nrain",
        "turn_argv": "python3\nplay.py",
    }
    assert administrator.post(page, {**fields, "sleep_after": "5m", "turn_timeout": "", "pool": ""}).status_code == 302
    kind.refresh_from_db()
    assert (kind.ttl, kind.max_ttl) == (timedelta(minutes=90), timedelta(days=2))
    assert (kind.expiry_conditions, kind.turn_argv) == (["game.finished", "rain"], ["python3", "play.py"])
    wrong = administrator.post(page, {**fields, "ttl": "soon", "sleep_after": "5m"})
    assert b"is not a duration" in wrong.content
