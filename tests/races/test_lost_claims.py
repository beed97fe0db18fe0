"""Claims whose own answer the database loses: each ends as soon as the database responds, not at its deadline.

The process that made the claim does not know of the claim, and does nothing under it. COLUMNS names every column of a claim,
and the work of the test that writes the column, or the reason for which a lost answer blocks no work."""

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.apps import apps
from django.db import OperationalError
from django.db.models import DateTimeField, UUIDField

from leases import sweeps
from leases.models import Lease
from sandboxes import claims
from sandboxes.db.connection_errors import RetriesExhausted
from sandboxes.errors import SandboxError
from sandboxes.models import Pool
from sandboxes.providers.memory import MemoryProvider
from tests.conftest import MINUTE
from tests.support.claimed_work import IDLE, Context, installation_work, lease_work, sandbox_work
from tests.support.leases import assert_converged
from tests.support.outages import LostAnswer, injected
from tests.support.suites import TEST_PROVIDER

pytestmark = pytest.mark.django_db(transaction=True)
WORK = sandbox_work.WORK | lease_work.WORK | installation_work.WORK
EXPECTED_ERRORS = (OperationalError, RetriesExhausted, SandboxError)
ON_VENDORS = {"start", "wake", "sleep", "idle sweep", "suspension", "destroy", "pull"}

# Columns with the deadline or token of a claim, and the work that writes the column, or the reason for which there is none.
COLUMNS: dict[str, list[str] | str] = {
    "Sandbox.claim": "beside deadline_at",
    "Sandbox.deadline_at": [
        "start", "prewarmed start", "wake", "sleep", "idle sweep", "overdue eviction", "suspension", "restart", "destroy",
    ],
    "Sandbox.intervals_claimed_until": ["intervals"],
    "Sandbox.held_until": "end of the lease, not a claim",
    "Attachment.pull_until": ["pull"],
    "Host.starts_paused_until": ["probe"],
    "Host.watched_until": ["watch"],
    "Process.starts_by": ["process restart"],
    "Process.restart_at": "time of the next restart; its claim is starts_by",
    "Turn.deadline_at": ["turn"],
    "QueuedRun.runner_deadline": ["queued run", "takeover"],
    "AgentRun.recorder_deadline": ["abandoned recording"],
    "AtprotoRecord.next_attempt_at": ["record"],
    "CodingTask.next_poll_at": ["poll"],
    "CodingTask.busy_until": ["submission"],
    "IdempotentRequest.deadline_at": ["request", "repeated request"],
    "Sweep.claim": "beside running_until",
    "Sweep.running_until": ["sweep"],
    "OrmQ.lock": ["queue task"],
    "Delivery.claim": "beside due_at",
    "Delivery.due_at": ["delivery", "test delivery"],
    "ImageTemplate.claim": "beside deadline_at",
    "ImageTemplate.deadline_at": ["template", "template again", "overdue build", "build", "removal"],
    "Run.claim": "token of the waiting process; a sweep replaces the token, and any later sweep replaces it again",
    "Run.deadline_at": "a Run whose opening has no answer is closed: test_exec_at_any_step",
    "Run.retry_at": "backoff of at least 30 seconds, set before each try; not a claim",
    "ObjectUpload.deadline_at": "the keys are random, and no other work waits for them",
    "LlmCall.deadline_at": "reservation in limits of the lease until the deadline; no work waits for the call",
    "EgressConnection.deadline_at": "counted in limits of the lease until the deadline; no work waits for the connection",
    "Pool.warm_paused_until": "backoff of warm starts, not a claim",
    "Webhook.retry_at": "backoff, not a claim",
    "Webhook.before_until": "validity of the previous secret",
    "Snapshot.metered_until": "progress of metering, not a claim",
    "DataSize.metered_until": "progress of metering, not a claim",
    "EnvironmentSecret.valid_until": "validity of the previous secret",
    "AgentKey.previous_valid_until": "validity of the previous secret",
    "SignInThrottle.next_allowed_at": "backoff, not a claim",
    "Schedule.next_run": "updated in the transaction that adds the task",
}  # fmt: skip
COLUMN_NAMES = r"\w*(_until|_by|deadline|deadline_at|due_at|retry_at|restart_at)|next_\w+|lock"


@pytest.fixture
def context(
    grant: Callable[..., Lease], pool: Pool, memory: MemoryProvider, failover: Any, monkeypatch: pytest.MonkeyPatch
) -> Context:
    return Context(grant, pool, memory, monkeypatch)


def test_every_column_of_a_claim_is_tested_or_has_a_reason() -> None:
    columns = {
        f"{model.__name__}.{column.name}"
        for model in apps.get_models()
        for column in model._meta.concrete_fields
        if (isinstance(column, DateTimeField) and re.fullmatch(COLUMN_NAMES, column.name))
        or (isinstance(column, UUIDField) and column.name == "claim")
    }
    assert columns == COLUMNS.keys()
    assert sorted(name for names in COLUMNS.values() if isinstance(names, list) for name in names) == sorted(WORK)


@pytest.mark.parametrize("name", WORK)
def test_claim_whose_answer_is_lost_ends_with_the_outage(context: Context, name: str) -> None:
    """Not at its deadline: the worker does not know whether it has made the claim. The work is then done."""
    if name not in ON_VENDORS and TEST_PROVIDER != "memory":
        pytest.skip("the provider takes no part in the claim, or the test replaces verbs of the memory provider")
    work = WORK[name](context)
    assert not work.is_claimed()
    with injected(LostAnswer(work.is_claimed)) as outage:
        with suppress(*EXPECTED_ERRORS):
            work.act(now=IDLE)
        assert outage.has_begun
    claims.HEARTBEAT.beat()
    assert not work.is_claimed()
    for now in (IDLE + MINUTE, IDLE + 2 * MINUTE):  # a failed attempt may be followed by a backoff
        sweeps.recover_stalled(now=now)
        sweeps.reclaim(now=now)
        sweeps.reconcile(now=now, grace=timedelta(0))
        work.act(now=now)
    assert work.is_done()
    assert_converged(context.pool, context.memory)
