"""Console pages of model rates: token prices for calls that the upstream does not price."""

from collections import Counter
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.decorators import display
from unfold.widgets import UnfoldAdminDecimalFieldWidget

from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.fields import NormalizedDecimalField
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_age,
    format_usd,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.admin.base.scheduled_rates import build_delete_action
from sandboxes.db import database_time
from sandboxes.egress import model_pricing
from sandboxes.models import TokenKind, TokenRate
from sandboxes.models.token_rates import MILLION, check_rates, find_superseded, get_unit, save_rates

MAX_UNPRICED_CALLS_COUNTED = 1000
MAX_MODELS_SHOWN = 20
MATCH_PERIOD = timedelta(days=30)
PRICE_FIELDS = {f"{kind}_usd": kind for kind in TokenKind}
SHARED_FIELDS = ["pattern", "tier", "tokens_from", "valid_from", "source", "note"]


class ModelRateForm(forms.ModelForm):
    """Prices of one model by kind. Each price becomes a row."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rates: list[TokenRate] = []

    def clean(self) -> dict[str, Any]:
        super().clean()
        fields = self.cleaned_data
        shared = {name: fields[name] for name in SHARED_FIELDS if name in fields}
        self.rates = [
            TokenRate(**shared, kind=kind, usd_per_million=fields[name] * MILLION / get_unit(kind)[0])
            for name, kind in PRICE_FIELDS.items()
            if fields.get(name) is not None
        ]
        if not self.rates and not self.errors:
            raise ValidationError("State at least one price.")
        if not self.errors:
            try:
                check_rates(self.rates)
            except ValidationError as error:
                raise ValidationError(error.messages) from None
        return fields


def _build_price_field(kind: TokenKind) -> forms.Field:
    name = "Web searches" if kind == TokenKind.WEB_SEARCH else kind.label.capitalize()
    return NormalizedDecimalField(
        label=f"{name}, USD per {get_unit(kind)[1]}", required=False, min_value=0, max_digits=15, decimal_places=9,
        widget=UnfoldAdminDecimalFieldWidget,
    )  # fmt: skip


ModelRateAddForm = type(
    "ModelRateAddForm", (ModelRateForm,), {name: _build_price_field(kind) for name, kind in PRICE_FIELDS.items()}
)


DELETE_RATE_ACTION = build_delete_action(
    TokenRate, dependent="price", refusal_reason="already in force; prices of calls depend on it"
)


@admin.register(TokenRate)
class ModelRateAdmin(ConsoleModelAdmin):
    list_display = ["model_label", "kind_label", "price", "since", "condition", "source"]
    search_fields = ["pattern__startswith"]
    search_help_text = "Model (prefix)"
    ordering = ["pattern", "kind", "tier", "tokens_from", "-valid_from"]
    list_tabs = {
        "all": ListTab("All", "No model rates yet. Without one, a call is unpriced unless the upstream reports its cost."),
        "later": ListTab("Scheduled", "No scheduled rates: every rate is in force.", lambda now: Q(valid_from__gt=now)),
        "superseded": ListTab(
            "Superseded",
            "No superseded rates: no price was corrected by a rate with the same start.",
            lambda now: Q(pk__in=find_superseded().values("pk")),
        ),
    }
    fields = ["pattern", "kind", "usd_per_million", "tier", "tokens_from", "valid_from", "source", "note", "created_at"]
    row_actions = {"withdraw": DELETE_RATE_ACTION}

    def has_change_permission(self, request: HttpRequest, obj: TokenRate | None = None) -> bool:
        """Rates are not edited: a price that changes is a new row, and a scheduled one may be deleted."""
        return obj is None and bool(super().has_change_permission(request, obj))

    def get_fields(self, request: HttpRequest, obj: TokenRate | None = None) -> Any:
        if obj is not None:
            return super().get_fields(request, obj)
        return ["pattern", *PRICE_FIELDS, *(name for name in SHARED_FIELDS if name != "pattern")]

    def get_form(self, request: HttpRequest, obj: TokenRate | None = None, change: bool = False, **kwargs: Any) -> Any:
        return super().get_form(request, obj, change, **(kwargs if change else {"form": ModelRateAddForm, **kwargs}))

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        return {"valid_from": database_time.now().replace(microsecond=0), **super().get_changeform_initial_data(request)}

    def save_model(self, request: HttpRequest, obj: TokenRate, form: Any, change: bool) -> None:
        """Save a row for each price. The first one stands for all of them in the message and the log."""
        save_rates(form.rates)
        obj.pk, obj.kind, obj.usd_per_million = form.rates[0].pk, form.rates[0].kind, form.rates[0].usd_per_million

    @display(description="Model")
    def model_label(self, row: TokenRate) -> SafeString:
        return render_two_lines(
            format_html('<span class="lh-nowrap">{}</span>', row.pattern), "pattern" if row.is_pattern else ""
        )

    @display(description="Kind")
    def kind_label(self, row: TokenRate) -> SafeString:
        return render_two_lines(row.get_kind_display(), _describe_condition(row))

    @display(description="Price")
    def price(self, row: TokenRate) -> str:
        return f"{format_usd(row.stated_usd)} USD per {row.unit_name}"

    @display(description="Valid from")
    def since(self, row: TokenRate) -> SafeString | str:
        left = row.valid_from - database_time.now()
        return (
            render_timestamp(row.valid_from, f"in {format_age(left)}")
            if left > timedelta(0)
            else render_time_ago(row.valid_from)
        )

    def get_queryset(self, request: HttpRequest) -> QuerySet[TokenRate]:
        superseded = Exists(find_superseded(TokenRate.objects.filter(pk=OuterRef("pk"))))
        return super().get_queryset(request).annotate(is_superseded=superseded)

    @display(description="State")
    def condition(self, row: TokenRate) -> SafeString:
        if getattr(row, "is_superseded", False):
            return render_badge("older", "superseded")
        return render_badge("ok", "in force") if row.valid_from <= database_time.now() else render_badge("waiting", "scheduled")

    def get_page_context(self, request: HttpRequest, row: TokenRate) -> dict[str, Any]:
        now = database_time.now()
        waiting = model_pricing.count_priceable(row.pattern, now, MAX_UNPRICED_CALLS_COUNTED)
        models = model_pricing.find_matched_models(row.pattern, since=now - MATCH_PERIOD, now=now)
        others = TokenRate.objects.filter(pattern=row.pattern).exclude(pk=row.pk)
        add = reverse("admin:sandboxes_tokenrate_add", query={"pattern": row.pattern, "tier": row.tier})
        another = format_html('<a class="lh-link" href="{}">Add a new rate</a>', add)
        return {
            "facts": [
                SummaryField("State", self.condition(row), note=another if self.has_add_permission(request) else ""),
                SummaryField("Price", self.price(row), note=_describe_condition(row)),
                SummaryField("Valid from", self.since(row), note=render_timestamp(row.valid_from)),
                SummaryField("Models, last 30 days", f"{len(models):,}", note=_list_models(models)),
                SummaryField(
                    "Unpriced calls",
                    f"{waiting:,}" if waiting < MAX_UNPRICED_CALLS_COUNTED else f"{MAX_UNPRICED_CALLS_COUNTED:,} or more",
                    note="priced by the next sweep with the rates of this model",
                    href=build_changelist_url("sandboxes_llmcall", slice="unpriced"),
                ),
                SummaryField("Other rates of this model", f"{others.count():,}", note=_list_rates(others)),
            ]
        }


def _describe_condition(row: TokenRate) -> str:
    size = f"from {row.tokens_from:,} input tokens" if row.tokens_from else ""
    return ", ".join(filter(None, [f"tier {row.tier}" if row.tier else "", size]))


def _list_models(models: Counter[str]) -> str:
    """List the models with the most calls."""
    listed = [f"{model}: {calls:,}" for model, calls in models.most_common(MAX_MODELS_SHOWN)]
    further = [f"{len(models) - len(listed):,} more"] if len(models) > len(listed) else []
    return ", ".join([*listed, *further])


def _list_rates(rates: Any) -> SafeString:
    parts = [
        (
            render_admin_link("sandboxes_tokenrate", rate.pk, str(rate).removeprefix(f"{rate.pattern}, ")),
            format_usd(rate.stated_usd),
        )
        for rate in rates[:MAX_MODELS_SHOWN]
    ]
    return format_html_join("; ", "{} {}", parts)
