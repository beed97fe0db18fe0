"""Turns of an agent in an environment: join, take a turn once, settle overdue turns."""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import structlog
from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet

from leases import admission, execution, leasing
from leases.admission import Admission
from leases.atproto import records
from leases.errors import TurnInProgress
from leases.models import Lease, Turn, default_turn_argv
from sandboxes.claims import KILL_GRACE, Claim, hold
from sandboxes.db import dialect
from sandboxes.db.clock import clock_from
from sandboxes.deferred_writes import end_if_unanswered
from sandboxes.egress import gateway_tokens
from sandboxes.errors import OutcomeUnknown, ProviderCallFailed, ResultPending, SandboxError
from sandboxes.guard import Guard
from sandboxes.lifecycle import checkpoint
from sandboxes.long_calls import LONG_CALLS
from sandboxes.models import Run, RunOutcome
from sandboxes.redaction.texts import omit_answers
from sandboxes.runs.operations import Command
from sandboxes.state.run_outputs import load_output
from sandboxes.sweep_log import SweepResult

log = structlog.get_logger(__name__)
MAX_SKIP_REASON_CHARS = 500
SETTLE_GRACE_PERIOD = timedelta(seconds=5)  # time for the playing process to store the answer after the Run has ended
MAX_ACTION_BYTES = 64 << 10
MAX_STATE_BYTES = 64 << 10  # of the stored copy of a state; a longer one is played and not stored

Action = dict[str, Any]


def join_environment(
    request: leasing.LeaseRequest,
    *,
    wait: timedelta | None = None,
    now: datetime,
    actor: str = "",
    admit: Callable[[], object] = bool,
) -> Admission:
    """Acquire a lease and start its sandbox. Idempotent.

    A claimed pre-warmed sandbox gets /workspace/config.json and /data with its first operation; here it is only asked whether
    it responds.
    The lease is granted with its place, after up to `wait` in the queue of a full pool (admission.acquire_with_place). A join
    that raises an error leaves no lease that it granted."""
    clock = clock_from(now)
    with LONG_CALLS.admit():
        admitted = admission.acquire_with_place(request, wait=wait, now=now, actor=actor, admit=admit)
        lease, is_new, sandbox = admitted
        if sandbox and (sandbox.prepared or execution.responds(sandbox)):
            return admitted
        with admission.end_on_error(lease.pk, clock=clock, actor=actor) if is_new else nullcontext():
            # Whether the sandbox runs commands is not known. An operation finds out, and writes the first files.
            no_op = Command(argv=admission.JOIN_ARGV, timeout=settings.EXEC_TIMEOUT, kind="file", needs_data=False)
            execution.call_in_sandbox(lease.pk, no_op, lambda provider, sandbox: None, now=clock(), actor=actor)
            return admission.read_admission(lease.pk, is_new=is_new)


def take_turn(
    pk: UUID,
    number: int,
    state: Mapping[str, Any],
    *,
    now: datetime,
    actor: str = "",
    run_id: UUID | None = None,
    attempt: int = 1,
    wrap_guard: Callable[[Guard], Guard] | None = None,
) -> Turn:
    """Play one turn of a lease. Idempotent: a number that was played before returns the stored turn.

    A turn that fails, times out, runs out of memory or prints anything but one JSON object is stored as `skip_turn` with a
    reason. Raise TurnInProgress while another call plays the same number. An error that prevents the start, such as exhausted
    capacity, a missing gateway or an ended lease, is raised and leaves the number free. `run_id`, `attempt` and `wrap_guard`
    are those of a queued turn."""
    clock = clock_from(now)
    played = Turn.objects.filter(lease=pk, number=number, ended_at__isnull=False).first()
    if played:  # returned even if the lease has ended since
        return played
    lease = leasing.require_active(pk, now=now)
    environment_type = lease.environment_type
    if environment_type.turn_argv == default_turn_argv():  # it asks a model; other turn commands may do without
        gateway_tokens.require_models(lease.pool)
    timeout = environment_type.turn_timeout or settings.TURN_TIMEOUT
    max_duration = settings.SANDBOX_START_TIMEOUT + timeout + 2 * KILL_GRACE
    sent = json.dumps(state)
    turn, claimed = _claim_turn(lease, number, sent, now=now, max_duration=max_duration)
    if not claimed:
        return turn
    checkpoint("turn claimed", turn)
    command = Command(
        argv=environment_type.turn_argv, timeout=timeout, stdin=sent.encode(), kind="turn", turn_number=number,
        run_id=run_id or uuid4(), attempt=attempt,
        env={
            "ENVIRONMENT_TYPE": environment_type.name,
            "GAME_ID": lease.environment_id,
            "TURN_NUMBER": str(number),
            "MODEL": settings.LLM_MODEL,
        },
    )  # fmt: skip

    open_turn = Turn.objects.filter(pk=turn.pk, ended_at__isnull=True)
    try:
        with hold(Claim(open_turn, deadline=turn.deadline_at, clock=clock, ttl=max_duration)):
            run, _ = execution.exec_command(pk, command, now=clock(), actor=actor, wrap_guard=wrap_guard)
    except ProviderCallFailed as failed:
        _settle_turn(turn, Run.objects.filter(pk=command.run_id).first(), build_skip_action(str(failed)), now=clock())
        leasing.renew(lease, now=clock())
    except ResultPending as pending:
        raise TurnInProgress() from pending
    except OutcomeUnknown:  # the command may have been executed: a later call, or a sweep, answers by the end of its Run
        raise
    except SandboxError:
        Turn.objects.filter(pk=turn.pk, ended_at__isnull=True).delete()  # the turn did not start
        raise
    else:
        checkpoint("turn answered", turn)
        _settle_turn(turn, run, parse_action(run), now=clock())
    turn.refresh_from_db()
    return turn


def _claim_turn(lease: Lease, number: int, state: str, *, now: datetime, max_duration: timedelta) -> tuple[Turn, bool]:
    kept = state if len(state) <= MAX_STATE_BYTES else ""  # json.dumps writes ASCII
    turn = Turn(lease=lease, number=number, state=kept, started_at=now, deadline_at=now + max_duration)

    def free_number() -> None:  # without a key the row was not inserted; SQLite gives the key of one rolled back again
        Turn.objects.filter(pk=turn.pk, lease=lease, number=number, started_at=now, ended_at__isnull=True).delete()

    try:
        with end_if_unanswered(free_number, turn), transaction.atomic():
            turn.save(force_insert=True)
        return turn, True
    except IntegrityError as error:
        dialect.raise_unless_unique(error)
        turn = Turn.objects.get(lease=lease, number=number)
    if turn.ended_at is None and find_overdue_turns(now=now).filter(pk=turn.pk).exists():
        _settle_overdue(turn, now=now)
        turn.refresh_from_db()
    if turn.ended_at is None:
        raise TurnInProgress()
    return turn, False


def _settle_turn(turn: Turn, run: Run | None, action: Action, *, now: datetime) -> bool:
    """Store the answer of an open turn. Return False if the turn was already answered."""
    skipped = action.get("action") == "skip_turn"
    if skipped:
        log.info("turn skipped", lease=str(turn.lease_id), turn=turn.number, run=str(run.pk) if run else None)
    changes = {"ended_at": now, "run": run, "skipped": skipped, "answer": json.dumps(action)}
    open_turn = Turn.objects.filter(pk=turn.pk, ended_at__isnull=True)
    if skipped or not turn.lease.environment_type.turn_collection:
        return bool(open_turn.update(**changes))
    with transaction.atomic():
        settled = bool(open_turn.update(**changes))
        if settled:
            records.insert_for_turn(turn, action, now=now)
    return settled


def _settle_overdue(turn: Turn, *, now: datetime) -> bool:
    """Answer a turn whose process died: from its finished Run if there is one, else as skipped."""
    attempts = Run.objects.filter(holder=turn.lease_id, kind="turn", turn_number=turn.number)
    run = attempts.filter(started_at__gte=turn.started_at).order_by("-started_at").first()
    if run and run.ended_at and run.outcome != RunOutcome.LOST:
        return _settle_turn(turn, run, parse_action(run), now=now)
    return _settle_turn(turn, run, build_skip_action("The control plane was interrupted while this turn was played."), now=now)


def settle_overdue_turns(*, now: datetime, limit: int = 200) -> SweepResult:
    """Settle turns past their deadline."""
    result = SweepResult()
    for turn in find_overdue_turns(now=now)[:limit]:
        with result.catching(f"turn {turn.pk}"):
            result.note("turns skipped", _settle_overdue(turn, now=now))
    return result


def find_old_states(*, now: datetime) -> QuerySet[Turn]:
    """Return the turns with a stored state whose lease ended at least LEASEHOLD_KEEP_STATE ago, oldest first."""
    before = now - settings.KEEP_STATE
    # The condition on the turn's own time bounds the range of the index `turn_with_state` that is read.
    return Turn.objects.filter(~Q(state=""), started_at__lte=before, lease__ended_at__lte=before).order_by("started_at")


def find_overdue_turns(*, now: datetime) -> QuerySet[Turn]:
    """Open turns past their deadline, or whose Run ended more than SETTLE_GRACE_PERIOD ago."""
    ended = Run.objects.filter(
        holder=OuterRef("lease"),
        kind="turn",
        turn_number=OuterRef("number"),
        ended_at__lt=now - SETTLE_GRACE_PERIOD,
        started_at__gte=OuterRef("started_at"),  # excludes refused attempts, which left the number free
    )
    return Turn.objects.filter(Q(deadline_at__lt=now) | Exists(ended), ended_at__isnull=True).order_by("deadline_at")


def build_skip_action(reason: str) -> Action:
    return {"action": "skip_turn", "reason": omit_answers(reason)[:MAX_SKIP_REASON_CHARS]}


def parse_action(run: Run) -> Action:
    """Return the action that a finished turn printed, or `skip_turn` with the reason if it is not one JSON object."""
    if run.outcome == RunOutcome.TIMED_OUT:
        return build_skip_action(
            f"The turn exceeded its timeout of {(run.deadline_at - run.started_at - KILL_GRACE).total_seconds():g} seconds."
        )
    if run.outcome == RunOutcome.OOM:
        return build_skip_action("The turn ran out of memory.")
    if run.outcome != RunOutcome.OK:
        stderr = load_output(run).stderr.decode("utf-8", "replace").strip() or run.note
        return build_skip_action(f"The turn exited with code {run.exit_code}: {stderr or 'no output on stderr'}")
    stdout = load_output(run).stdout
    if len(stdout) > MAX_ACTION_BYTES or run.stdout_bytes > len(stdout) or run.truncated:
        return build_skip_action(f"The turn printed more than {MAX_ACTION_BYTES} bytes.")
    try:
        action = json.loads(stdout)
        # Serialize as the response will: this rejects NaN, lone surrogates and nesting that is too deep to write.
        json.dumps(action, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return build_skip_action(f"The turn printed no JSON: {stdout[:200].decode('utf-8', 'replace')}")
    if not isinstance(action, dict):
        return build_skip_action(f"The turn printed {type(action).__name__}, not a JSON object.")
    return action
