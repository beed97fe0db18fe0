"""Console pages of budgets."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from unfold.contrib.filters.admin import ChoicesRadioFilter
from unfold.decorators import display
from unfold.widgets import UnfoldAdminTextInputWidget

from billing import budgets
from billing.admin.budget_usage import (
    build_forecast_fields,
    compute_percent_spent,
    describe_exhaustion,
    format_amount,
    format_limit,
    format_percents,
    format_usage,
    get_level,
    render_budget_state,
    render_gauge,
    render_reset_time,
)
from billing.admin.overshoot import describe_overshoot
from billing.admin.top_ups import TOP_UP_ACTION
from billing.models import HOUSE_ACCOUNT_NAME, Account, Budget
from billing.models.budgets import UTC_ZONE_NAME, Period, Scope, Unit, get_default_warn_percents
from sandboxes.admin.base.actions import AdminAction
from sandboxes.admin.base.audit import list_audit_entries
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.fields import DurationOrZeroField
from sandboxes.admin.base.formatting import (
    SummaryField,
    format_duration,
    format_usd,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_time_since,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.admin.base.registry import get_reference, render_holders
from sandboxes.db import database_time
from sandboxes.formatting import suggest_match
from sandboxes.models import Event
from sandboxes.models.webhooks import EventType

MAX_PANEL_ROWS = 10
REFERENCE_KINDS = {
    Scope.AGENT: "agent",
    Scope.KEY: "api_key",
    Scope.ENVIRONMENT_TYPE: "environment_type",
    Scope.PROJECT: "project",
}

DEACTIVATE_ACTION = AdminAction(
    title="Deactivate budget",
    warning="The budget no longer refuses or ends leases and sends no warnings. It can be activated again.",
    done="deactivated",
    refusal_reason="already inactive",
    legal=lambda budget: budget.active,
    verb=lambda budget, actor, reason, now: budgets.set_active(budget.pk, active=False, now=now),
    icon="toggle_off",
    permissions=("billing.change_budget",),
    button="Deactivate",
)
ACTIVATE_ACTION = AdminAction(
    title="Activate budget",
    warning="All spending of the present period counts at once, including spending while the budget was inactive.",
    done="activated",
    refusal_reason="already active",
    legal=lambda budget: not budget.active,
    verb=lambda budget, actor, reason, now: budgets.set_active(budget.pk, active=True, now=now),
    icon="toggle_on",
    permissions=("billing.change_budget",),
    button="Activate",
)


class PercentListField(forms.Field):
    """Percentages, separated by commas."""

    widget = UnfoldAdminTextInputWidget

    def prepare_value(self, value: Any) -> Any:
        return ", ".join(map(str, value)) if isinstance(value, list) else value

    def to_python(self, value: Any) -> list[int]:
        parts = [part.strip() for part in (value or "").split(",")] if (value or "").strip() else []
        if not all(part.isascii() and part.isdigit() for part in parts):
            raise ValidationError("Enter whole numbers, separated by commas.")
        return sorted({int(part) for part in parts})


class BudgetForm(forms.ModelForm):
    """Budget whose subject must exist. An agent may be named before its first lease."""

    warn_percents = PercentListField(
        label="Warn at (%)", required=False, initial=get_default_warn_percents,
        help_text="Send a warning at these shares of the amount: numbers separated by commas.",
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "scope" in self.fields:  # absent on read-only pages
            scope: Any = self.fields["scope"]
            scope.choices = [(value, capfirst(label)) for value, label in scope.choices]
            self.fields["subject"].help_text = (
                "DID of an agent, number or prefix of an API key, name of an environment type, an account or a project. "
                "Leave empty for everything. All but agents must exist; an agent may be named before it joins."
            )
            self.fields["hard"].help_text = (
                "Refuse new leases and end active ones; for a model or in tokens, refuse model calls. "
                "Otherwise only warnings are sent."
            )
            self.fields[
                "grace"
            ].help_text = 'Time for running sandboxes to finish before their lease ends. For example "0", "30s", "5m" or "1h".'

    def clean_subject(self) -> str:
        subject, scope = self.cleaned_data["subject"].strip(), self.cleaned_data.get("scope")
        if not subject or scope is None:
            return subject
        if kind := REFERENCE_KINDS.get(scope):
            return get_reference(kind).clean(subject)
        if scope == Scope.ACCOUNT and subject != HOUSE_ACCOUNT_NAME and not Account.objects.filter(name=subject).exists():
            names = Account.objects.values_list("name", flat=True)
            raise ValidationError(f"There is no such account.{suggest_match(subject, names)}")
        return subject


def render_subjects(rows: Collection[Budget]) -> Mapping[int, Any]:
    """Map the id of each budget to a link to its subject. One query for each scope that occurs."""
    values = {scope: {row.subject for row in rows if row.scope == scope} for scope in Scope}
    links: dict[tuple[str, str], Any] = {}
    if names := values[Scope.ACCOUNT]:
        for account in Account.objects.filter(name__in=names):
            links[Scope.ACCOUNT, account.name] = render_admin_link("billing_account", account.pk, account)
    for scope, kind in REFERENCE_KINDS.items():
        if values[scope]:
            links |= {(scope, value): link for value, link in get_reference(kind).render_links(values[scope]).items()}
    return {row.pk: links.get((row.scope, row.subject), row.subject) for row in rows}


@admin.register(Budget)
class BudgetAdmin(ConsoleModelAdmin):
    form = BudgetForm
    list_display = ["budget_label", "subject_label", "spending", "reset_time", "strictness", "condition"]
    list_filter = [
        ("scope", ChoicesRadioFilter), ("unit", ChoicesRadioFilter), ("period", ChoicesRadioFilter), "hard",
    ]  # fmt: skip
    search_fields = ["subject__startswith"]
    search_help_text = "Agent, key, environment type, account or project (prefix)"
    ordering = ["pk"]
    list_tabs = {
        "all": ListTab("All", "No budgets yet. Add one to limit spending."),
        "warned": ListTab(
            "Warning",
            "No warned budgets: none is past its warning level, apart from exhausted ones.",
            lambda now: budgets.build_marked_filter("warned_for", now) & Q(exhausted_for__isnull=True),
        ),
        "exhausted": ListTab(
            "Exhausted", "No exhausted budgets.", lambda now: budgets.build_marked_filter("exhausted_for", now)
        ),
        "off": ListTab("Inactive", "No inactive budgets: every budget is active.", lambda now: Q(active=False)),
    }
    fieldsets = [
        ("Applies to", {"fields": ["scope", "subject", "model"]}),
        ("Amount", {"fields": ["amount", "unit", "period", "time_zone"]}),
        ("On exhaustion", {"fields": ["hard", "warn_percents", "grace"]}),
    ]
    formfield_overrides = {**ConsoleModelAdmin.formfield_overrides, models.DurationField: {"form_class": DurationOrZeroField}}
    labels = {"hard": "Hard limit", "warn_percents": "Warn at (%)", "grace": "Grace period"}
    change_form_outer_before_template = "admin/billing/budget/page.html"
    row_actions = {"top_up": TOP_UP_ACTION, "turn_off": DEACTIVATE_ACTION, "turn_on": ACTIVATE_ACTION}

    def save_model(self, request: HttpRequest, obj: Budget, form: Any, change: bool) -> None:
        now = database_time.now()
        if change:
            budgets.change_budget(obj.pk, {name: form.cleaned_data[name] for name in form.changed_data}, now=now)
            obj.refresh_from_db()
        else:
            budgets.create_budget(obj, now=now)
        kind = REFERENCE_KINDS.get(Scope(obj.scope))
        if kind and (warning := get_reference(kind).find_warning(obj.subject)):
            messages.warning(request, warning)

    def annotate_rows(self, rows: list[Budget]) -> None:
        subjects = render_subjects(rows)
        for row in rows:
            row.subject_link = subjects.get(row.pk, row.subject)  # type: ignore[attr-defined]

    @display(description="Budget")
    def budget_label(self, row: Budget) -> SafeString:
        zone = "" if row.time_zone == UTC_ZONE_NAME else f", {row.time_zone}"
        period = "lifetime" if row.period == Period.EVER else f"per {row.period}{zone}"
        return render_two_lines(f"{format_limit(row.amount, row)} {row.unit_label}", period)

    @display(description="Applies to")
    def subject_label(self, row: Budget) -> SafeString | str:
        scope = f"{capfirst(Scope(row.scope).label)}, model {row.model}" if row.model else capfirst(Scope(row.scope).label)
        return render_two_lines(scope, row.subject_link) if row.subject else scope  # type: ignore[attr-defined]

    @display(description="Spent")
    def spending(self, row: Budget) -> SafeString:
        now = database_time.now()
        return render_two_lines(render_gauge(row, now), f"{format_usage(row, now)}, {compute_percent_spent(row, now)} %")

    @display(description="Reset")
    def reset_time(self, row: Budget) -> SafeString | str:
        return render_reset_time(row, database_time.now())

    @display(description="On exhaustion")
    def strictness(self, row: Budget) -> SafeString | str:
        if row.hard and not row.counts_calls_alone:
            return render_two_lines("ends leases", f"grace period {format_duration(row.grace)}")
        return describe_exhaustion(row)

    @display(description="State")
    def condition(self, row: Budget) -> SafeString:
        return render_budget_state(row, database_time.now())

    def get_page_context(self, request: HttpRequest, row: Budget) -> dict[str, Any]:
        now = database_time.now()
        spenders = budgets.find_top_spenders(row, now=now, limit=MAX_PANEL_ROWS)
        count = budgets.find_open_tabs(row, now=now).count()
        leases = render_holders([tab.holder for tab, _ in spenders])
        return {
            "facts": self.build_fields(row, count, now),
            "spenders": [
                (leases[tab.holder], tab, render_time_since(tab.opened_at), format_amount(amount, row))
                for tab, amount in spenders
            ],
            "unit": row.unit_label,
            "open_tabs": count,
            "overshoot": describe_overshoot(row, count, now),
            "notifications": list_budget_events(row),
            "top_ups": [
                (each, f"{format_limit(each.amount, row)} {row.unit_label}") for each in row.top_ups.all()[:MAX_PANEL_ROWS]
            ],
            "audit": list_audit_entries(row, MAX_PANEL_ROWS),
        }

    def build_fields(self, row: Budget, count: int, now: datetime) -> list[SummaryField]:
        began, ends = budgets.get_period_bounds(row, now)
        spent = budgets.get_spent(row, now)
        reserves, zone = row.hard and not row.counts_calls_alone, UTC_ZONE_NAME if row.period == Period.HOUR else row.time_zone
        limit, topped_up = budgets.get_limit(row, now), budgets.get_topped_up(row, now)
        left = max(limit - spent, Decimal(0))
        of_limit = (
            f"of {format_limit(limit, row)}, {format_limit(topped_up, row)} of it topped up"
            if topped_up
            else f"of {format_limit(limit, row)}"
        )
        updated = format_html("updated {}", render_time_ago(row.spent_at)) if row.spent_at else "not computed yet"
        uncertain = "".join(f", {text}" for text in [str(budgets.get_uncertainty(row, now))] if text)
        subject = render_subjects([row]).get(row.pk, row.subject)
        scope = capfirst(Scope(row.scope).label) if row.subject else "every lease and unclaimed sandboxes"
        scope = f"model calls of {row.model or 'all models'}" if row.counts_calls_alone else scope
        reserved = f"{format_usd(settings.MINIMUM_USD)} USD" if row.unit == Unit.USD else format_duration(settings.MINIMUM_TIME)
        return [
            SummaryField(
                "State",
                render_budget_state(row, now),
                note=render_time_ago(row.exhausted_at) if get_level(row, now) == "exhausted" else "",
            ),
            SummaryField("Applies to", subject or "everything", note=scope),
            SummaryField(
                "Spent",
                format_usage(row, now),
                note=format_html("{} {} %, {}{}", render_gauge(row, now), compute_percent_spent(row, now), updated, uncertain),
                alarm=get_level(row, now) == "exhausted",
            ),
            SummaryField("Left", f"{format_amount(left, row)} {row.unit_label}", note=of_limit),
            *([build_reservation_field(row, now)] if reserves and row.active else []),
            *build_forecast_fields(row, now),
            SummaryField(
                "Period",
                f"{row.get_period_display()}, {zone}" if ends else "lifetime",
                note=format_html(
                    "since {}, {}",
                    f"{began:%Y-%m-%d %H:%M} UTC" if began.hour or row.period == Period.HOUR else f"{began:%Y-%m-%d}",
                    render_reset_time(row, now),
                )
                if ends
                else "no reset",
            ),
            SummaryField(
                "Warnings",
                f"at {format_percents(row.warn_percents)}" if row.warn_percents else "none",
                note=_format_warning_amounts(row, limit),
            ),
            SummaryField(
                "On exhaustion",
                describe_exhaustion(row),
                note="leases continue"
                if row.counts_calls_alone or not row.hard
                else f"running sandboxes have a grace period of {format_duration(row.grace)}",
            ),
            SummaryField(
                "Open leases",
                f"{count:,}",
                note=f"{reserved} reserved for each" if row.hard and not row.counts_calls_alone else "",
            ),
        ]


def _format_warning_amounts(row: Budget, limit: Decimal) -> str:
    amounts = ", ".join(format_limit(limit * percent / 100, row) for percent in row.warn_percents)
    return f"{amounts} {row.unit_label}" if amounts else ""


def build_reservation_field(row: Budget, now: datetime) -> SummaryField:
    """Build the amount reserved for the running sandboxes until they can be stopped."""
    delay = budgets.get_stop_delay(row)
    within = "for the next minute" if delay == budgets.SWEEP_INTERVAL else f"for the next {format_duration(delay)}"
    reserved = budgets.compute_reservation(row, now=now)
    return SummaryField(
        f"Reserved {within}",
        f"{format_amount(reserved, row)} {row.unit_label}",
        note="running sandboxes, with usage that is not metered yet",
        alarm=budgets.is_over(row, budgets.get_spent(row, now), reserved, now=now),
    )


@dataclass(frozen=True)
class BudgetEventRow:
    """Row of the notifications of a budget."""

    href: str
    kind: str
    badge: SafeString
    at: datetime
    spent: str


def list_budget_events(budget: Budget) -> list[BudgetEventRow]:
    """List the warning and exhaustion events of a budget, newest first."""
    kinds = {
        EventType.BUDGET_WARNING: render_badge("late", "warning"),
        EventType.BUDGET_EXHAUSTED: render_badge("failed", "exhausted"),
    }
    events = Event.objects.filter(kind__in=[*kinds], key__startswith=f"{budget.pk} ").order_by("-at", "kind")[:MAX_PANEL_ROWS]
    return [_build_event_row(event, kinds[EventType(event.kind)], budget) for event in events]


def _build_event_row(event: Event, badge: SafeString, budget: Budget) -> BudgetEventRow:
    payload = event.payload  # those of earlier versions have neither top-ups nor a percentage
    limit = format_limit(Decimal(payload["amount"]) + Decimal(payload.get("topped_up", 0)), budget)
    spent = f"{format_amount(Decimal(payload['spent']), budget)} of {limit} {budget.unit_label}"
    threshold = f", at {payload['percent']} %" if event.kind == EventType.BUDGET_WARNING and "percent" in payload else ""
    return BudgetEventRow(
        reverse("admin:sandboxes_event_change", args=[event.pk]), event.kind, badge, event.at, f"{spent}{threshold}"
    )
