"""State machine of a sandbox. No other module writes `Sandbox.state`.

Each transition is one guarded UPDATE plus a Transition row, in one transaction."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.exceptions import EmptyResultSet
from django.db import transaction
from django.db.models import Q, QuerySet

from sandboxes.db import dialect, sql
from sandboxes.db.message_fields import fit_column
from sandboxes.errors import IllegalTransition, TooManyRuns
from sandboxes.models import Sandbox, SandboxState, Transition, processes
from sandboxes.models import TransitionReason as Reason

WARMING, WARM, RUNNING, WAITING = SandboxState.WARMING, SandboxState.WARM, SandboxState.RUNNING, SandboxState.WAITING
SUSPENDED = SandboxState.SUSPENDED
EVICTING, COLD = SandboxState.EVICTING, SandboxState.COLD
DESTROYING, DESTROYED = SandboxState.DESTROYING, SandboxState.DESTROYED

_EVICT_REASONS = (Reason.IDLE, Reason.LIFETIME, Reason.CAPACITY, Reason.BUDGET, Reason.RESTORE)
_END_REASONS = (Reason.LEASE_ENDED, Reason.OPERATOR, Reason.DISCARDED)
_LIVE_END_REASONS = (*_END_REASONS, Reason.PROVIDER_LOST, Reason.HOST_LOST)  # not of a cold sandbox: it has no process
START_REASONS = (Reason.REQUESTED, Reason.PREWARMED, Reason.ADOPTED)  # of a new row
# Edges of the state machine, each with the reasons that it allows. The diagram in README.md is drawn from this table.
EDGES: dict[tuple[SandboxState, SandboxState], tuple[Reason, ...]] = {
    (WARMING, WARM): (Reason.READY,),
    (WARM, WARM): (Reason.CLAIMED,),
    (WARM, RUNNING): (Reason.RUN_STARTED,),
    (WAITING, RUNNING): (Reason.RUN_STARTED,),
    (RUNNING, WAITING): (Reason.RUN_ENDED,),
    (WAITING, SUSPENDED): (Reason.IDLE,),
    (SUSPENDED, RUNNING): (Reason.RUN_STARTED,),
    (SUSPENDED, WAITING): (Reason.RESUMED, Reason.SUSPEND_FAILED),
    (WARM, EVICTING): (*_EVICT_REASONS, Reason.PROVIDER_LOST, Reason.AGENT_UNRESPONSIVE, Reason.RESTART_REQUESTED),
    (WAITING, EVICTING): (*_EVICT_REASONS, Reason.PROVIDER_LOST, Reason.AGENT_UNRESPONSIVE, Reason.RESTART_REQUESTED),
    (SUSPENDED, EVICTING): (*_EVICT_REASONS, Reason.PROVIDER_LOST, Reason.RESTART_REQUESTED),
    (EVICTING, WAITING): (Reason.PERSIST_FAILED, Reason.AGENT_RESTARTED, Reason.RESTART_FAILED),
    (EVICTING, COLD): (Reason.PERSISTED, Reason.NOTHING_UNSAVED),
    (COLD, WARMING): (Reason.WOKEN,),
    (WARMING, DESTROYING): (*_LIVE_END_REASONS, Reason.ADOPTED, Reason.START_FAILED, Reason.START_STALLED, Reason.STATE_LOST),
    (WARM, DESTROYING): (
        *_LIVE_END_REASONS,
        Reason.CAPACITY,
        Reason.SURPLUS,
        Reason.LIFETIME,
        Reason.AGENT_UNRESPONSIVE,
    ),
    (RUNNING, DESTROYING): _LIVE_END_REASONS,
    (WAITING, DESTROYING): _LIVE_END_REASONS,
    (SUSPENDED, DESTROYING): _LIVE_END_REASONS,
    (EVICTING, DESTROYING): (*_LIVE_END_REASONS, Reason.EVICTION_STALLED),
    (COLD, DESTROYING): (*_END_REASONS, Reason.CAPACITY, Reason.COLD_TTL, Reason.MOVED),
    (DESTROYING, DESTROYING): (Reason.DISCARDED,),
    (DESTROYING, DESTROYED): (Reason.CONFIRMED_GONE, Reason.NO_PROCESS, Reason.HOST_LOST),
}


def render_state_diagram() -> str:
    """Render EDGES as a Mermaid state diagram, in the order of the table. Each arrow shows the codes of its reasons."""
    arrows = [f"    {was} --> {to}: {', '.join(reasons)}" for (was, to), reasons in EDGES.items()]
    start = f"    [*] --> {WARMING}: {', '.join(START_REASONS)}"
    return "\n".join(["stateDiagram-v2", start, *arrows, f"    {DESTROYED} --> [*]"])


# Inserts a Transition for rows as they are now. Execute it in the transaction that moved the rows, which holds their locks.
# Continued by the name of a table or common table expression with the rows. Parameters: was, code, reason, actor.
INSERT_TRANSITION_SQL = (
    'INSERT INTO sandboxes_transition (sandbox_id, was, "to", at, holder, code, reason, actor) '
    "SELECT id, %s, state, state_since, holder, %s, %s, %s FROM "
)

# Open runs of the agent of a sandbox. open_runs > 0 is the condition of the index sandbox_agent_running.
AGENT_OPEN_RUNS_SQL = (
    "(SELECT COALESCE(SUM(other.open_runs), 0) FROM sandboxes_sandbox other "
    "WHERE other.agent_did = sandboxes_sandbox.agent_did AND other.open_runs > 0)"
)
BEGIN_FIRST_RUN_SQL = (
    "state = 'running', state_since = %s, last_used_at = %s, open_runs = 1, idle_at = NULL, warm_hits = warm_hits + %s, "
    "persisted = FALSE, persist_failures = 0 "
    "WHERE id = %s AND holder = %s AND state = %s"
    f" AND incarnation = %s AND frozen = %s AND {AGENT_OPEN_RUNS_SQL} < %s"
)
# A suspension whose worker holds a claim is not undone: the worker might freeze the sandbox after the run has begun.
BEGIN_SUSPENDED_RUN_SQL = (
    f"claim = NULL, claimed_by = '', deadline_at = NULL, {BEGIN_FIRST_RUN_SQL} AND (deadline_at IS NULL OR deadline_at < %s)"
)
BEGIN_CONCURRENT_RUN_SQL = (
    "open_runs = open_runs + 1, last_used_at = %s, warm_hits = warm_hits + 1 "
    "WHERE id = %s AND holder = %s AND state = 'running'"
    f" AND incarnation = %s AND frozen = %s AND open_runs < %s AND {AGENT_OPEN_RUNS_SQL} < %s"
)
COUNT_OPEN_RUNS_SQL = (
    f"SELECT agent_did, open_runs, {AGENT_OPEN_RUNS_SQL} FROM sandboxes_sandbox "  # noqa: S608 - no user input
    "WHERE id = %s AND holder = %s AND state IN ('warm', 'running', 'waiting', 'suspended')"
)
END_RUN_SQL = (
    "open_runs = open_runs - 1, last_used_at = %s, frozen = frozen AND NOT %s, "
    "state = CASE WHEN open_runs > 1 THEN state ELSE 'waiting' END, "
    "state_since = CASE WHEN open_runs > 1 THEN state_since ELSE %s END, "
    "idle_at = CASE WHEN open_runs > 1 THEN idle_at ELSE %s END "
    "WHERE id = %s AND state = 'running' AND incarnation = %s"
)
FINISH_SQL = f"UPDATE sandboxes_sandbox SET {END_RUN_SQL} AND EXISTS (SELECT 1 FROM closed) RETURNING sandboxes_sandbox.*"  # noqa: S608 - no user input

CHECKPOINT_HOOKS: list[Callable[[str, Any], None]] = []


def checkpoint(name: str, subject: Any) -> None:
    """Mark a point between two steps, at which hooks of tests run a concurrent operation or simulate a crash."""
    for hook in CHECKPOINT_HOOKS:
        hook(name, subject)


def insert_warming(sandbox: Sandbox, *, now: datetime, code: Reason, actor: str = "") -> None:
    """Insert a new row in `warming`, with its Transition.

    Call this function in the transaction that takes the place in the pool."""
    sandbox.state, sandbox.state_since = WARMING, now
    sql.insert_then(sandbox, [_build_transitions("changed", was=None, code=code, actor=actor)])


def _insert_transitions(
    where: str, key: UUID, *, was: SandboxState | None, code: Reason, reason: str = "", actor: str = ""
) -> None:
    statement = _build_transitions(f"sandboxes_sandbox {where}", was=was, code=code, reason=reason, actor=actor)
    sql.execute(statement.text, *statement.values, key)


def _build_transitions(
    rows: str, *, was: SandboxState | None, code: Reason, reason: str = "", actor: str = ""
) -> sql.Statement:
    text, by = fit_column(Transition, "reason", reason or code.label), fit_column(Transition, "actor", actor)
    return sql.Statement(INSERT_TRANSITION_SQL + rows, (was.value if was else "", code.value, text, by))


def _require_edge(was: SandboxState, to: SandboxState, code: Reason) -> None:
    if code not in EDGES.get((was, to), ()):
        raise IllegalTransition(f"A sandbox does not go from {was} to {to} for the reason {code}.")


def advance(
    pk: UUID,
    was: SandboxState,
    to: SandboxState,
    *,
    now: datetime,
    code: Reason,
    reason: str = "",
    actor: str = "",
    guard: Q | None = None,
    **changes: Any,
) -> bool:
    """Move one sandbox along one edge. Returns whether this call moved it; False means that another process was first.

    `code` is the cause, and `reason` a text for operators (default: the label of the code). `guard` restricts the UPDATE beyond
    the state; `changes` are further columns. A move to `cold` or `destroying` closes the rows of the sandbox's processes, and a
    move to `cold` releases its egress slot and ends its suspension.
    Raises IllegalTransition if EDGES does not list the edge with this code."""
    _require_edge(was, to, code)
    if was == RUNNING and to != RUNNING:
        changes.setdefault("open_runs", 0)
    if to == COLD:
        changes |= {"slot": None, "frozen": False}
    changes |= {"state": to, "state_since": now}
    rows = Sandbox.objects.filter(guard or Q(), pk=pk, state=was)
    note = _build_transitions("changed", was=was, code=code, reason=reason, actor=actor)
    if to not in (COLD, DESTROYING) and dialect.can_chain():
        return _update_and_note(rows, changes, note)
    with transaction.atomic(savepoint=False):
        if dialect.can_chain():
            moved = _update_and_note(rows, changes, note)
        elif moved := bool(rows.update(**changes)):
            _insert_transitions("WHERE id = %s", pk, was=was, code=code, reason=reason, actor=actor)
        if moved and to in (COLD, DESTROYING):
            verb = "evicted" if to == COLD else "destroyed"
            processes.close_all_processes(pk, now=now, note=f"Sandbox {verb}: {reason or code.label}")
    return moved


def _update_and_note(rows: QuerySet[Sandbox], changes: dict[str, Any], note: sql.Statement) -> bool:
    """Update the row and insert its Transition in one statement. Return whether a row was updated."""
    try:
        update = sql.build_update(rows, **changes)
    except EmptyResultSet:
        return False
    changed = sql.Statement(f"{update.text} RETURNING sandboxes_sandbox.*", update.values)
    [moved] = sql.execute_chain([("changed", changed), ("noted", note)], ["changed"])
    return bool(moved)


def start_run(
    pk: UUID,
    incarnation: int,
    *,
    holder: UUID,
    now: datetime,
    actor: str = "",
    likely: SandboxState = WAITING,
    frozen: bool = False,
    run: sql.Statement | None = None,
    permission: sql.Statement = sql.ALWAYS,
) -> SandboxState | None:
    """Count one more open Run of a sandbox. Returns the sandbox's previous state.

    `run` inserts the Run from the row `changed` (sql.update_then), so that an eviction sees both or neither. `likely` is the
    state that is tried first: with the right one, the whole is one statement on PostgreSQL. `frozen` is the value that the
    caller has read: the caller of a frozen sandbox has to resume it.

    Returns None if the sandbox is not alive, is being suspended, has been suspended, resumed or woken since, or another holder
    has it, or if `permission`, a condition in SQL, does not hold. Raises TooManyRuns if the holder or its agent has reached
    LEASEHOLD_MAX_RUNS_PER_LEASE or LEASEHOLD_MAX_RUNS_PER_AGENT.

    A Run counts as a warm hit, unless it is the first one since the start of the sandbox. The caller holds the agent's
    lock_key, taken by an earlier statement, so that two transactions that start Runs in two sandboxes of the agent count each
    other's."""
    agent_limit, inserts = settings.MAX_RUNS_PER_AGENT, [run] if run else []
    states = (WAITING, WARM, RUNNING, *([SUSPENDED] if frozen else []))
    for was in sorted(states, key=lambda each: each != likely):
        if was == RUNNING:
            values: tuple[Any, ...] = (now, pk, holder, incarnation, frozen, settings.MAX_RUNS_PER_LEASE, agent_limit)
            text, then = BEGIN_CONCURRENT_RUN_SQL, inserts
        else:
            values = (now, now, int(was != WARM), pk, holder, was.value, incarnation, frozen, agent_limit)
            text = BEGIN_FIRST_RUN_SQL
            if was == SUSPENDED:
                text, values = BEGIN_SUSPENDED_RUN_SQL, (*values, now)
            transition = _build_transitions("changed", was=was, code=Reason.RUN_STARTED, actor=actor)
            then = [transition, *inserts]
        change = sql.Statement(f"{text} AND {permission.text}", (*values, *permission.values))
        if sql.update_then(Sandbox, pk, change, then):
            return was
    _require_runs_below_limits(pk, holder)
    return None


def _require_runs_below_limits(pk: UUID, holder: UUID) -> None:
    """Raise TooManyRuns if a limit is the reason why no run was started in this sandbox."""
    for agent_did, open_runs, agent_runs in sql.fetch_all(COUNT_OPEN_RUNS_SQL, pk, holder):
        if open_runs >= settings.MAX_RUNS_PER_LEASE:
            raise TooManyRuns(
                f"This lease has {open_runs} open runs, and the limit is {settings.MAX_RUNS_PER_LEASE} "
                "(LEASEHOLD_MAX_RUNS_PER_LEASE). Nothing was run. Try again when a run has ended.",
                limit=settings.MAX_RUNS_PER_LEASE,
            )
        if agent_runs >= settings.MAX_RUNS_PER_AGENT:
            raise TooManyRuns(
                f"{agent_did} has {agent_runs} open runs in its leases, and the limit is {settings.MAX_RUNS_PER_AGENT} "
                "(LEASEHOLD_MAX_RUNS_PER_AGENT). Nothing was run. Try again when a run has ended.",
                limit=settings.MAX_RUNS_PER_AGENT,
            )


@dataclass(frozen=True)
class Finished:
    """Rows that the end of a run changed."""

    closed: bool  # the Run; False: it was closed before
    renewed: bool  # the holder


def finish_run(
    pk: UUID,
    incarnation: int,
    *,
    idle_after: timedelta,
    close: sql.Statement,
    renew: sql.Statement | None = None,
    resumed: bool = False,
    now: datetime,
    actor: str = "",
) -> Finished:
    """Close a Run, subtract it from its sandbox, and move the sandbox to `waiting` after its last one. All or nothing.

    `close` is the UPDATE of the Run, guarded by its being open; nothing is subtracted if it changes no row, nor from a sandbox
    that has left `running`. `renew` is an UPDATE that renews the sandbox's holder; it is independent of the rest. With
    `resumed`, the Run has resumed the sandbox's processes, which have not been suspended since.

    The rows are locked in the order holder, sandbox, Run, in which the end of a lease and schedule_destroy lock them. On
    PostgreSQL it is one statement with one commit. Each part depends on the one before by a subquery without a reference to
    its own row, which is evaluated before the first row is read. Plan: four lookups by primary keys."""
    renewals = [("renewed", sql.Statement(f"{renew.text} RETURNING 1", renew.values))] if renew else []
    subtract = sql.Statement(END_RUN_SQL, (now, resumed, now, now + idle_after, pk, incarnation))
    note = _build_transitions("changed WHERE state = 'waiting'", was=RUNNING, code=Reason.RUN_ENDED, actor=actor)
    if dialect.can_chain():
        after_renewal = "AND (SELECT COUNT(*) FROM renewed) >= 0 " if renew else ""
        close_text = f"{close.text} AND EXISTS (SELECT 1 FROM locked) RETURNING 1"  # noqa: S608 - no user input
        lock = f"SELECT id FROM sandboxes_sandbox WHERE id = %s {after_renewal}FOR NO KEY UPDATE"  # noqa: S608 - no user input
        counts = sql.execute_chain(
            [
                *renewals,
                ("locked", sql.Statement(lock, (pk,))),
                ("closed", sql.Statement(close_text, close.values)),
                ("changed", sql.Statement(FINISH_SQL, subtract.values)),
                ("noted", note),
            ],
            ["closed", *(name for name, _ in renewals)],
        )
        return Finished(closed=counts[0] > 0, renewed=sum(counts[1:]) > 0)
    with transaction.atomic(savepoint=False):
        renewed = sql.execute(renew.text, *renew.values) if renew else 0
        closed = sql.execute(close.text, *close.values)
        if closed:
            sql.update_then(Sandbox, pk, subtract, [note])
    return Finished(closed=closed > 0, renewed=renewed > 0)


def advance_many(
    rows: QuerySet[Sandbox],
    was: SandboxState,
    to: SandboxState,
    *,
    now: datetime,
    code: Reason,
    claim: UUID,
    actor: str = "",
    **changes: Any,
) -> int:
    """Move all rows of a query along one edge, each with its Transition, in few statements. Returns the number moved.

    The filter of `rows` is the guard. `rows` may be sliced. Rows that another transaction has locked are skipped. `claim`
    identifies the moved rows, so it must be a new UUID in each call."""
    _require_edge(was, to, code)
    with transaction.atomic():
        unlocked: Any = rows.select_for_update(skip_locked=True).values_list("pk", flat=True)
        if dialect.is_postgres():  # which may execute a subquery again for each row, and then skips the rows moved so far
            unlocked = list(unlocked)
        moved = Sandbox.objects.filter(pk__in=unlocked, state=was).update(state=to, state_since=now, claim=claim, **changes)
        if moved:
            _insert_transitions("WHERE claim = %s", claim, was=was, code=code, actor=actor)
    return moved
