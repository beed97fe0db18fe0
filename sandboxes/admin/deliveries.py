"""Console pages of events and their deliveries to webhooks."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.contrib import admin
from django.db.models import Count, Q
from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString
from unfold.decorators import display

from sandboxes.admin.base.actions import AdminAction
from sandboxes.admin.base.changelist import KnownValuesFilter, ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_time_until,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.base.model_admin import ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.admin.base.owner_search import MAX_OWNERS_LISTED
from sandboxes.db import database_time
from sandboxes.formatting import pluralize
from sandboxes.models import Delivery, Event, Webhook
from sandboxes.models.webhooks import EventType
from sandboxes.webhooks import delivery, outbox

MAX_PANEL_ROWS = 12
PENDING_FILTER = Q(due_at__isnull=False)
STATE_BADGES = {"active": "ok", "paused": "draining", "disabled": "failing", "removed": "destroyed"}

REDELIVER_ACTION = AdminAction(
    title="Redeliver",
    warning="The event is sent again with the same webhook-id, so receivers can drop duplicates. Retried for up to three days.",
    done="queued for redelivery",
    refusal_reason="already pending, or the webhook was removed",
    legal=lambda row: row.due_at is None and row.webhook.removed_at is None,
    verb=lambda row, actor, reason, now: delivery.redeliver(row.pk, now=now, actor=actor),
    icon="send",
    permissions=("sandboxes.send_webhook",),
    enqueue=outbox.enqueue_delivery_task,
)


def render_webhook_state(row: Webhook) -> SafeString:
    """Render the state. An active webhook whose last delivery failed is not shown as healthy."""
    if row.state == "active" and row.failing_since:
        return render_badge("failing", "active, failing")
    return render_badge(STATE_BADGES[row.state], row.state)


class EventTypeFilter(KnownValuesFilter):
    known_values = EventType.values


@admin.register(Event)
class EventAdmin(ReadOnlyModelAdmin):
    list_display = ["event_label", "happened", "deliveries_summary"]
    list_filter = [("kind", EventTypeFilter)]
    search_fields = ["key__startswith"]
    search_help_text = "Lease or sandbox (prefix), or a complete id"
    ordering = ["-at", "-pk"]
    list_tabs = {"all": ListTab("All", "No events yet. Events appear when a webhook subscribes to them.")}
    fieldsets = build_all_fields_fieldset("id", "kind", "key", "at")
    change_form_outer_before_template = "admin/sandboxes/event/payload.html"

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        results, may_have_duplicates = super().get_search_results(request, queryset, search_term)
        if not results.exists():  # the term looked like an event id and was the id of a lease or sandbox
            results = queryset.filter(key__startswith=search_term.strip())
        return results, may_have_duplicates

    def annotate_rows(self, rows: list[Event]) -> None:
        deliveries = Delivery.objects.filter(event__in=[row.pk for row in rows]).order_by().values_list("event")
        annotated = deliveries.annotate(Count("pk"), Count("delivered_at"), Count("given_up_at"))
        by_event = {pk: counts for pk, *counts in annotated}
        for row in rows:
            row.delivery_counts = by_event.get(row.pk, [0, 0, 0])  # type: ignore[attr-defined]

    @display(description="Event")
    def event_label(self, row: Event) -> SafeString:
        return render_two_lines(row.kind, row.key)

    @display(description="Occurred")
    def happened(self, row: Event) -> SafeString | str:
        return render_time_ago(row.at)

    @display(description="Delivered")
    def deliveries_summary(self, row: Event) -> SafeString | str:
        total, delivered, failed = row.delivery_counts  # type: ignore[attr-defined]
        if not total:
            return "no subscribers"
        text = f"{delivered:,} of {pluralize(total, 'webhook', 'webhooks')}"
        return render_two_lines(text, render_badge("failed", f"{failed:,} failed")) if failed else text

    def get_page_context(self, request: HttpRequest, row: Event) -> dict[str, Any]:
        deliveries = [*row.deliveries.select_related("webhook").order_by("pk")[: MAX_PANEL_ROWS + 1]]
        all_url = build_changelist_url("sandboxes_delivery", slice="all", event__id__exact=row.pk)
        return {
            "facts": [
                SummaryField("Event type", row.kind),
                SummaryField("Occurred", render_time_ago(row.at), note=render_timestamp(row.at)),
                SummaryField("Key", row.key, note="unique within the event type"),
                SummaryField("Id", row.pk, note="webhook-id header of every attempt"),
            ],
            "body": json.dumps(json.loads(delivery.build_body(row)), indent=2, ensure_ascii=False),
            "deliveries": build_delivery_rows(deliveries[:MAX_PANEL_ROWS], name=lambda row: truncate_text(row.webhook.url)),
            "more": all_url if len(deliveries) > MAX_PANEL_ROWS else "",
            "empty_text": "No deliveries: no webhook was subscribed when the event occurred.",
        }


@admin.register(Delivery)
class DeliveryAdmin(ReadOnlyModelAdmin):
    list_display = ["event_label", "webhook_label", "state", "attempts", "response"]
    list_filter = [("event__kind", EventTypeFilter)]
    list_select_related = ["event", "webhook"]
    search_fields = ["event__key__startswith", "webhook__url__contains"]
    search_help_text = "Lease or sandbox (prefix), or part of the URL"
    ordering = ["-pk"]
    list_tabs = {
        "due": ListTab(
            "Pending",
            "No pending deliveries. Events are delivered within seconds; failures are retried.",
            lambda now: PENDING_FILTER,
        ),
        "given_up": ListTab(
            "Failed",
            "No failed deliveries. A delivery fails after three days of retries.",
            lambda now: Q(given_up_at__isnull=False),
        ),
        "delivered": ListTab("Delivered", "No successful deliveries yet.", lambda now: Q(delivered_at__isnull=False)),
        "all": ListTab("All", "No deliveries yet. Add a webhook to be notified of events."),
    }
    fieldsets = build_all_fields_fieldset(
        "id", "event", "webhook", "asked_at", "due_at", "tries", "delivered_at", "given_up_at", "last_status", "last_error"
    )
    row_actions = {"again": REDELIVER_ACTION}
    bulk_actions = {"again_all": REDELIVER_ACTION}

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Find the deliveries of the webhooks and events that match, see sandboxes.admin.base.owner_search."""
        term = search_term.strip()
        if len(term.split()) != 1:
            return super().get_search_results(request, queryset, search_term)
        webhooks = [*Webhook.objects.filter(url__contains=term).values_list("pk", flat=True)]
        events = [*Event.objects.filter(key__startswith=term).values_list("pk", flat=True)[: MAX_OWNERS_LISTED + 1]]
        if len(events) > MAX_OWNERS_LISTED:
            return super().get_search_results(request, queryset, search_term)
        return queryset.filter(Q(event__in=events) | Q(webhook__in=webhooks)), False

    @display(description="Event")
    def event_label(self, row: Delivery) -> SafeString:
        return render_two_lines(row.event.kind, row.event.key)

    @display(description="Webhook")
    def webhook_label(self, row: Delivery) -> str:
        return truncate_text(row.webhook.url)

    @display(description="State")
    def state(self, row: Delivery) -> SafeString:
        return render_two_lines(render_delivery_state(row), format_delivery_time(row, database_time.now()))

    @display(description="Attempts")
    def attempts(self, row: Delivery) -> str:
        return f"{row.tries:,}"

    @display(description="Last response")
    def response(self, row: Delivery) -> str:
        return truncate_text(row.last_error) or (str(row.last_status) if row.last_status else "–")

    def get_page_context(self, request: HttpRequest, row: Delivery) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("Event", render_admin_link("sandboxes_event", row.event_id, row.event.kind), note=row.event.key),
                SummaryField(
                    "Webhook",
                    render_admin_link("sandboxes_webhook", row.webhook_id, truncate_text(row.webhook.url, 60)),
                    note=render_webhook_state(row.webhook),
                ),
                SummaryField("State", render_delivery_state(row), note=format_delivery_time(row, database_time.now())),
                SummaryField("Attempts", f"{row.tries:,}", note="since the delivery was last requested"),
                SummaryField("Last response", row.last_status or "–", note=row.last_error, alarm=bool(row.last_error)),
                SummaryField("Occurred", render_time_ago(row.event.at), note=render_timestamp(row.event.at)),
            ]
        }


def render_delivery_state(row: Delivery) -> SafeString:
    if row.delivered_at:
        return render_badge("ok", "delivered")
    if row.given_up_at:
        return render_badge("failed", "failed")
    if row.claim:
        return render_badge("running", "sending")
    return render_badge("late", "retrying") if row.tries else render_badge("waiting", "pending")


def format_delivery_time(row: Delivery, now: datetime) -> SafeString | str:
    if row.due_at and not row.claim:
        return format_time_until(
            row.due_at, "due", "due now" if row.webhook.state == "active" else "sent when the webhook is resumed"
        )
    return render_time_ago(row.delivered_at or row.given_up_at, "")


@dataclass(frozen=True)
class DeliveryRow:
    """Row of the delivery panel on the page of an event or a webhook."""

    href: str
    title: str
    state: Any
    error: str


def build_delivery_rows(deliveries: Iterable[Delivery], *, name: Callable[[Delivery], str]) -> list[DeliveryRow]:
    return [
        DeliveryRow(
            reverse("admin:sandboxes_delivery_change", args=[delivery.pk]),
            name(delivery),
            render_delivery_state(delivery),
            delivery.last_error,
        )
        for delivery in deliveries
    ]
