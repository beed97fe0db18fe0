"""Who may call out, and the rows that say who did. The proxy's server runs these in threads.

A caller is known by its slot alone. The sandbox's row says whom that is held for at this moment, so a lease that has
ended, or another that has begun, needs no telling anybody, and a pre-warmed sandbox has its identity once it is claimed."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet, Sum

from sandboxes.db import sql
from sandboxes.egress.request_filter import is_allowed
from sandboxes.egress.token_usage import TokenUsage
from sandboxes.models import ALIVE_STATES, LlmCall, Policy, Sandbox

SETTLE_GRACE_PERIOD = timedelta(seconds=30)  # past its longest time, to write down how a call ended
MINUTE = timedelta(minutes=1)
MAX_LOGGED_REFUSALS_PER_MINUTE = 30  # of one lease in one minute
# Of a sandbox: the run that is open in it if there is one, and the calls of its lease that began lately and that are under
# way. That a call has not ended says the same as its outcome, and has an index: a lease may have made thousands.
OPEN_RUN_SQL = """SELECT CASE count(*) WHEN 1 THEN max(CAST(id AS text)) END FROM sandboxes_run
    WHERE sandbox_id = sandboxes_sandbox.id AND ended_at IS NULL AND sandboxes_sandbox.open_runs > 0"""
CALLS_LAST_MINUTE_SQL = """SELECT count(*) FROM sandboxes_llmcall
    WHERE holder = sandboxes_sandbox.holder AND started_at > %s AND outcome <> 'refused'"""
CALLS_IN_FLIGHT_SQL = """SELECT count(*) FROM sandboxes_llmcall
    WHERE holder = sandboxes_sandbox.holder AND ended_at IS NULL AND deadline_at > %s"""
SLOT_CONDITION_SQL = "slot = %s AND state <> 'destroyed'"  # as the condition of its index
RELAY_HEARTBEAT_TIMEOUT = timedelta(minutes=3)  # an open relay connection is somebody's for so long after it was last seen


class CallRefused(Exception):
    """This call does not leave. `status` and `code` are what the sandbox is answered."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message
        super().__init__(message)


@dataclass(frozen=True)
class CallerIdentity:
    """On whose behalf something leaves."""

    sandbox: Sandbox
    holder: UUID
    run: UUID | None
    started: int  # calls of this lease within the last minute
    under_way: int  # calls of this lease

    def metadata(self, call_id: str) -> str:
        """What the upstream's own log says about a call, as JSON. The attempt is the sandbox's incarnation."""
        said = {
            "call": call_id, "run": str(self.run or ""), "attempt": self.sandbox.incarnation, "lease": str(self.holder),
            "agent": self.sandbox.agent_did, "environment": self.sandbox.environment_id,
        }  # fmt: skip
        return json.dumps(said)


def identify_caller(slot: int, *, now: datetime) -> CallerIdentity:
    """Who speaks through this slot now, or Refused. All that each call needs to know, by one query."""
    asked = (OPEN_RUN_SQL, CALLS_LAST_MINUTE_SQL, CALLS_IN_FLIGHT_SQL)
    sandbox, known = sql.find_first_with_related(Sandbox, "policy", asked, SLOT_CONDITION_SQL, now - MINUTE, now, slot)
    if sandbox is None or sandbox.holder is None or sandbox.state not in ALIVE_STATES:
        raise CallRefused(403, "no_lease", "No lease holds this sandbox now.")
    run, started, under_way = known
    return CallerIdentity(sandbox, sandbox.holder, UUID(run) if run else None, started, under_way)


def lock_holder(who: CallerIdentity) -> None:
    """Refused unless the sandbox is still held by this lease. Locked until the transaction ends."""
    held = Sandbox.objects.select_for_update(no_key=True).filter(pk=who.sandbox.pk, holder=who.holder, state__in=ALIVE_STATES)
    if not held.exists():
        raise CallRefused(403, "no_lease", "No lease holds this sandbox now.")


def open_model_call(
    slot: int, call_id: str, path: str, model: str, *, streamed: bool, size: int, now: datetime
) -> tuple[LlmCall, CallerIdentity]:
    """A model call is about to be sent: its row, which is there before anything is. Or Refused, and that is a row too."""

    def made(who: CallerIdentity) -> LlmCall:
        row = _build_row(who, call_id, path, now=now, kind=LlmCall.Kind.LLM, model=model, streamed=streamed, sent_bytes=size)
        row.deadline_at = now + settings.LLM_TIMEOUT + SETTLE_GRACE_PERIOD
        return row

    def check(who: CallerIdentity, rules: Policy) -> None:
        if size > rules.largest_body_kib << 10:
            raise build_too_large_refusal(rules)
        _check_model(model, rules)
        _check_call_rate(who, rules)
        _check_spend_limit(who)

    return _admit_call(slot, made, check, now=now)


def find_max_body_bytes(slot: int, *, now: datetime) -> int:
    """Bytes that a request through this slot may have, or Refused."""
    return identify_caller(slot, now=now).sandbox.rules.largest_body_kib << 10


def build_too_large_refusal(rules: Policy) -> CallRefused:
    return CallRefused(413, "too_large", f"A request has at most {rules.largest_body_kib} KiB.")


def open_relay_call(slot: int, call_id: str, path: str, *, now: datetime) -> tuple[LlmCall, CallerIdentity]:
    """A connection to the relay is about to be made: its row, or Refused."""

    def made(who: CallerIdentity) -> LlmCall:
        row = _build_row(who, call_id, path, now=now, kind=LlmCall.Kind.RELAY, streamed=True)
        row.deadline_at = now + RELAY_HEARTBEAT_TIMEOUT
        return row

    def check(who: CallerIdentity, rules: Policy) -> None:
        if not settings.RELAY_URL:
            raise CallRefused(404, "no_relay", "There is no relay here.")
        if not rules.relay:
            raise CallRefused(403, "relay_not_allowed", "The policy of this sandbox does not let it connect to the relay.")
        _check_call_rate(who, rules)

    return _admit_call(slot, made, check, now=now)


def _admit_call(
    slot: int, made: Callable[[CallerIdentity], LlmCall], check: Callable[[CallerIdentity, Policy], None], *, now: datetime
) -> tuple[LlmCall, CallerIdentity]:
    """Write the row of a call that may leave, or that of its refusal. One call of a sandbox at a time: so no more than may be
    under way are, however many are asked for at once."""
    with transaction.atomic():
        sql.lock_rows(Sandbox, SLOT_CONDITION_SQL, slot)
        who = identify_caller(slot, now=now)
        row = made(who)
        try:
            check(who, who.sandbox.rules)
        except CallRefused as why:
            _record_refusal(row, why)
            refused = why
        else:
            sql.insert(row)
            return row, who
    raise refused


def _build_row(who: CallerIdentity, call_id: str, path: str, *, now: datetime, **more: object) -> LlmCall:
    box = who.sandbox
    return LlmCall(
        call_id=call_id, sandbox=box, holder=who.holder, agent_did=box.agent_did, environment_id=box.environment_id,
        run_id=who.run, path=path[:200], started_at=now, deadline_at=now, **more,
    )  # fmt: skip


def _record_refusal(row: LlmCall, why: CallRefused) -> None:
    """Note a refusal. Of a program that does not stop asking, a few a minute say enough."""
    row.outcome, row.status, row.code, row.ended_at = LlmCall.Outcome.REFUSED, why.status, why.code, row.started_at
    same = LlmCall.objects.filter(holder=row.holder, outcome=row.outcome, started_at__gt=row.started_at - MINUTE)
    if same.count() < MAX_LOGGED_REFUSALS_PER_MINUTE:
        row.save(force_insert=True)


def _check_model(model: str, rules: Policy) -> None:
    may = rules.models or [settings.LLM_MODEL, *settings.LLM_MODELS]
    if not is_allowed(model, may):
        raise CallRefused(403, "model_not_allowed", f"This model may not be called here. These may: {', '.join(may)}.")


def _check_call_rate(who: CallerIdentity, rules: Policy) -> None:
    """Counted over rows: so it holds for several processes, and after a restart."""
    if who.started >= rules.calls_per_minute:
        raise CallRefused(429, "too_many_calls", f"At most {rules.calls_per_minute} calls a minute.")
    if who.under_way >= rules.most_calls_at_once:
        raise CallRefused(429, "too_many_at_once", f"At most {rules.most_calls_at_once} calls at once.")


def _check_spend_limit(who: CallerIdentity) -> None:
    """The limit may be passed by what the calls cost that are under way: at most as many as may be made at once."""
    limit = who.sandbox.llm_limit
    if limit is None:
        return
    if sum_spend(who.holder) >= limit:
        said = f"This lease may spend {limit.normalize():f} USD on model calls, and has."
        raise CallRefused(402, "spend_limit_reached", said)


def sum_spend(holder: UUID) -> Decimal:
    """What the model calls of a lease have cost so far, in USD. What has no price yet counts nothing."""
    total = LlmCall.objects.filter(holder=holder, cost__isnull=False).aggregate(total=Sum("cost"))["total"]
    return Decimal(total or 0)


# --- how it went ------------------------------------------------------------------------------------------------------


@dataclass
class CallResult:
    """What is known of a call when it is over."""

    outcome: LlmCall.Outcome
    status: int | None = None
    code: str = ""
    usage: TokenUsage | None = None
    cost: Decimal | None = None
    first_byte_at: datetime | None = None
    received_bytes: int = 0
    sent_bytes: int | None = None


def settle_call(row: LlmCall, end: CallResult, *, now: datetime) -> bool:
    """Close an open call, once. A price that its record has brought meanwhile stays."""
    changes: dict[str, object] = {
        "ended_at": now, "outcome": str(end.outcome), "status": end.status, "code": end.code[:64],
        "first_byte_at": end.first_byte_at, "received_bytes": end.received_bytes,
    }  # fmt: skip
    if end.sent_bytes is not None:
        changes["sent_bytes"] = end.sent_bytes
    known: dict[str, object] = {}
    if end.usage:
        known = {name: getattr(end.usage, name) for name in ("input_tokens", "cached_tokens", "output_tokens")}
        known |= {"model": end.usage.model} if end.usage.model else {}
    if end.cost is not None:
        known |= {"cost": end.cost, "priced": str(LlmCall.Priced.UPSTREAM)}
    assignments = [f"{name} = %s" for name in changes]
    assignments += [f"{name} = CASE WHEN recorded_at IS NULL THEN %s ELSE {name} END" for name in known]
    change = f"{', '.join(assignments)} WHERE id = %s AND ended_at IS NULL"
    return bool(sql.update(LlmCall, change, *changes.values(), *known.values(), row.pk))


def filter_held(pairs: Iterable[tuple[UUID, UUID]]) -> set[tuple[UUID, UUID]]:
    """Which of these sandboxes are alive, and held by these leases."""
    wanted = {*pairs}
    alive = Sandbox.objects.filter(pk__in={sandbox for sandbox, _ in wanted}, state__in=ALIVE_STATES, holder__isnull=False)
    return wanted & {*alive.values_list("pk", "holder")}


def extend_relay_deadlines(pks: Iterable[int], *, now: datetime) -> int:
    """These relay connections are still held."""
    return LlmCall.objects.filter(pk__in=[*pks], ended_at__isnull=True).update(deadline_at=now + RELAY_HEARTBEAT_TIMEOUT)


def find_overdue(*, now: datetime) -> QuerySet[LlmCall]:
    """Calls that should have been closed by now: whoever forwarded them has died."""
    return LlmCall.objects.filter(ended_at__isnull=True, deadline_at__lt=now).order_by("deadline_at")


def close_abandoned(*, now: datetime, limit: int = 200) -> int:
    """Close calls past their deadline; how many. What they cost may still be found in the upstream's records; until then
    they show as unpriced."""
    some = find_overdue(now=now).values_list("pk", flat=True)[:limit]
    return LlmCall.objects.filter(pk__in=list(some), ended_at__isnull=True).update(ended_at=now, outcome=LlmCall.Outcome.LOST)
