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

from sandboxes.admin.base import Act, Fact, Facts, Page, Reason, Slice, all_fields, done_to
from sandboxes.admin.formatting import ago, badge, counted, link, rows, shortened, stamp, two, until
from sandboxes.models import Delivery, Event, Webhook
from sandboxes.models.webhooks import CURRENT, TOLD
from sandboxes.webhooks import delivery, outbox, subscriptions

SHOWN = 12  # newest entries of each list on a page
DUE = Q(due_at__isnull=False)


def _test(row: Webhook, actor: str, why: str, now: datetime) -> bool:
    delivery.send_test(row, now=now, actor=actor)
    return True


def _rotate(row: Webhook, actor: str, why: str, now: datetime) -> bool:
    row.new_secret = subscriptions.rotate(row, now=now, actor=actor)  # type: ignore[attr-defined]
    return row.new_secret is not None  # type: ignore[attr-defined]


TEST = Act(
    title="Send a test",
    warning="An event that says only that is sent now, once, and signed. It takes up to ten seconds.",
    done="took the test",
    illegal="it was removed",
    legal=lambda row: row.removed_at is None,
    verb=_test,
)
PAUSE = Act(
    title="Pause webhook",
    warning="What happens while it is paused is never sent there. What it was to be told before waits until it is resumed.",
    done="paused",
    illegal="it is not told of anything",
    legal=lambda row: row.state == "active",
    verb=lambda row, actor, why, now: subscriptions.pause(row.pk, actor=actor),
)
RESUME = Act(
    title="Resume webhook",
    warning="It is told again what happens, first of what has waited. What was given up is sent by hand, from its own page.",
    done="resumed",
    illegal="it is neither paused nor given up",
    legal=lambda row: row.state in ("paused", "disabled"),
    verb=lambda row, actor, why, now: subscriptions.resume(row.pk, now=now, actor=actor),
    after=outbox.wake,
)
ROTATE = Act(
    title="Rotate secret",
    warning="A new secret signs from now on and is shown once. For a day, what is sent carries a signature by each of the two.",
    done="given a new secret",
    illegal="somebody else has just rotated it, or removed the webhook",
    legal=lambda row: row.removed_at is None,
    verb=_rotate,
)
REMOVE = Act(
    title="Remove webhook",
    warning="It is told of nothing any more, and its secret is destroyed. What it was told stays here for thirty days.",
    done="removed",
    illegal="it was removed before",
    legal=lambda row: row.removed_at is None,
    verb=lambda row, actor, why, now: subscriptions.remove(row.pk, now=now, actor=actor),
)
AGAIN = Act(
    title="Send again",
    warning="The same event is sent with the same id: whoever has taken it knows that. It is tried for up to three days.",
    done="to be sent again",
    illegal="on its way, or its webhook was removed",
    legal=lambda row: row.due_at is None and row.webhook.removed_at is None,
    verb=lambda row, actor, why, now: delivery.send_again(row.pk, now=now, actor=actor),
    after=outbox.wake,
)


class Listen(forms.ModelForm):
    """What a webhook is for."""

    kinds = forms.MultipleChoiceField(
        label="Events",
        choices=[(kind, kind) for kind in TOLD],
        required=False,
        widget=UnfoldAdminCheckboxSelectMultipleWidget,
        help_text="None chosen: all of them, and those that there will be.",
    )

    class Meta:
        model = Webhook
        fields = ["url", "kinds", "internal", "description"]
        help_texts = {"url": "https. http is for addresses of this machine. Nothing else is called in its place."}


class Add(Listen):
    reason = forms.CharField(
        min_length=5,
        max_length=200,
        widget=UnfoldAdminTextInputWidget({"autocomplete": "off"}),
        help_text="Kept in the history, beside your name.",
    )


@admin.register(Webhook)
class WebhookAdmin(Page):
    form = Listen
    list_display = ["where", "wants", "state", "last", "waiting"]
    search_fields = ["url__contains", "description__contains"]
    search_help_text = "A part of the URL or of the description"
    ordering = ["-created_at", "-pk"]
    slices = {
        "current": Slice("Current", "Nobody is told what happens here.", lambda now: CURRENT),
        "disabled": Slice(
            "Given up", "No webhook was given up.", lambda now: CURRENT & Q(disabled_at__isnull=False)
        ),
        "paused": Slice("Paused", "No webhook is paused.", lambda now: CURRENT & Q(active=False)),
        "all": Slice("All", "There never was a webhook."),
    }  # fmt: skip
    labels = {"internal": "Its address is not public"}
    change_form_outer_before_template = "admin/sandboxes/webhook/told.html"
    acts = {"send_test": TEST, "pause": PAUSE, "resume": RESUME, "rotate": ROTATE, "remove": REMOVE}
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
        return super().get_form(request, obj, change=change, **{"form": Listen if obj else Add, **kwargs})

    def get_readonly_fields(self, request: HttpRequest, obj: Webhook | None = None) -> list[str]:
        return ["url"] if obj else []  # another address is another webhook, with a secret of its own

    def get_fieldsets(self, request: HttpRequest, obj: Webhook | None = None) -> Any:
        return [(None, {"fields": ["url", "kinds", "internal", "description", *([] if obj else ["reason"])]})]

    def complete(self, rows: list[Webhook]) -> None:
        found = Delivery.objects.filter(DUE, webhook__in=[row.pk for row in rows]).order_by()
        due = dict(found.values_list("webhook").annotate(Count("pk")))
        for row in rows:
            row.due = due.get(row.pk, 0)  # type: ignore[attr-defined]

    @display(description="Webhook")
    def where(self, row: Webhook) -> SafeString | str:
        return two(shortened(row.url), row.description) if row.description else shortened(row.url)

    @display(description="Events")
    def wants(self, row: Webhook) -> str:
        return ", ".join(row.kinds) or "all"

    @display(description="State")
    def state(self, row: Webhook) -> SafeString:
        return state(row)

    @display(description="Last try")
    def last(self, row: Webhook) -> SafeString | str:
        return two(ago(row.last_at), shortened(row.last_error) or f"answered {row.last_status}") if row.last_at else "never"

    @display(description="To be sent")
    def waiting(self, row: Webhook) -> str:
        return f"{row.due:,}"  # type: ignore[attr-defined]

    def page(self, request: HttpRequest, row: Webhook) -> dict[str, Any]:
        everything = rows("sandboxes_delivery", slice="all", webhook__id__exact=row.pk)
        due = Delivery.objects.filter(DUE, webhook=row).count()
        signs = until(row.before_until, "the one before signs for", "") if row.sealed_before else ""
        latest = [*row.deliveries.select_related("event").order_by("-pk")[: SHOWN + 1]]
        return {
            "facts": [
                Fact("URL", shortened(row.url, 60), note=row.description),
                Fact("State", state(row), note=ago(row.removed_at or row.disabled_at, "")),
                Fact("Events", self.wants(row)),
                Fact("Last arrived", ago(row.last_delivered_at)),
                Fact(
                    "Last try",
                    ago(row.last_at),
                    note=row.last_error or (f"answered {row.last_status}" if row.last_status else ""),
                    alarm=bool(row.last_error) and row.removed_at is None,
                ),
                Fact(
                    "To be sent",
                    f"{due:,}",
                    href=rows("sandboxes_delivery", slice="due", webhook__id__exact=row.pk),
                    note="" if row.state == "active" or not due else "once it is resumed",
                ),
                Fact("Secret", "destroyed" if row.removed_at else "kept encrypted", note=signs or "it cannot be shown again"),
                Fact("Added", ago(row.created_at), note=f"by {row.created_by}" if row.created_by else ""),
            ],
            "deliveries": lines(latest[:SHOWN], name=lambda one: one.event.kind),
            "more": everything if len(latest) > SHOWN else "",
            "nothing": "It was told of nothing yet.",
            "done": done_to(row, SHOWN),
        }

    def construct_change_message(self, request: HttpRequest, form: Any, formsets: Any, add: bool = False) -> Any:
        return f"Add webhook: {form.cleaned_data['reason']}" if add else f"Change webhook: {', '.join(form.changed_data)}"

    def save_model(self, request: HttpRequest, obj: Webhook, form: Any, change: bool) -> None:
        if change:
            return super().save_model(request, obj, form, change)
        row, secret = subscriptions.add(
            obj.url, obj.kinds, internal=obj.internal, description=obj.description, now=timezone.now(),
            actor=request.user.get_username(),
        )  # fmt: skip
        obj.pk = row.pk
        messages.warning(request, once(secret))
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

    def after(self, act: Act, row: Webhook, form: Reason) -> str:
        if secret := getattr(row, "new_secret", None):
            messages.warning(form.request, once(secret))
        return super().after(act, row, form)

    @action(description="Send a test…", permissions=["send"], icon="send", dialog=TEST.dialog)
    def send_test(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, TEST, form)

    @action(description="Pause…", permissions=["send"], icon="pause", dialog=PAUSE.dialog)
    def pause(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, PAUSE, form)

    @action(description="Resume…", permissions=["send"], icon="play_arrow", dialog=RESUME.dialog)
    def resume(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, RESUME, form)

    @action(description="Rotate secret…", permissions=["manage"], icon="autorenew", dialog=ROTATE.dialog)
    def rotate(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, ROTATE, form)

    @action(description="Remove…", permissions=["manage"], icon="delete", variant=ActionVariant.DANGER, dialog=REMOVE.dialog)
    def remove(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, REMOVE, form)


def once(secret: str) -> str:
    return f"Copy the new secret now, it is not shown again: {secret}"


STATES = {"active": "ok", "paused": "draining", "disabled": "failing", "removed": "destroyed"}  # colours


def state(row: Webhook) -> SafeString:
    return badge(STATES[row.state], "given up" if row.state == "disabled" else row.state)


@admin.register(Event)
class EventAdmin(Facts):
    list_display = ["what", "happened", "told"]
    list_filter = ["kind"]
    search_fields = ["key__startswith"]
    search_help_text = "Lease, sandbox, or a whole id"
    ordering = ["-at", "-pk"]
    slices = {"all": Slice("All", "Nothing happened yet that others want to know.")}
    fieldsets = all_fields("id", "kind", "key", "at")
    change_form_outer_before_template = "admin/sandboxes/event/payload.html"

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        found, twice = super().get_search_results(request, queryset, search_term)
        return (found if found.exists() else queryset.filter(key__startswith=search_term.strip())), twice

    def complete(self, rows: list[Event]) -> None:
        found = Delivery.objects.filter(event__in=[row.pk for row in rows]).order_by().values_list("event")
        counts = found.annotate(Count("pk"), Count("delivered_at"), Count("given_up_at"))
        by = {pk: many for pk, *many in counts}
        for row in rows:
            row.deliveries_of = by.get(row.pk, [0, 0, 0])  # type: ignore[attr-defined]

    @display(description="Event")
    def what(self, row: Event) -> SafeString:
        return two(row.kind, row.key)

    @display(description="Happened")
    def happened(self, row: Event) -> SafeString | str:
        return ago(row.at)

    @display(description="Told")
    def told(self, row: Event) -> SafeString | str:
        every, arrived, given_up = row.deliveries_of  # type: ignore[attr-defined]
        if not every:
            return "nobody listened"
        said = f"{arrived:,} of {counted(every, 'webhook', 'webhooks')}"
        return two(said, badge("failed", f"{given_up:,} given up")) if given_up else said

    def page(self, request: HttpRequest, row: Event) -> dict[str, Any]:
        found = [*row.deliveries.select_related("webhook").order_by("pk")[: SHOWN + 1]]
        everything = rows("sandboxes_delivery", slice="all", event__id__exact=row.pk)
        return {
            "facts": [
                Fact("Kind", row.kind),
                Fact("Happened", ago(row.at), note=stamp(row.at)),
                Fact("What", row.key, note="within its kind, it is written down once"),
                Fact("Id", row.pk, note="the webhook-id of every try"),
            ],
            "body": json.dumps(json.loads(delivery.body_of(row)), indent=2, ensure_ascii=False),
            "deliveries": lines(found[:SHOWN], name=lambda one: shortened(one.webhook.url)),
            "more": everything if len(found) > SHOWN else "",
            "nothing": "No webhook wanted it when it happened.",
        }


@admin.register(Delivery)
class DeliveryAdmin(Facts):
    list_display = ["what", "where", "state", "tried", "answered"]
    list_filter = ["event__kind"]
    list_select_related = ["event", "webhook"]
    search_fields = ["event__key__startswith", "webhook__url__contains"]
    search_help_text = "Lease, sandbox, or a part of the URL"
    ordering = ["-pk"]
    slices = {
        "due": Slice("To be sent", "Everybody was told of everything.", lambda now: DUE),
        "given_up": Slice("Given up", "Nothing was given up.", lambda now: Q(given_up_at__isnull=False)),
        "delivered": Slice("Delivered", "Nothing has arrived yet.", lambda now: Q(delivered_at__isnull=False)),
        "all": Slice("All", "Nobody was told of anything yet."),
    }
    fieldsets = all_fields(
        "id", "event", "webhook", "asked_at", "due_at", "tries", "delivered_at", "given_up_at", "last_status", "last_error"
    )
    acts = {"again": AGAIN}
    actions_detail = ["again"]
    actions: ClassVar[list[str]] = ["again_all"]

    def has_send_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("sandboxes.send_webhook")

    @display(description="Event")
    def what(self, row: Delivery) -> SafeString:
        return two(row.event.kind, row.event.key)

    @display(description="Webhook")
    def where(self, row: Delivery) -> str:
        return shortened(row.webhook.url)

    @display(description="State")
    def state(self, row: Delivery) -> SafeString:
        return two(progress(row), when(row, timezone.now()))

    @display(description="Tries")
    def tried(self, row: Delivery) -> str:
        return f"{row.tries:,}"

    @display(description="Last answer")
    def answered(self, row: Delivery) -> str:
        return shortened(row.last_error) or (str(row.last_status) if row.last_status else "–")

    def page(self, request: HttpRequest, row: Delivery) -> dict[str, Any]:
        return {
            "facts": [
                Fact("Event", link("sandboxes_event", row.event_id, row.event.kind), note=row.event.key),
                Fact(
                    "Webhook",
                    link("sandboxes_webhook", row.webhook_id, shortened(row.webhook.url, 60)),
                    note=state(row.webhook),
                ),
                Fact("State", progress(row), note=when(row, timezone.now())),
                Fact("Tries", f"{row.tries:,}", note="since it was asked for last"),
                Fact("Last answer", row.last_status or "–", note=row.last_error, alarm=bool(row.last_error)),
                Fact("Happened", ago(row.event.at), note=stamp(row.event.at)),
            ]
        }

    @action(description="Send again…", permissions=["send"], icon="send", dialog=AGAIN.dialog)
    def again(self, request: HttpRequest, form: Reason, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, AGAIN, form)

    @action(description="Send again…", permissions=["send"])
    def again_all(self, request: HttpRequest, queryset: QuerySet[Delivery]) -> HttpResponse | None:
        return self.ask(request, queryset, AGAIN)


def progress(row: Delivery) -> SafeString:
    if row.delivered_at:
        return badge("ok", "delivered")
    if row.given_up_at:
        return badge("failed", "given up")
    if row.claim:
        return badge("running", "on its way")
    return badge("late", "to be tried again") if row.tries else badge("waiting", "to be sent")


def when(row: Delivery, now: datetime) -> SafeString | str:
    if row.due_at and not row.claim:
        return until(row.due_at, "due", "due now" if row.webhook.state == "active" else "once its webhook is resumed")
    return ago(row.delivered_at or row.given_up_at, "")


@dataclass(frozen=True)
class Line:
    """A delivery on the page of its event or its webhook."""

    href: str
    what: str
    state: Any
    why: str


def lines(found: Iterable[Delivery], *, name: Callable[[Delivery], str]) -> list[Line]:
    return [
        Line(reverse("admin:sandboxes_delivery_change", args=[one.pk]), name(one), progress(one), one.last_error)
        for one in found
    ]
