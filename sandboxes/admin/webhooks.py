"""Console pages of webhooks."""

from datetime import datetime
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import Count, Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.safestring import SafeString
from unfold.decorators import display
from unfold.widgets import UnfoldAdminCheckboxSelectMultipleWidget, UnfoldAdminTextInputWidget

from sandboxes.admin.base.actions import REASON_HELP_TEXT, AdminAction, ReasonForm
from sandboxes.admin.base.audit import get_actor, list_audit_entries
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_time_until,
    render_time_ago,
    render_two_lines,
    truncate_text,
)
from sandboxes.admin.base.model_admin import ConsoleModelAdmin
from sandboxes.admin.deliveries import PENDING_FILTER, build_delivery_rows, render_webhook_state
from sandboxes.audit import Actor
from sandboxes.db import database_time
from sandboxes.formatting import pluralize
from sandboxes.models import Delivery, Webhook
from sandboxes.models.webhooks import NOT_REMOVED, SUBSCRIBABLE_EVENT_TYPES
from sandboxes.webhooks import delivery, outbox, subscriptions

MAX_PANEL_ROWS = 12


def _send_test(row: Webhook, actor: Actor, reason: str, now: datetime) -> bool:
    delivery.send_test_event(row, now=now, actor=actor)
    return True


def _rotate_secret(row: Webhook, actor: Actor, reason: str, now: datetime) -> bool:
    row.new_secret = subscriptions.rotate_secret(row, now=now, actor=actor)  # type: ignore[attr-defined]
    return row.new_secret is not None  # type: ignore[attr-defined]


def _show_secret(row: Webhook, form: ReasonForm) -> str:
    """Show the new secret once, if this call rotated it, and return the URL of the webhook's page."""
    if secret := getattr(row, "new_secret", None):
        messages.warning(form.request, format_secret_message(secret))
    return reverse("admin:sandboxes_webhook_change", args=[row.pk])


SEND_TEST_ACTION = AdminAction(
    title="Send a test",
    warning="A signed test event is sent once, now. This takes up to ten seconds.",
    done="accepted the test event",
    refusal_reason="removed",
    legal=lambda row: row.removed_at is None,
    verb=_send_test,
    icon="send",
    permissions=("sandboxes.send_webhook",),
)
PAUSE_ACTION = AdminAction(
    title="Pause webhook",
    warning="Events that occur while the webhook is paused are never sent to it. Pending deliveries wait until it is resumed.",
    done="paused",
    refusal_reason="not active",
    legal=lambda row: row.state == "active",
    verb=lambda row, actor, reason, now: subscriptions.pause_webhook(row, now=now, actor=actor),
    icon="pause",
    permissions=("sandboxes.send_webhook",),
    button="Pause",
)
RESUME_ACTION = AdminAction(
    title="Resume webhook",
    warning="Pending deliveries are sent first, then new events. Failed deliveries must be redelivered from their own pages.",
    done="resumed",
    refusal_reason="neither paused nor disabled",
    legal=lambda row: row.state in ("paused", "disabled"),
    verb=lambda row, actor, reason, now: subscriptions.resume_webhook(row, now=now, actor=actor),
    enqueue=outbox.enqueue_delivery_task,
    permissions=("sandboxes.send_webhook",),
    button="Resume",
)
ROTATE_SECRET_ACTION = AdminAction(
    title="Rotate secret",
    warning="A new secret signs from now on and is shown once. For one day, requests carry signatures of both secrets.",
    done="given a new secret",
    refusal_reason="just rotated by another operator, or removed",
    legal=lambda row: row.removed_at is None,
    verb=_rotate_secret,
    icon="autorenew",
    permissions=("sandboxes.manage_webhook",),
    get_next_url=_show_secret,
)
REMOVE_ACTION = AdminAction(
    title="Remove webhook",
    warning="No further events are sent, and the secret is destroyed. Past deliveries stay visible for thirty days.",
    done="removed",
    refusal_reason="already removed",
    legal=lambda row: row.removed_at is None,
    verb=lambda row, actor, reason, now: subscriptions.remove_webhook(row, now=now, actor=actor),
    icon="delete",
    permissions=("sandboxes.manage_webhook",),
    danger=True,
    button="Remove",
)


class WebhookForm(forms.ModelForm):
    """Address and subscribed events of a webhook."""

    kinds = forms.MultipleChoiceField(
        label="Events",
        choices=[(kind, kind) for kind in SUBSCRIBABLE_EVENT_TYPES],
        required=False,
        widget=UnfoldAdminCheckboxSelectMultipleWidget,
        help_text="Leave all unchecked to receive every event, including types added later.",
    )

    class Meta:
        model = Webhook
        fields = ["url", "kinds", "internal", "description"]
        help_texts = {
            "url": "Must use https; http is accepted for loopback addresses only. Redirects are not followed.",
            "internal": "Allow an address of this machine or of a private network.",
            "description": "Recipient and purpose.",
        }


class AddWebhookForm(WebhookForm):
    """Form for a new webhook, with a reason for the history."""

    reason = forms.CharField(
        min_length=5,
        max_length=200,
        widget=UnfoldAdminTextInputWidget({"autocomplete": "off"}),
        help_text=REASON_HELP_TEXT,
    )


@admin.register(Webhook)
class WebhookAdmin(ConsoleModelAdmin):
    form = WebhookForm
    list_display = ["webhook_label", "subscriptions", "state", "last", "pending_count"]
    search_fields = ["url__contains", "description__contains"]
    search_help_text = "Part of the URL or of the description"
    ordering = ["-created_at", "-pk"]
    list_tabs = {
        "current": ListTab(
            "Current",
            "No webhooks. Add one to be notified of events such as ended leases or exhausted budgets.",
            lambda now: NOT_REMOVED,
        ),
        "disabled": ListTab(
            "Disabled",
            "No disabled webhooks. One is disabled after failing for too long or answering 410 Gone.",
            lambda now: NOT_REMOVED & Q(disabled_at__isnull=False),
        ),
        "paused": ListTab("Paused", "No paused webhooks.", lambda now: NOT_REMOVED & Q(active=False)),
        "all": ListTab("All", "No webhooks yet. Add one to be notified of events."),
    }
    labels = {"internal": "Internal address"}
    change_form_outer_before_template = "admin/sandboxes/webhook/deliveries.html"
    row_actions = {
        "send_test": SEND_TEST_ACTION,
        "pause": PAUSE_ACTION,
        "resume": RESUME_ACTION,
        "rotate": ROTATE_SECRET_ACTION,
        "remove": REMOVE_ACTION,
    }

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("sandboxes.manage_webhook")

    def has_change_permission(self, request: HttpRequest, obj: Webhook | None = None) -> bool:
        return request.user.has_perm("sandboxes.manage_webhook") and not (obj and obj.removed_at)

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        return super().get_form(request, obj, change=change, **{"form": WebhookForm if obj else AddWebhookForm, **kwargs})

    def get_readonly_fields(self, request: HttpRequest, obj: Webhook | None = None) -> list[str]:
        return ["url"] if obj else []  # a different address needs a webhook and a secret of its own

    def get_fieldsets(self, request: HttpRequest, obj: Webhook | None = None) -> Any:
        return [(None, {"fields": ["url", "kinds", "internal", "description", *([] if obj else ["reason"])]})]

    def annotate_rows(self, rows: list[Webhook]) -> None:
        pending = Delivery.objects.filter(PENDING_FILTER, webhook__in=[row.pk for row in rows]).order_by()
        counts = dict(pending.values_list("webhook").annotate(Count("pk")))
        for row in rows:
            row.pending = counts.get(row.pk, 0)  # type: ignore[attr-defined]

    @display(description="Webhook")
    def webhook_label(self, row: Webhook) -> SafeString | str:
        return render_two_lines(truncate_text(row.url), row.description) if row.description else truncate_text(row.url)

    @display(description="Events")
    def subscriptions(self, row: Webhook) -> str:
        return ", ".join(row.kinds) or "all"

    @display(description="State")
    def state(self, row: Webhook) -> SafeString:
        return render_webhook_state(row)

    @display(description="Last attempt")
    def last(self, row: Webhook) -> SafeString | str:
        return (
            render_two_lines(render_time_ago(row.last_at), truncate_text(row.last_error) or f"HTTP {row.last_status}")
            if row.last_at
            else "never"
        )

    @display(description="Pending")
    def pending_count(self, row: Webhook) -> str:
        return f"{row.pending:,}"  # type: ignore[attr-defined]

    def get_page_context(self, request: HttpRequest, row: Webhook) -> dict[str, Any]:
        all_url = build_changelist_url("sandboxes_delivery", slice="all", webhook__id__exact=row.pk)
        pending = Delivery.objects.filter(PENDING_FILTER, webhook=row).count()
        overlap = format_time_until(row.before_until, "previous secret expires", "") if row.sealed_before else ""
        latest = [*row.deliveries.select_related("event").order_by("-pk")[: MAX_PANEL_ROWS + 1]]
        return {
            "facts": [
                SummaryField("URL", truncate_text(row.url, 60), note=row.description),
                SummaryField("State", render_webhook_state(row), note=render_time_ago(row.removed_at or row.disabled_at, "")),
                SummaryField("Events", self.subscriptions(row)),
                SummaryField("Last delivered", render_time_ago(row.last_delivered_at)),
                SummaryField(
                    "Last attempt",
                    render_time_ago(row.last_at),
                    note=row.last_error or (f"HTTP {row.last_status}" if row.last_status else ""),
                    alarm=bool(row.last_error) and row.removed_at is None,
                ),
                *(
                    [
                        SummaryField(
                            "Failing since",
                            render_time_ago(row.failing_since),
                            note=pluralize(row.failures, "failed attempt", "failed attempts")
                            + format_time_until(row.retry_at, ", the next", ""),
                            alarm=row.state == "active",
                        )
                    ]
                    if row.failing_since
                    else []
                ),
                SummaryField(
                    "Pending deliveries",
                    f"{pending:,}",
                    href=build_changelist_url("sandboxes_delivery", slice="due", webhook__id__exact=row.pk),
                    note="" if row.state == "active" or not pending else "sent when the webhook is resumed",
                ),
                SummaryField(
                    "Secret", "destroyed" if row.removed_at else "stored encrypted", note=overlap or "cannot be shown again"
                ),
                SummaryField("Added", render_time_ago(row.created_at), note=f"by {row.created_by}" if row.created_by else ""),
            ],
            "deliveries": build_delivery_rows(latest[:MAX_PANEL_ROWS], name=lambda delivery: delivery.event.kind),
            "more": all_url if len(latest) > MAX_PANEL_ROWS else "",
            "empty_text": "No deliveries yet. One is recorded for each event that matches the subscription.",
            "audit": list_audit_entries(row, MAX_PANEL_ROWS),
        }

    def construct_change_message(self, request: HttpRequest, form: Any, formsets: Any, add: bool = False) -> Any:
        return f"Add webhook: {form.cleaned_data['reason']}" if add else f"Change webhook: {', '.join(form.changed_data)}"

    def save_model(self, request: HttpRequest, obj: Webhook, form: Any, change: bool) -> None:
        if change:
            return super().save_model(request, obj, form, change)
        row, secret = subscriptions.add_webhook(
            obj.url, obj.kinds, internal=obj.internal, description=obj.description, now=database_time.now(),
            actor=get_actor(request),
        )  # fmt: skip
        obj.pk = row.pk
        messages.warning(request, format_secret_message(secret))
        return None

    def changeform_view(
        self, request: HttpRequest, object_id: str | None = None, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        buttons = {"show_save_and_add_another": False, "show_save_and_continue": False}
        response: HttpResponse = super().changeform_view(request, object_id, form_url, {**(extra_context or {}), **buttons})
        return response

    def response_add(self, request: HttpRequest, obj: Webhook, post_url_continue: str | None = None) -> HttpResponse:
        messages.success(request, "Webhook added. It receives events that occur from now on.")
        return HttpResponseRedirect(reverse("admin:sandboxes_webhook_change", args=[obj.pk]))


def format_secret_message(secret: str) -> str:
    return f"Copy the new secret now; it is not shown again: {secret}"
