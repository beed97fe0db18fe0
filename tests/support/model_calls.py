"""Model calls as the egress server opens and settles them, without a server."""

from datetime import datetime
from typing import Any
from uuid import uuid4

from leases.models import Lease
from sandboxes.egress import authorization, settlement
from sandboxes.egress.estimates import TokenEstimate
from sandboxes.egress.settlement import CallResult
from sandboxes.egress.token_usage import TokenUsage
from sandboxes.models import LlmCall, Sandbox
from tests.conftest import NOW
from tests.support.waiting import wait_until

CHAT_PATH = "/v1/chat/completions"
MODEL = "gpt-4o-mini"  # allowed by default
THOUSAND = TokenEstimate(400, 600)  # costs a cent at 10 USD per million tokens


def open_call(
    lease: Lease, estimate: TokenEstimate = THOUSAND, *, now: datetime = NOW, model: str = MODEL, path: str = CHAT_PATH,
    **fields: Any,
) -> LlmCall:  # fmt: skip
    """Open a call of a lease's sandbox. Raise CallRefused."""
    slot = Sandbox.objects.values_list("slot", flat=True).get(holder=lease.pk)
    assert slot is not None
    options = {"streamed": False, "size": 1} | fields
    return authorization.open_model_call(slot, uuid4().hex, path, model, estimate=estimate, now=now, **options)[0]


def close_call(
    row: LlmCall, tokens: int | None = 1000, *, now: datetime = NOW, outcome: str = "ok", model: str = "", **fields: Any
) -> LlmCall:
    """Settle a call with `tokens` in all, or with unknown usage, answered by `model`. Return the row as stored."""
    result = CallResult(LlmCall.Outcome(outcome), 200, estimate=THOUSAND, **fields)
    if tokens is not None:
        result.usage = TokenUsage()
        usage = {"prompt_tokens": tokens // 2, "completion_tokens": tokens - tokens // 2}
        result.usage.add({"model": model or row.model, "usage": usage})
        result.usage.is_final = True
    settlement.settle_call(row, result, now=now)
    row.refresh_from_db()
    return row


def wait_until_closed() -> None:
    """Wait until all calls of a server are settled, which happens shortly after the response has been read."""
    calls = LlmCall.objects.filter(outcome="open", status=None, call_id__regex="^[0-9a-f]{32}$")
    wait_until(lambda: not calls.exists(), "all calls are closed", within=60, every=0.005)
