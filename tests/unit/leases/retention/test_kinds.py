"""Each kind of rows: kept until its retention and while something still needs it, deleted after it."""

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db.models import Model

from leases import leasing, sweeps
from leases.api_keys import issue_key
from leases.coding.models import CodingTask, Repository
from leases.environments.models import Environment, EnvironmentOutcome, Participant
from leases.models import AgentRun, AtprotoRecord, IdempotentRequest, Lease, LeaseEvent, Turn
from leases.retention.sweep import delete_expired
from sandboxes.models import (
    AgentData,
    AgentRoute,
    Attachment,
    DataEvent,
    EgressConnection,
    GatewayToken,
    Process,
    Sandbox,
    Snapshot,
)  # fmt: skip
from tests.conftest import MINUTE, NOW
from tests.support.leases import run

pytestmark = pytest.mark.django_db
Build = Callable[[Lease, Sandbox], Model]
AGENT = {"agent_did": "did:plc:ada"}


def build_record(lease: Lease, sandbox: Sandbox) -> AtprotoRecord:
    return AtprotoRecord.objects.create(
        lease=lease, collection="org.example.action", record_key="a", value_text="{}", status="created", uri="at://a",
        created_at=NOW, ended_at=NOW, give_up_at=NOW, **AGENT,
    )  # fmt: skip


def build_task(lease: Lease, sandbox: Sandbox) -> CodingTask:
    repository = Repository.objects.create(name="calc", clone_url="/srv/git/calc.git")
    return CodingTask.objects.create(
        environment_id=lease.environment_id, repository=repository, title="Fix add", base_branch="main", branch="leasehold/a",
        status="abandoned", created_at=NOW, ended_at=NOW,
    )  # fmt: skip


def build_process(lease: Lease, sandbox: Sandbox) -> Process:
    return Process.objects.create(
        sandbox=sandbox, holder=lease.pk, incarnation=1, argv=["sh"], cwd="/", started_at=NOW, starts_by=NOW, state="exited",
        ended_at=NOW, **AGENT,
    )  # fmt: skip


def build_snapshot(lease: Lease, sandbox: Sandbox) -> Snapshot:
    return Snapshot.objects.create(
        sandbox=sandbox, incarnation=1, holder=lease.pk, at=NOW, key="snapshots/a", size_bytes=1, forgotten_at=NOW, metered=True
    )


def build_attachment(lease: Lease, sandbox: Sandbox) -> Attachment:
    data, _ = AgentData.objects.get_or_create(agent_did="did:plc:ada", defaults={"created_at": NOW, "changed_at": NOW})
    return Attachment.objects.update_or_create(
        sandbox=sandbox, defaults={"incarnation": 1, "data": data, "holder": lease.pk}
    )[0]  # fmt: skip


# Kind -> its row, and changes after each of which the row has to stay.
HISTORY: dict[str, tuple[Build, list[dict[str, Any]]]] = {
    "processes": (
        build_process,
        [{"state": "running", "ended_at": None}, {"wake_pending": True}, {"restart_at": NOW}],
    ),
    "data incidents": (lambda lease, sandbox: DataEvent.objects.create(holder=lease.pk, at=NOW, kind="conflict", **AGENT), []),
    "AT Protocol records": (
        build_record,
        [{"status": "pending", "uri": "", "ended_at": None, "next_attempt_at": NOW}],
    ),
    "agent runs": (
        lambda lease, sandbox: AgentRun.objects.create(
            lease=lease, cli="codex", started_at=NOW, recorder_deadline=NOW, state="completed", ended_at=NOW
        ),
        [{"state": "running", "ended_at": None}],
    ),
    "turns": (
        lambda lease, sandbox: Turn.objects.create(lease=lease, number=1, started_at=NOW, deadline_at=NOW, ended_at=NOW),
        [{"ended_at": None}],
    ),
    "lease events": (lambda lease, sandbox: LeaseEvent.objects.create(lease=lease, at=NOW, kind="snapshot"), []),
    "leases": (lambda lease, sandbox: lease, [{"status": "expired", "destroyed_at": None}]),
    "coding tasks": (build_task, [{"status": "proposed", "head_commit": "c0ffee", "ended_at": None}]),
}  # fmt: skip


@pytest.fixture
def ended(grant: Callable[..., Lease]) -> tuple[Lease, Sandbox]:
    """A lease that ended now, with the sandbox that it had."""
    lease = grant()
    run(lease)
    leasing.release(lease.pk, now=NOW)
    sandbox = Sandbox.objects.get(holder=lease.pk)
    for _ in range(2):
        sweeps.reclaim(now=NOW)
    sweeps.destroy_cold(now=NOW + settings.KEEP_STATE)  # forgets the snapshot of the last state
    Environment.objects.update(ended_at=NOW, end_reason="unused")
    lease.refresh_from_db()
    assert lease.status == "destroyed"
    return lease, sandbox


def keep_history() -> timedelta:
    return settings.KEEP_HISTORY


def is_kept(row: Model) -> bool:
    return type(row)._base_manager.filter(pk=row.pk).exists()


@pytest.mark.parametrize("kind", HISTORY)
def test_history_is_kept_until_its_retention(kind: str, ended: tuple[Lease, Sandbox]) -> None:
    row = HISTORY[kind][0](*ended)
    assert f"{kind} deleted" not in delete_expired(now=NOW + keep_history() - MINUTE).counts and is_kept(row)
    assert delete_expired(now=NOW + keep_history() + MINUTE).counts[f"{kind} deleted"] >= 1 and not is_kept(row)


@pytest.mark.parametrize(("kind", "unsettled"), [(kind, each) for kind, (_, rows) in HISTORY.items() for each in rows])
def test_unsettled_history_is_kept(kind: str, unsettled: dict[str, Any], ended: tuple[Lease, Sandbox]) -> None:
    row = HISTORY[kind][0](*ended)
    type(row)._base_manager.filter(pk=row.pk).update(**unsettled)
    delete_expired(now=NOW + 10 * keep_history())
    assert is_kept(row)


@pytest.mark.parametrize("kind", [kind for kind in HISTORY if kind != "leases"])
def test_history_of_an_open_lease_is_kept(kind: str, grant: Callable[..., Lease]) -> None:
    lease = grant()
    run(lease)
    row = HISTORY[kind][0](lease, Sandbox.objects.get(holder=lease.pk))
    delete_expired(now=NOW + 10 * keep_history())
    assert is_kept(row) and is_kept(lease)


def test_a_lease_goes_with_its_history_in_one_pass_and_leaves_what_it_has_cost(ended: tuple[Lease, Sandbox]) -> None:
    for build, _ in HISTORY.values():
        build(*ended)
    environment = Environment.objects.get(pk=ended[0].environment_id)
    Participant.objects.get_or_create(environment=environment, agent_did="did:plc:bob", defaults={"added_at": NOW})
    EnvironmentOutcome.objects.create(environment=environment, ended_at=NOW, recorded_at=NOW, text="1")
    delete_expired(now=NOW + keep_history() + MINUTE)
    left = [
        model for model in (Lease, LeaseEvent, Turn, AgentRun, Process, Environment, Participant, EnvironmentOutcome)
        if model._base_manager.exists()
    ]  # fmt: skip
    assert left == [] and is_kept(ended[1])


def test_a_lease_with_a_stored_snapshot_is_kept_until_the_snapshot_is_forgotten(ended: tuple[Lease, Sandbox]) -> None:
    lease, sandbox = ended
    snapshot = build_snapshot(lease, sandbox)
    Snapshot.objects.filter(pk=snapshot.pk).update(forgotten_at=None)
    late = NOW + 10 * keep_history()
    delete_expired(now=late)
    assert is_kept(lease)
    Snapshot.objects.filter(pk=snapshot.pk).update(forgotten_at=late)
    delete_expired(now=late)
    assert not is_kept(lease)


def test_the_source_of_a_fork_is_kept_as_long_as_the_fork(ended: tuple[Lease, Sandbox], grant: Callable[..., Lease]) -> None:
    fork = grant("did:plc:bob", "game-2")
    Lease.objects.filter(pk=fork.pk).update(forked_from=ended[0])
    delete_expired(now=NOW + 10 * keep_history())
    assert is_kept(ended[0])
    leasing.release(fork.pk, now=NOW + MINUTE)
    sweeps.reclaim(now=NOW + MINUTE)
    sweeps.destroy_cold(now=NOW + 2 * settings.KEEP_STATE)
    delete_expired(now=NOW + keep_history() + 2 * MINUTE)
    assert not Lease.objects.exists()


def test_an_open_environment_and_one_with_a_lease_or_a_task_are_kept(
    ended: tuple[Lease, Sandbox], grant: Callable[..., Lease]
) -> None:
    grant("did:plc:bob", "game-2")
    open_one = Environment.objects.create(id="game-3", type_id="catan", created_at=NOW, started_at=NOW)
    with_task = build_task(*ended)
    CodingTask.objects.filter(pk=with_task.pk).update(status="open", ended_at=None)
    Environment.objects.filter(pk="game-2").update(ended_at=NOW, end_reason="operator")
    delete_expired(now=NOW + 10 * keep_history())
    assert {*Environment.objects.values_list("pk", flat=True)} == {"game-1", "game-2", open_one.pk}


@pytest.mark.parametrize(
    "build",
    [
        build_attachment,
        lambda lease, sandbox: GatewayToken.objects.create(sandbox=sandbox, incarnation=1, sha256="a" * 64, issued_at=NOW),
        lambda lease, sandbox: AgentRoute.objects.create(sandbox=sandbox, ref="a", number=1, opened_at=NOW, seen_at=NOW),
    ],
    ids=["attachment", "gateway token", "agent route"],
)
def test_rows_for_the_processes_of_a_sandbox_go_after_the_retention_of_its_state(
    build: Build, ended: tuple[Lease, Sandbox], grant: Callable[..., Lease]
) -> None:
    row = build(*ended)
    delete_expired(now=NOW + settings.KEEP_STATE - MINUTE)
    assert is_kept(row)
    delete_expired(now=NOW + settings.KEEP_STATE + MINUTE)
    assert not is_kept(row)
    live = grant("did:plc:bob", "game-2")
    run(live)
    Attachment.objects.all().delete()
    row = build(live, Sandbox.objects.get(holder=live.pk))
    delete_expired(now=NOW + 10 * keep_history())
    assert is_kept(row)


def test_unsaved_sync_state_is_kept(ended: tuple[Lease, Sandbox]) -> None:
    row = build_attachment(*ended)
    Attachment.objects.update(unsaved_since=NOW)
    delete_expired(now=NOW + 10 * keep_history())
    assert is_kept(row)


def test_an_idempotency_key_may_be_repeated_until_its_response_expires() -> None:
    key, _ = issue_key(["did:plc:ada"], now=NOW)
    row = IdempotentRequest.objects.create(
        key_holder=key, key="k", fingerprint="f", started_at=NOW, deadline_at=NOW, expires_at=NOW, status_code=200
    )
    delete_expired(now=NOW)
    assert is_kept(row)
    delete_expired(now=NOW + MINUTE)
    assert not is_kept(row)


def test_open_connections_are_kept(ended: tuple[Lease, Sandbox]) -> None:
    fields = {"sandbox": ended[1], "holder": ended[0].pk, "domain": "a", "port": 1, "started_at": NOW, "deadline_at": NOW}
    opened = EgressConnection.objects.create(connection_id=uuid.uuid4().hex, **fields)
    closed = EgressConnection.objects.create(connection_id=uuid.uuid4().hex, ended_at=NOW, outcome="ok", **fields)
    delete_expired(now=NOW + timedelta(days=29))
    assert is_kept(closed)
    delete_expired(now=NOW + timedelta(days=31))
    assert not is_kept(closed) and is_kept(opened)
