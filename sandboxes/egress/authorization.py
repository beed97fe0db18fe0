"""Authorization and call log of the LLM egress proxy. Runs in the server's database threads.

The proxy identifies a sandbox by its socket slot and reads the current holder from the sandbox's row on every call. Lease
changes therefore need no notification, and a pre-warmed sandbox acquires an identity when it is claimed."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID

from django.conf import settings
from django.db import transaction

from sandboxes.call_limits import CallLimits
from sandboxes.db import sql
from sandboxes.egress import billing_accounts, model_pricing, spending
from sandboxes.egress.estimates import FREE_PATHS, TokenEstimate
from sandboxes.egress.refusals import CallRefused
from sandboxes.egress.request_filter import is_allowed
from sandboxes.egress.settlement import RELAY_HEARTBEAT_TIMEOUT, describe_server
from sandboxes.egress.spending import NO_LIMIT, CallReservation, Funds
from sandboxes.hosts import registry
from sandboxes.models import ALIVE_STATES, GONE_STATES, LlmCall, Policy, Sandbox

SETTLE_GRACE_PERIOD = timedelta(seconds=30)  # after a call's timeout, to record its result
MINUTE = timedelta(minutes=1)
MAX_LOGGED_REFUSALS_PER_MINUTE = 30  # per lease; further refusals are not stored
# Subqueries of the query for a sandbox: its open run if exactly one is open, and the recent and the open calls of its lease.
# Open calls are selected by `ended_at IS NULL`, which has an index, unlike the outcome: a lease may have made thousands of
# calls.
OPEN_RUN_SQL = """SELECT CASE count(*) WHEN 1 THEN max(CAST(id AS text) || ':' || CAST(attempt AS text)) END FROM sandboxes_run
    WHERE sandbox_id = sandboxes_sandbox.id AND ended_at IS NULL AND sandboxes_sandbox.open_runs > 0"""
CALLS_LAST_MINUTE_SQL = """SELECT count(*) FROM sandboxes_llmcall
    WHERE holder = sandboxes_sandbox.holder AND started_at > %s AND outcome <> 'refused'"""
CALLS_IN_FLIGHT_SQL = """SELECT count(*) FROM sandboxes_llmcall
    WHERE holder = sandboxes_sandbox.holder AND ended_at IS NULL AND deadline_at > %s"""
SLOT_CONDITION_SQL = "slot = %s AND state <> 'destroyed'"  # as in the partial unique index, which the planner then uses


@dataclass(frozen=True)
class CallerIdentity:
    """Sandbox, lease and run on whose behalf an upstream call is made."""

    sandbox: Sandbox
    holder: UUID
    run: UUID | None  # None unless exactly one run is open
    attempt: int  # of that run, above 1 for a repetition of a queued run
    billing_account: str  # that the agent belongs to at the time of the call
    calls_last_minute: int
    calls_in_flight: int
    funds: Funds = NO_LIMIT  # of the limits in USD and tokens that apply to the call

    def metadata(self, call_id: str) -> str:
        """Return the identity of a call as JSON, for the upstream's log. `attempt` is the retry number of the run."""
        fields = {
            "call": call_id, "run": str(self.run or ""), "attempt": self.attempt, "lease": str(self.holder),
            "agent": self.sandbox.agent_did, "environment": self.sandbox.environment_id,
            "billing_account": self.billing_account,
        }  # fmt: skip
        return json.dumps(fields)


def identify_caller(slot: int, *, now: datetime) -> CallerIdentity:
    """Return the identity bound to a socket slot, in one query. Raise CallRefused if no active lease holds the sandbox."""
    subqueries = (OPEN_RUN_SQL, CALLS_LAST_MINUTE_SQL, CALLS_IN_FLIGHT_SQL, billing_accounts.get_query())
    parameters = (now - MINUTE, now, now.astimezone(UTC).date(), slot)
    sandbox, values = sql.find_first_with_related(Sandbox, "policy", subqueries, SLOT_CONDITION_SQL, *parameters)
    if sandbox is None or sandbox.holder is None or sandbox.state not in ALIVE_STATES or _is_elsewhere(sandbox):
        raise _build_no_lease_refusal()
    run, calls_last_minute, calls_in_flight, account = values
    run_id, _, attempt = (run or "").partition(":")
    return CallerIdentity(
        sandbox,
        sandbox.holder,
        UUID(run_id) if run_id else None,
        int(attempt or 1),
        billing_account=account,
        calls_last_minute=calls_last_minute,
        calls_in_flight=calls_in_flight,
    )


def _is_elsewhere(sandbox: Sandbox) -> bool:
    """Return whether the sandbox of a slot is on another host, so that the caller must be a different sandbox.

    A host that was declared lost and returns may still run sandboxes whose slots now belong to sandboxes of other hosts."""
    return sandbox.host_id is not None and not registry.is_local(sandbox)


def lock_holder(caller: CallerIdentity) -> None:
    """Lock the sandbox row until commit. Raise CallRefused if the lease no longer holds the sandbox."""
    held_sandbox = Sandbox.objects.select_for_update(no_key=True).filter(
        pk=caller.sandbox.pk, holder=caller.holder, state__in=ALIVE_STATES
    )
    if not held_sandbox.exists():
        raise _build_no_lease_refusal()


def _build_no_lease_refusal() -> CallRefused:
    return CallRefused(403, "no_lease", "No active lease holds this sandbox.")


def open_model_call(
    slot: int, call_id: str, path: str, model: str, *, streamed: bool, size: int, estimate: TokenEstimate, now: datetime
) -> tuple[LlmCall, CallerIdentity]:
    """Authorize a model call and write its row before anything is sent upstream. `size` is the request body's, in bytes.

    The row reserves the estimated price and tokens. Raise CallRefused, after recording the refusal, if policy, call rate,
    budget, spend limit or token limit forbid the call."""
    reserved = _estimate_price(path, model, estimate, now=now)
    tokens = 0 if path in FREE_PATHS else estimate.total

    def build(caller: CallerIdentity) -> LlmCall:
        row = _build_row(
            caller, call_id, path, now=now, kind=LlmCall.Kind.LLM, model=model, requested_model=model, streamed=streamed,
            sent_bytes=size, reserved=reserved, reserved_tokens=tokens,
        )  # fmt: skip
        row.deadline_at = now + settings.LLM_TIMEOUT + SETTLE_GRACE_PERIOD
        return row

    def check(caller: CallerIdentity, policy: Policy) -> Funds:
        require_enabled(caller)
        if size > policy.largest_body_kib << 10:
            raise build_too_large_refusal(policy.largest_body_kib)
        _check_model(model, policy)
        _check_call_rate(caller, policy)
        _check_budget(caller, now)
        call = CallReservation(caller.holder, caller.sandbox.agent_did, model, reserved, tokens)
        return spending.require_funds(call, CallLimits.of(caller.sandbox), now=now)

    return _admit_call(slot, build, check, now=now)


def _estimate_price(path: str, model: str, estimate: TokenEstimate, *, now: datetime) -> Decimal | None:
    """Return the estimated price of a call in USD, 0 for a call that is free, and None for a model without a rate."""
    if not settings.LLM_URL or path in FREE_PATHS:
        return Decimal(0)
    rates = model_pricing.load_rates(model_pricing.find_candidate_names(model), at=now)
    return rates.estimate(estimate.input_tokens, estimate.output_tokens)


def require_enabled(caller: CallerIdentity) -> None:
    """Raise CallRefused if the lease of the sandbox was granted without the model proxy."""
    if not caller.sandbox.llm_enabled:
        raise CallRefused(403, "llm_proxy_disabled", "This run was started without the model proxy.")


def find_max_body_bytes(slot: int, *, now: datetime) -> int:
    """Return the policy's request size limit in bytes. Raise CallRefused if no active lease holds the sandbox."""
    return identify_caller(slot, now=now).sandbox.rules.largest_body_kib << 10


def build_too_large_refusal(max_kib: int) -> CallRefused:
    return CallRefused(413, "too_large", f"The request exceeds the limit of {max_kib} KiB.")


def open_relay_call(slot: int, call_id: str, path: str, *, now: datetime) -> tuple[LlmCall, CallerIdentity]:
    """Authorize a relay connection and write its row before connecting. Raise CallRefused, after recording the refusal."""

    def build(caller: CallerIdentity) -> LlmCall:
        row = _build_row(caller, call_id, path, now=now, kind=LlmCall.Kind.RELAY, streamed=True)
        row.deadline_at = now + RELAY_HEARTBEAT_TIMEOUT
        return row

    def check(caller: CallerIdentity, policy: Policy) -> Funds:
        if not settings.RELAY_URL:
            raise CallRefused(404, "no_relay", "No relay is configured.")
        if not policy.relay:
            raise CallRefused(403, "relay_not_allowed", "The policy of this sandbox does not allow the relay.")
        _check_call_rate(caller, policy)
        return NO_LIMIT

    return _admit_call(slot, build, check, now=now)


def _admit_call(
    slot: int, build: Callable[[CallerIdentity], LlmCall], check: Callable[[CallerIdentity, Policy], Funds], *, now: datetime
) -> tuple[LlmCall, CallerIdentity]:
    """Write the row of an admitted or refused call. `build` makes the row. `check` raises CallRefused, and returns the
    rest of the limits in USD.

    The lock on the sandbox's row serializes the calls of the sandbox, so that concurrent requests cannot exceed the limit on
    calls in flight."""
    with transaction.atomic():
        sql.lock_rows(Sandbox, SLOT_CONDITION_SQL, slot)
        caller = identify_caller(slot, now=now)
        row = build(caller)
        try:
            funds = check(caller, caller.sandbox.rules)
        except CallRefused as error:
            _record_refusal(row, error)
            refusal = error
        else:
            sql.insert(row)
            return row, replace(caller, funds=funds)
    raise refusal  # after the commit, because an exception inside would roll the refusal's row back


def _build_row(caller: CallerIdentity, call_id: str, path: str, *, now: datetime, **fields: object) -> LlmCall:
    sandbox = caller.sandbox
    return LlmCall(
        call_id=call_id, sandbox=sandbox, holder=caller.holder, agent_did=sandbox.agent_did,
        environment_id=sandbox.environment_id, run_id=caller.run, path=path, server=describe_server(),
        started_at=now, deadline_at=now, **fields,
    )  # fmt: skip


def _record_refusal(row: LlmCall, refusal: CallRefused) -> None:
    row.outcome, row.status, row.code, row.ended_at = LlmCall.Outcome.REFUSED, refusal.status, refusal.code, row.started_at
    recent = LlmCall.objects.filter(holder=row.holder, outcome=row.outcome, started_at__gt=row.started_at - MINUTE)
    if recent.count() < MAX_LOGGED_REFUSALS_PER_MINUTE:
        row.save(force_insert=True)


def _check_model(model: str, policy: Policy) -> None:
    patterns = policy.models or [settings.LLM_MODEL, *settings.LLM_MODELS]
    if not is_allowed(model, patterns):
        raise CallRefused(403, "model_not_allowed", f"This model is not allowed here. Allowed: {', '.join(patterns)}.")


def _check_call_rate(caller: CallerIdentity, policy: Policy) -> None:
    """Check the call limits against counts of rows: they hold for all processes together, and after a restart."""
    if caller.calls_last_minute >= policy.calls_per_minute:
        raise CallRefused(429, "too_many_calls", f"Rate limit reached: {policy.calls_per_minute} calls per minute.")
    if caller.calls_in_flight >= policy.most_calls_at_once:
        message = f"Concurrency limit reached: {policy.most_calls_at_once} calls in flight."
        raise CallRefused(429, "too_many_at_once", message)


def _check_budget(caller: CallerIdentity, now: datetime) -> None:
    blocked_at = caller.sandbox.llm_blocked_at
    if blocked_at and blocked_at <= now:
        message = "A budget of this lease is exhausted and its grace period is over. Model calls are refused."
        raise CallRefused(402, "budget_exhausted", message)


def set_call_blocks(blocked_at: Mapping[UUID, datetime]) -> int:
    """Set the time from which the model calls of each given holder are refused, and clear it for all other sandboxes.

    Return the number of changed sandboxes. Idempotent."""
    marked = Sandbox.objects.filter(llm_blocked_at__isnull=False).values_list("pk", "holder")
    cleared = [pk for pk, holder in marked if holder not in blocked_at]
    changed = Sandbox.objects.filter(pk__in=cleared).update(llm_blocked_at=None) if cleared else 0
    if not blocked_at:
        return changed
    live = Sandbox.objects.filter(holder__in=blocked_at).exclude(state__in=GONE_STATES)
    for sandbox in live.only("holder", "llm_blocked_at"):
        time = blocked_at[sandbox.holder] if sandbox.holder else None
        if sandbox.llm_blocked_at != time:
            changed += Sandbox.objects.filter(pk=sandbox.pk, holder=sandbox.holder).update(llm_blocked_at=time)
    return changed


def filter_held(pairs: Iterable[tuple[UUID, UUID]]) -> set[tuple[UUID, UUID]]:
    """Return the (sandbox, holder) pairs whose sandbox is alive and still held by the holder."""
    requested = {*pairs}
    alive = Sandbox.objects.filter(pk__in={sandbox for sandbox, _ in requested}, state__in=ALIVE_STATES, holder__isnull=False)
    return requested & {*alive.values_list("pk", "holder")}


def extend_relay_deadlines(pks: Iterable[int], *, now: datetime) -> int:
    """Extend the deadlines of open relay connections to RELAY_HEARTBEAT_TIMEOUT from now. Return the number extended."""
    return LlmCall.objects.filter(pk__in=[*pks], ended_at__isnull=True).update(deadline_at=now + RELAY_HEARTBEAT_TIMEOUT)
