"""Operators' pages on what happened and who was told: webhooks, events, deliveries."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils import timezone
from django.utils.safestring import SafeString
from unfold.decorators import action, display
from unfold.enums import ActionVariant
from unfold.widgets import UnfoldAdminCheckboxSelectMultipleWidget, UnfoldAdminTextInputWidget

from sandboxes.admin.base import (
    AdminAction,
    ConsoleModelAdmin,
    ListTab,
    ReadOnlyModelAdmin,
    ReasonForm,
    SummaryField,
    build_all_fields_fieldset,
    list_audit_entries,
)
from sandboxes.admin.formatting import (
    build_changelist_url,
    format_time_until,
    pluralize,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
    truncate_text,
)
from sandboxes.models import Delivery, Event, Webhook
from sandboxes.models.webhooks import NOT_REMOVED, SUBSCRIBABLE_EVENT_TYPES
from sandboxes.webhooks import delivery, outbox, subscriptions

MAX_PANEL_ROWS = 12  # newest entries of each list on a page
DUE_FILTER = Q(due_at__isnull=False)


def _send_test(row: Webhook, actor: str, why: str, now: datetime) -> bool:
    delivery.send_test_event(row, now=now, actor=actor)
    return True


def _rotate_secret(row: Webhook, actor: str, why: str, now: datetime) -> bool:
    row.new_secret = subscriptions.rotate_secret(row, now=now, actor=actor)  # type: ignore[attr-defined]
    return row.new_secret is not None  # type: ignore[attr-defined]


SEND_TEST_ACTION = AdminAction(
    title="Send a test",
    warning="An event that says only that is sent now, once, and signed. It takes up to ten seconds.",
    done="took the test",
    refusal_reason="it was removed",
    legal=lambda row: row.removed_at is None,
    verb=_send_test,
)
PAUSE_ACTION = AdminAction(
    title="Pause webhook",
    warning="What happens while it is paused is never sent there. What it was to be told before waits until it is resumed.",
    done="paused",
    refusal_reason="it is not told of anything",
    legal=lambda row: row.state == "active",
    verb=lambda row, actor, why, now: subscriptions.pause_webhook(row.pk, actor=actor),
)
RESUME_ACTION = AdminAction(
    title="Resume webhook",
    warning="It is told again what happens, first of what has waited. What was given up is sent by hand, from its own page.",
    done="resumed",
    refusal_reason="it is neither paused nor given up",
    legal=lambda row: row.state in ("paused", "disabled"),
    verb=lambda row, actor, why, now: subscriptions.resume_webhook(row.pk, now=now, actor=actor),
    after=outbox.enqueue_delivery_task,
)
ROTATE_SECRET_ACTION = AdminAction(
    title="Rotate secret",
    warning="A new secret signs from now on and is shown once. For a day, what is sent carries a signature by each of the two.",
    done="given a new secret",
    refusal_reason="somebody else has just rotated it, or removed the webhook",
    legal=lambda row: row.removed_at is None,
    verb=_rotate_secret,
)
REMOVE_ACTION = AdminAction(
    title="Remove webhook",
    warning="It is told of nothing any more, and its secret is destroyed. What it was told stays here for thirty days.",
    done="removed",
    refusal_reason="it was removed before",
    legal=lambda row: row.removed_at is None,
    verb=lambda row, actor, why, now: subscriptions.remove_webhook(row.pk, now=now, actor=actor),
)
RESEND_ACTION = AdminAction(
    title="Send again",
    warning="The same event is sent with the same id: whoever has taken it knows that. It is tried for up to three days.",
    done="to be sent again",
    refusal_reason="on its way, or its webhook was removed",
    legal=lambda row: row.due_at is None and row.webhook.removed_at is None,
    verb=lambda row, actor, why, now: delivery.redeliver(row.pk, now=now, actor=actor),
    after=outbox.enqueue_delivery_task,
)


class WebhookForm(forms.ModelForm):
    """What a webhook is for."""

    kinds = forms.MultipleChoiceField(
        label="Events",
        choices=[(kind, kind) for kind in SUBSCRIBABLE_EVENT_TYPES],
        required=False,
        widget=UnfoldAdminCheckboxSelectMultipleWidget,
        help_text="None chosen: all of them, and those that there will be.",
    )

    class Meta:
        model = Webhook
        fields = ["url", "kinds", "internal", "description"]
        help_texts = {"url": "https. http is for addresses of this machine. Nothing else is called in its place."}


class AddWebhookForm(WebhookForm):
    reason = forms.CharField(
        min_length=5,
        max_length=200,
        widget=UnfoldAdminTextInputWidget({"autocomplete": "off"}),
        help_text="Kept in the history, beside your name.",
    )


@admin.register(Webhook)
class WebhookAdmin(ConsoleModelAdmin):
    form = WebhookForm
    list_display = ["where", "wants", "state", "last", "waiting"]
    search_fields = ["url__contains", "description__contains"]
    search_help_text = "A part of the URL or of the description"
    ordering = ["-created_at", "-pk"]
    slices = {
        "current": ListTab("Current", "Nobody is told what happens here.", lambda now: NOT_REMOVED),
        "disabled": ListTab(
            "Given up", "No webhook was given up.", lambda now: NOT_REMOVED & Q(disabled_at__isnull=False)
        ),
        "paused": ListTab("Paused", "No webhook is paused.", lambda now: NOT_REMOVED & Q(active=False)),
        "all": ListTab("All", "There never was a webhook."),
    }  # fmt: skip
    labels = {"internal": "Its address is not public"}
    change_form_outer_before_template = "admin/sandboxes/webhook/told.html"
    acts = {
        "send_test": SEND_TEST_ACTION,
        "pause": PAUSE_ACTION,
        "resume": RESUME_ACTION,
        "rotate": ROTATE_SECRET_ACTION,
        "remove": REMOVE_ACTION,
    }
    actions_detail = ["send_test", "pause", "resume", "rotate", "remove"]

    def has_send_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("sandboxes.send_webhook")

    def has_manage_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("sandboxes.manage_webhook")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return self.has_manage_permission(request)

    def has_change_permission(self, request: HttpRequest, obj: Webhook | None = None) -> bool:
        return self.has_manage_permission(request) and not (obj and obj.removed_at)

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        return super().get_form(request, obj, change=change, **{"form": WebhookForm if obj else AddWebhookForm, **kwargs})

    def get_readonly_fields(self, request: HttpRequest, obj: Webhook | None = None) -> list[str]:
        return ["url"] if obj else []  # another address is another webhook, with a secret of its own

    def get_fieldsets(self, request: HttpRequest, obj: Webhook | None = None) -> Any:
        return [(None, {"fields": ["url", "kinds", "internal", "description", *([] if obj else ["reason"])]})]

    def complete(self, rows: list[Webhook]) -> None:
        found = Delivery.objects.filter(DUE_FILTER, webhook__in=[row.pk for row in rows]).order_by()
        due = dict(found.values_list("webhook").annotate(Count("pk")))
        for row in rows:
            row.due = due.get(row.pk, 0)  # type: ignore[attr-defined]

    @display(description="Webhook")
    def where(self, row: Webhook) -> SafeString | str:
        return render_two_lines(truncate_text(row.url), row.description) if row.description else truncate_text(row.url)

    @display(description="Events")
    def wants(self, row: Webhook) -> str:
        return ", ".join(row.kinds) or "all"

    @display(description="State")
    def state(self, row: Webhook) -> SafeString:
        return render_webhook_state(row)

    @display(description="Last try")
    def last(self, row: Webhook) -> SafeString | str:
        return (
            render_two_lines(render_time_ago(row.last_at), truncate_text(row.last_error) or f"answered {row.last_status}")
            if row.last_at
            else "never"
        )

    @display(description="To be sent")
    def waiting(self, row: Webhook) -> str:
        return f"{row.due:,}"  # type: ignore[attr-defined]

    def page(self, request: HttpRequest, row: Webhook) -> dict[str, Any]:
        everything = build_changelist_url("sandboxes_delivery", slice="all", webhook__id__exact=row.pk)
        due = Delivery.objects.filter(DUE_FILTER, webhook=row).count()
        signs = format_time_until(row.before_until, "the one before signs for", "") if row.sealed_before else ""
        latest = [*row.deliveries.select_related("event").order_by("-pk")[: MAX_PANEL_ROWS + 1]]
        return {
            "facts": [
                SummaryField("URL", truncate_text(row.url, 60), note=row.description),
                SummaryField("State", render_webhook_state(row), note=render_time_ago(row.removed_at or row.disabled_at, "")),
                SummaryField("Events", self.wants(row)),
                SummaryField("Last arrived", render_time_ago(row.last_delivered_at)),
                SummaryField(
                    "Last try",
                    render_time_ago(row.last_at),
                    note=row.last_error or (f"answered {row.last_status}" if row.last_status else ""),
                    alarm=bool(row.last_error) and row.removed_at is None,
                ),
                SummaryField(
                    "To be sent",
                    f"{due:,}",
                    href=build_changelist_url("sandboxes_delivery", slice="due", webhook__id__exact=row.pk),
                    note="" if row.state == "active" or not due else "once it is resumed",
                ),
                SummaryField(
                    "Secret", "destroyed" if row.removed_at else "kept encrypted", note=signs or "it cannot be shown again"
                ),
                SummaryField("Added", render_time_ago(row.created_at), note=f"by {row.created_by}" if row.created_by else ""),
            ],
            "deliveries": build_delivery_rows(latest[:MAX_PANEL_ROWS], name=lambda one: one.event.kind),
            "more": everything if len(latest) > MAX_PANEL_ROWS else "",
            "nothing": "It was told of nothing yet.",
            "done": list_audit_entries(row, MAX_PANEL_ROWS),
        }

    def construct_change_message(self, request: HttpRequest, form: Any, formsets: Any, add: bool = False) -> Any:
        return f"Add webhook: {form.cleaned_data['reason']}" if add else f"Change webhook: {', '.join(form.changed_data)}"

    def save_model(self, request: HttpRequest, obj: Webhook, form: Any, change: bool) -> None:
        if change:
            return super().save_model(request, obj, form, change)
        row, secret = subscriptions.add_webhook(
            obj.url, obj.kinds, internal=obj.internal, description=obj.description, now=timezone.now(),
            actor=request.user.get_username(),
        )  # fmt: skip
        obj.pk = row.pk
        messages.warning(request, format_secret_message(secret))
        return None

    def changeform_view(
        self, request: HttpRequest, object_id: str | None = None, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        buttons = {"show_save_and_add_another": False, "show_save_and_continue": False}
        answer: HttpResponse = super().changeform_view(request, object_id, form_url, {**(extra_context or {}), **buttons})
        return answer

    def response_add(self, request: HttpRequest, obj: Webhook, post_url_continue: str | None = None) -> HttpResponse:
        messages.success(request, "The webhook is told of what happens from now on.")
        return HttpResponseRedirect(reverse("admin:sandboxes_webhook_change", args=[obj.pk]))

    def after(self, act: AdminAction, row: Webhook, form: ReasonForm) -> str:
        if secret := getattr(row, "new_secret", None):
            messages.warning(form.request, format_secret_message(secret))
        return super().after(act, row, form)

    @action(description="Send a test…", permissions=["send"], icon="send", dialog=SEND_TEST_ACTION.dialog)
    def send_test(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, SEND_TEST_ACTION, form)

    @action(description="Pause…", permissions=["send"], icon="pause", dialog=PAUSE_ACTION.dialog)
    def pause(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, PAUSE_ACTION, form)

    @action(description="Resume…", permissions=["send"], icon="play_arrow", dialog=RESUME_ACTION.dialog)
    def resume(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, RESUME_ACTION, form)

    @action(description="Rotate secret…", permissions=["manage"], icon="autorenew", dialog=ROTATE_SECRET_ACTION.dialog)
    def rotate(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, ROTATE_SECRET_ACTION, form)

    @action(
        description="Remove…", permissions=["manage"], icon="delete", variant=ActionVariant.DANGER, dialog=REMOVE_ACTION.dialog
    )
    def remove(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, REMOVE_ACTION, form)


def format_secret_message(secret: str) -> str:
    return f"Copy the new secret now, it is not shown again: {secret}"


STATE_BADGES = {"active": "ok", "paused": "draining", "disabled": "failing", "removed": "destroyed"}  # colours


def render_webhook_state(row: Webhook) -> SafeString:
    return render_badge(STATE_BADGES[row.state], "given up" if row.state == "disabled" else row.state)


@admin.register(Event)
class EventAdmin(ReadOnlyModelAdmin):
    list_display = ["what", "happened", "told"]
    list_filter = ["kind"]
    search_fields = ["key__startswith"]
    search_help_text = "Lease, sandbox, or a whole id"
    ordering = ["-at", "-pk"]
    slices = {"all": ListTab("All", "Nothing happened yet that others want to know.")}
    fieldsets = build_all_fields_fieldset("id", "kind", "key", "at")
    change_form_outer_before_template = "admin/sandboxes/event/payload.html"

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        found, twice = super().get_search_results(request, queryset, search_term)
        return (found if found.exists() else queryset.filter(key__startswith=search_term.strip())), twice

    def complete(self, rows: list[Event]) -> None:
        found = Delivery.objects.filter(event__in=[row.pk for row in rows]).order_by().values_list("event")
        counts = found.annotate(Count("pk"), Count("delivered_at"), Count("given_up_at"))
        by = {pk: many for pk, *many in counts}
        for row in rows:
            row.delivery_counts = by.get(row.pk, [0, 0, 0])  # type: ignore[attr-defined]

    @display(description="Event")
    def what(self, row: Event) -> SafeString:
        return render_two_lines(row.kind, row.key)

    @display(description="Happened")
    def happened(self, row: Event) -> SafeString | str:
        return render_time_ago(row.at)

    @display(description="Told")
    def told(self, row: Event) -> SafeString | str:
        every, arrived, given_up = row.delivery_counts  # type: ignore[attr-defined]
        if not every:
            return "nobody listened"
        said = f"{arrived:,} of {pluralize(every, 'webhook', 'webhooks')}"
        return render_two_lines(said, render_badge("failed", f"{given_up:,} given up")) if given_up else said

    def page(self, request: HttpRequest, row: Event) -> dict[str, Any]:
        found = [*row.deliveries.select_related("webhook").order_by("pk")[: MAX_PANEL_ROWS + 1]]
        everything = build_changelist_url("sandboxes_delivery", slice="all", event__id__exact=row.pk)
        return {
            "facts": [
                SummaryField("Kind", row.kind),
                SummaryField("Happened", render_time_ago(row.at), note=render_timestamp(row.at)),
                SummaryField("What", row.key, note="within its kind, it is written down once"),
                SummaryField("Id", row.pk, note="the webhook-id of every try"),
            ],
            "body": json.dumps(json.loads(delivery.build_body(row)), indent=2, ensure_ascii=False),
            "deliveries": build_delivery_rows(found[:MAX_PANEL_ROWS], name=lambda one: truncate_text(one.webhook.url)),
            "more": everything if len(found) > MAX_PANEL_ROWS else "",
            "nothing": "No webhook wanted it when it happened.",
        }


@admin.register(Delivery)
class DeliveryAdmin(ReadOnlyModelAdmin):
    list_display = ["what", "where", "state", "tried", "answered"]
    list_filter = ["event__kind"]
    list_select_related = ["event", "webhook"]
    search_fields = ["event__key__startswith", "webhook__url__contains"]
    search_help_text = "Lease, sandbox, or a part of the URL"
    ordering = ["-pk"]
    slices = {
        "due": ListTab("To be sent", "Everybody was told of everything.", lambda now: DUE_FILTER),
        "given_up": ListTab("Given up", "Nothing was given up.", lambda now: Q(given_up_at__isnull=False)),
        "delivered": ListTab("Delivered", "Nothing has arrived yet.", lambda now: Q(delivered_at__isnull=False)),
        "all": ListTab("All", "Nobody was told of anything yet."),
    }
    fieldsets = build_all_fields_fieldset(
        "id", "event", "webhook", "asked_at", "due_at", "tries", "delivered_at", "given_up_at", "last_status", "last_error"
    )
    acts = {"again": RESEND_ACTION}
    actions_detail = ["again"]
    actions: ClassVar[list[str]] = ["again_all"]

    def has_send_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("sandboxes.send_webhook")

    @display(description="Event")
    def what(self, row: Delivery) -> SafeString:
        return render_two_lines(row.event.kind, row.event.key)

    @display(description="Webhook")
    def where(self, row: Delivery) -> str:
        return truncate_text(row.webhook.url)

    @display(description="State")
    def state(self, row: Delivery) -> SafeString:
        return render_two_lines(render_delivery_state(row), format_delivery_time(row, timezone.now()))

    @display(description="Tries")
    def tried(self, row: Delivery) -> str:
        return f"{row.tries:,}"

    @display(description="Last answer")
    def answered(self, row: Delivery) -> str:
        return truncate_text(row.last_error) or (str(row.last_status) if row.last_status else "–")

    def page(self, request: HttpRequest, row: Delivery) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("Event", render_admin_link("sandboxes_event", row.event_id, row.event.kind), note=row.event.key),
                SummaryField(
                    "Webhook",
                    render_admin_link("sandboxes_webhook", row.webhook_id, truncate_text(row.webhook.url, 60)),
                    note=render_webhook_state(row.webhook),
                ),
                SummaryField("State", render_delivery_state(row), note=format_delivery_time(row, timezone.now())),
                SummaryField("Tries", f"{row.tries:,}", note="since it was asked for last"),
                SummaryField("Last answer", row.last_status or "–", note=row.last_error, alarm=bool(row.last_error)),
                SummaryField("Happened", render_time_ago(row.event.at), note=render_timestamp(row.event.at)),
            ]
        }

    @action(description="Send again…", permissions=["send"], icon="send", dialog=RESEND_ACTION.dialog)
    def again(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, RESEND_ACTION, form)

    @action(description="Send again…", permissions=["send"])
    def again_all(self, request: HttpRequest, queryset: QuerySet[Delivery]) -> HttpResponse | None:
        return self.ask(request, queryset, RESEND_ACTION)


def render_delivery_state(row: Delivery) -> SafeString:
    if row.delivered_at:
        return render_badge("ok", "delivered")
    if row.given_up_at:
        return render_badge("failed", "given up")
    if row.claim:
        return render_badge("running", "on its way")
    return render_badge("late", "to be tried again") if row.tries else render_badge("waiting", "to be sent")


def format_delivery_time(row: Delivery, now: datetime) -> SafeString | str:
    if row.due_at and not row.claim:
        return format_time_until(
            row.due_at, "due", "due now" if row.webhook.state == "active" else "once its webhook is resumed"
        )
    return render_time_ago(row.delivered_at or row.given_up_at, "")


@dataclass(frozen=True)
class DeliveryRow:
    """A delivery on the page of its event or its webhook."""

    href: str
    what: str
    state: Any
    why: str


def build_delivery_rows(found: Iterable[Delivery], *, name: Callable[[Delivery], str]) -> list[DeliveryRow]:
    return [
        DeliveryRow(
            reverse("admin:sandboxes_delivery_change", args=[one.pk]), name(one), render_delivery_state(one), one.last_error
        )
        for one in found
    ]
