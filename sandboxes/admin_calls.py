"""Operators' pages on what sandboxes asked their models. `leases` names the holders."""

from typing import Any

from django.contrib import admin
from django.db.models import F, Q
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.cells import ago, badge, link, span, stamp, two
from sandboxes.egress import records
from sandboxes.models import LlmCall
from sandboxes.pages import Fact, Facts, Held, Slice, all_fields

BADGES = {
    LlmCall.Outcome.OPEN: "open",
    LlmCall.Outcome.OK: "ok",
    LlmCall.Outcome.FAILED: "failed",
    LlmCall.Outcome.LOST: "lost",
    LlmCall.Outcome.REFUSED: "refused",
}


@admin.register(LlmCall)
class LlmCallAdmin(Held, Facts):
    list_display = ["asked", "result", "tokens", "price", "who", "when", "lasted"]
    list_filter = ["outcome", "priced"]
    list_select_related = ["sandbox"]
    search_fields = ["call_id__exact", "agent_did__startswith", "environment_id__startswith", "model__startswith"]
    search_help_text = "Agent, environment, model, or a whole call id"
    ordering = ["-started_at", "-pk"]
    slices = {
        "all": Slice("All", "No sandbox has asked a model yet."),
        "open": Slice("Running", "No model is being asked now.", lambda now: Q(ended_at__isnull=True)),
        "failed": Slice("Not ok", "Every call was answered.", lambda now: ~Q(outcome__in=["ok", "open"])),
        "unpriced": Slice(
            "Unpriced", "What each call cost is known.", lambda now: Q(cost__isnull=True, ended_at__isnull=False)
        ),
        "unmetered": Slice(
            "Unmetered",
            "No answered call is missing in the upstream's records.",
            lambda now: Q(pk__in=records.unmetered(now).values("pk")),
        ),
    }
    fieldsets = all_fields(
        "call_id", "sandbox", "holder", "agent_did", "environment_id", "run", "model", "started_at", "deadline_at",
        "ended_at", "outcome", "status", "code", "input_tokens", "cached_tokens", "output_tokens", "cost", "priced",
    )  # fmt: skip

    @display(description="Model")
    def asked(self, row: LlmCall) -> str:
        return row.model or "–"

    @display(description="Outcome")
    def result(self, row: LlmCall) -> SafeString:
        return badge(BADGES[LlmCall.Outcome(row.outcome)], row.get_outcome_display())

    @display(description="Tokens in / out")
    def tokens(self, row: LlmCall) -> str:
        return tokens(row)

    @display(description="USD")
    def price(self, row: LlmCall) -> str:
        return price(row)

    @display(description="Agent and environment")
    def who(self, row: LlmCall) -> SafeString:
        return two(row.agent_did, row.environment_id)

    @display(description="Started", ordering=F("started_at"))
    def when(self, row: LlmCall) -> SafeString | str:
        return ago(row.started_at)

    @display(description="Took")
    def lasted(self, row: LlmCall) -> str:
        return span(row.ended_at - row.started_at) if row.ended_at else "–"

    def page(self, request: HttpRequest, row: LlmCall) -> dict[str, Any]:
        return {
            "facts": [
                Fact("Outcome", self.result(row), note=f"{row.status or ''} {row.code}".strip()),
                Fact("Model", row.model or "–"),
                Fact("Tokens in / out", tokens(row), note=f"{row.cached_tokens:,} cached" if row.cached_tokens else ""),
                Fact("USD", price(row), note=row.get_priced_display()),
                Fact("Took", self.lasted(row)),
                Fact("Started", ago(row.started_at), note=stamp(row.started_at)),
                *([Fact("Sandbox", link("sandboxes_sandbox", row.sandbox_id, row.sandbox))] if row.sandbox_id else []),
                *([Fact("Run", link("sandboxes_run", row.run_id, "run"))] if row.run_id else []),
                self.agent(row.agent_did),
                *([self.holder(row.holder)] if row.holder else []),
            ]
        }


def tokens(row: LlmCall) -> str:
    """What went in and what came out, as far as the upstream has said it."""
    said = ["?" if count is None else f"{count:,}" for count in (row.input_tokens, row.output_tokens)]
    return " / ".join(said) if row.ended_at else "–"


def price(row: LlmCall) -> str:
    if row.cost is None:
        return "unpriced" if row.ended_at else "–"
    return f"{row.cost.normalize():f}"
