"""Console pages of agent signing keys and service tokens."""

import json
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.db.models import Count, Max, Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display
from unfold.widgets import UnfoldAdminTextInputWidget

from sandboxes.admin.base.actions import REASON_HELP_TEXT, AdminAction, ReasonForm
from sandboxes.admin.base.audit import get_actor, list_audit_entries
from sandboxes.admin.base.changelist import ListTab
from sandboxes.admin.base.formatting import (
    SummaryField,
    build_changelist_url,
    format_age,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
)
from sandboxes.admin.base.model_admin import ConsoleModelAdmin, ReadOnlyModelAdmin, build_all_fields_fieldset
from sandboxes.admin.base.registry import build_agent_field, build_holder_field, get_reference, render_holders
from sandboxes.audit import Actor
from sandboxes.db import database_time
from sandboxes.errors import SigningKeyExists
from sandboxes.identity import curves, signing
from sandboxes.models import MintedToken, SigningKey
from sandboxes.models.identity import ACTIVE_KEY_FILTER

MAX_AUDIT_ENTRIES = 12
DID_KEY_PREFIX = "did:key:"


def _rotate_key(key: SigningKey, actor: Actor, reason: str, now: datetime) -> bool:
    return signing.replace_key(key, now=now, actor=actor) is not None


def _get_active_key_url(row: SigningKey, form: ReasonForm) -> str:
    """URL of the agent's active key, or of the row if none is active."""
    key = SigningKey.objects.filter(ACTIVE_KEY_FILTER, agent_did=row.agent_did).first()
    return reverse("admin:sandboxes_signingkey_change", args=[key.pk if key else row.pk])


ROTATE_KEY_ACTION = AdminAction(
    title="Rotate key",
    warning=(
        "A new key signs from now on, and the private half of this key is destroyed. Services reject the new signatures "
        "until the agent's DID document lists the new key."
    ),
    done="rotated",
    refusal_reason="no longer active",
    legal=lambda key: key.is_active,
    verb=_rotate_key,
    icon="autorenew",
    permissions=("sandboxes.manage_identity",),
    get_next_url=_get_active_key_url,
)
REVOKE_KEY_ACTION = AdminAction(
    title="Revoke key",
    warning="The private half of this key is destroyed. The agent gets no service tokens until another key is created.",
    done="revoked",
    refusal_reason="no longer active",
    legal=lambda key: key.is_active,
    verb=lambda key, actor, reason, now: signing.revoke_key(key, now=now, actor=actor),
    icon="key_off",
    permissions=("sandboxes.manage_identity",),
    danger=True,
    get_next_url=_get_active_key_url,
)


class SigningKeyForm(forms.ModelForm):
    """Agent and algorithm of a new key."""

    class Meta:
        model = SigningKey
        fields = ["agent_did", "algorithm"]
        help_texts = {"algorithm": "AT Protocol accepts both. ES256K is its default."}

    reason = forms.CharField(
        min_length=5,
        max_length=200,
        widget=UnfoldAdminTextInputWidget({"autocomplete": "off"}),
        help_text=REASON_HELP_TEXT,
    )

    def clean_agent_did(self) -> str:
        did = get_reference("agent").clean(self.cleaned_data["agent_did"])
        if SigningKey.objects.filter(ACTIVE_KEY_FILTER, agent_did=did).exists():
            raise forms.ValidationError(str(SigningKeyExists()))
        return did


@admin.register(SigningKey)
class SigningKeyAdmin(ConsoleModelAdmin):
    form = SigningKeyForm
    list_display = ["agent_label", "public_key_label", "state", "created", "last_minted"]
    list_filter = ["algorithm"]
    search_fields = ["agent_did__startswith", "public_key__startswith"]
    search_help_text = "Agent or public key (prefix)"
    ordering = ["-created_at", "-pk"]
    list_tabs = {
        "active": ListTab(
            "Active", "No active signing keys. An agent needs one to get service tokens.", lambda now: ACTIVE_KEY_FILTER
        ),
        "retired": ListTab(
            "Retired", "No retired keys. A key is retired when it is rotated.", lambda now: Q(retired_at__isnull=False)
        ),
        "revoked": ListTab("Revoked", "No revoked keys.", lambda now: Q(revoked_at__isnull=False)),
        "all": ListTab("All", "No signing keys yet. Add one to let an agent get service tokens."),
    }
    change_form_outer_before_template = "admin/sandboxes/signingkey/publish.html"
    row_actions = {"rotate": ROTATE_KEY_ACTION, "revoke": REVOKE_KEY_ACTION}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("sandboxes.manage_identity")

    def has_change_permission(self, request: HttpRequest, obj: SigningKey | None = None) -> bool:
        return False

    def get_fieldsets(self, request: HttpRequest, obj: SigningKey | None = None) -> Any:
        if obj is None:
            return [(None, {"fields": ["agent_did", "algorithm", "reason"]})]
        return build_all_fields_fieldset(
            "id", "agent_did", "algorithm", "public_key", "created_at", "created_by", "retired_at", "revoked_at", "ended_by"
        )

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        return super().get_search_results(request, queryset, search_term.strip().removeprefix(DID_KEY_PREFIX))

    def annotate_rows(self, rows: list[SigningKey]) -> None:
        tokens = MintedToken.objects.filter(key__in=[row.pk for row in rows]).order_by()
        latest = dict(tokens.values_list("key").annotate(Max("at")))
        for row in rows:
            row.minted_at = latest.get(row.pk)  # type: ignore[attr-defined]

    @display(description="Agent")
    def agent_label(self, row: SigningKey) -> SafeString:
        return render_two_lines(row.agent_did, row.algorithm)

    @display(description="Public key")
    def public_key_label(self, row: SigningKey) -> SafeString:
        return format_html('<span class="lh-command lh-digest">{}</span>', row.did_key)

    @display(description="State")
    def state(self, row: SigningKey) -> SafeString:
        return render_two_lines(render_key_state(row), render_time_ago(row.retired_at or row.revoked_at, ""))

    @display(description="Created")
    def created(self, row: SigningKey) -> SafeString | str:
        return render_time_ago(row.created_at)

    @display(description="Last token")
    def last_minted(self, row: SigningKey) -> SafeString | str:
        return render_time_ago(row.minted_at)  # type: ignore[attr-defined]

    def get_page_context(self, request: HttpRequest, row: SigningKey) -> dict[str, Any]:
        minted = row.tokens.aggregate(count=Count("pk"), latest=Max("at"))
        ended = row.retired_at or row.revoked_at
        return {
            "facts": [
                SummaryField(
                    "State",
                    render_key_state(row),
                    note=format_html("{} by {}", render_time_ago(ended), row.ended_by or "–") if ended else "",
                ),
                build_agent_field(row.agent_did),
                SummaryField("Algorithm", row.get_algorithm_display()),
                SummaryField("Created", render_time_ago(row.created_at), note=f"by {row.created_by}" if row.created_by else ""),
                SummaryField("Last token", render_time_ago(minted["latest"])),
                SummaryField(
                    "Service tokens",
                    f"{minted['count']:,}",
                    href=build_changelist_url("sandboxes_mintedtoken", slice="all", q=row.did_key),
                    note="signed with this key",
                ),
                *self.build_related_key_fields(request, row),
            ],
            "did_key": row.did_key,
            "document": json.dumps(signing.build_verification_method(row), indent=2) if row.is_active else "",
            "audit": list_audit_entries(row, MAX_AUDIT_ENTRIES),
        }

    def build_related_key_fields(self, request: HttpRequest, row: SigningKey) -> list[SummaryField]:
        """Build links to the agent's previous key and, unless it is this one, to its active key."""
        keys = SigningKey.objects.filter(agent_did=row.agent_did)
        previous, active = keys.filter(pk__lt=row.pk).order_by("-pk").first(), keys.filter(ACTIVE_KEY_FILTER).first()
        fields = [SummaryField("Previous key", _render_key_link(previous), note=render_key_state(previous))] if previous else []
        if active is None:
            fields.append(_build_missing_key_field(request, row.agent_did, "Active key"))
        elif active != row:
            fields.append(SummaryField("Active key", _render_key_link(active), note=render_key_state(active)))
        return fields

    def construct_change_message(self, request: HttpRequest, form: Any, formsets: Any, add: bool = False) -> Any:
        return f"Create key: {form.cleaned_data['reason']}"

    def save_model(self, request: HttpRequest, obj: SigningKey, form: Any, change: bool) -> None:
        private = curves.generate_key(obj.algorithm)
        row = signing.create_key(obj.agent_did, now=database_time.now(), actor=get_actor(request), private=private)
        obj.pk, obj.public_key = row.pk, row.public_key
        get_reference("agent").ensure_exists(obj.agent_did)

    def add_view(self, request: HttpRequest, form_url: str = "", extra_context: Any = None) -> HttpResponse:
        try:
            buttons = {"show_save_and_add_another": False, "show_save_and_continue": False}
            response: HttpResponse = super().add_view(request, form_url, {**(extra_context or {}), **buttons})
        except SigningKeyExists as error:  # created by another request after the form was validated
            messages.error(request, str(error))
            return HttpResponseRedirect(build_changelist_url("sandboxes_signingkey"))
        return response

    def response_add(self, request: HttpRequest, obj: SigningKey, post_url_continue: str | None = None) -> HttpResponse:
        messages.success(
            request,
            f"Signing key created for {obj.agent_did}. Publish the verification method below in the agent's DID document.",
        )
        return HttpResponseRedirect(reverse("admin:sandboxes_signingkey_change", args=[obj.pk]))


def _render_key_link(key: SigningKey) -> SafeString:
    return render_admin_link("sandboxes_signingkey", key.pk, key.did_key)


def build_signing_key_field(request: HttpRequest, did: str) -> SummaryField:
    """Build an agent's active signing key, or a link to create one."""
    key = SigningKey.objects.filter(agent_did=did).order_by("-pk").first()
    if key and key.is_active:
        link = render_admin_link("sandboxes_signingkey", key.pk, key.algorithm)
        return SummaryField("Signing key", link, note=render_key_state(key))
    return _build_missing_key_field(request, did, "Signing key", note=render_key_state(key) if key else "none yet")


def _build_missing_key_field(request: HttpRequest, did: str, label: str, note: Any = "") -> SummaryField:
    if not request.user.has_perm("sandboxes.manage_identity"):
        return SummaryField(label, "none", note=note)
    href = reverse("admin:sandboxes_signingkey_add", query={"agent_did": did})
    return SummaryField(label, "create one", href=href, note=note)


def render_key_state(key: SigningKey) -> SafeString:
    if key.is_active:
        return render_badge("ok", "active")
    return render_badge("cold", "retired") if key.retired_at else render_badge("expired", "revoked")


@admin.register(MintedToken)
class MintedTokenAdmin(ReadOnlyModelAdmin):
    list_display = ["audience_label", "agent_label", "requester", "minted", "ends"]
    search_fields = ["agent_did__startswith", "aud__startswith", "lxm__startswith"]
    search_help_text = "Agent, audience or method (prefix), or a complete id or key"
    ordering = ["-at", "-pk"]
    list_tabs = {
        "all": ListTab("All", "No service tokens yet. Agents request them through the API."),
        "valid": ListTab("Valid", "No valid service tokens: every one has expired.", lambda now: Q(expires_at__gt=now)),
    }
    fieldsets = build_all_fields_fieldset("jti", "holder", "agent_did", "key", "aud", "lxm", "at", "expires_at", "actor")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        term = search_term.strip().removeprefix(DID_KEY_PREFIX)
        try:
            pk = UUID(term)
        except ValueError:
            # First, because PostgreSQL uses no index for a condition on two tables that are combined by OR.
            key = SigningKey.objects.filter(public_key=term).first()
            return (queryset.filter(key=key), False) if key else super().get_search_results(request, queryset, term)
        return queryset.filter(Q(pk=pk) | Q(holder=pk)), False

    def annotate_rows(self, rows: list[MintedToken]) -> None:
        leases = render_holders({row.holder for row in rows if row.holder})
        for row in rows:
            row.lease = leases[row.holder] if row.holder else "–"  # type: ignore[attr-defined]

    @display(description="Audience and method")
    def audience_label(self, row: MintedToken) -> SafeString:
        return render_two_lines(row.aud, row.lxm)

    @display(description="Agent and lease")
    def agent_label(self, row: MintedToken) -> SafeString:
        return render_two_lines(row.agent_did, row.lease)  # type: ignore[attr-defined]

    @display(description="Requested by")
    def requester(self, row: MintedToken) -> str:
        return row.actor or "–"

    @display(description="Issued")
    def minted(self, row: MintedToken) -> SafeString | str:
        return render_time_ago(row.at)

    @display(description="Expires")
    def ends(self, row: MintedToken) -> SafeString:
        return render_token_expiry(row, database_time.now())

    def get_page_context(self, request: HttpRequest, row: MintedToken) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("Audience", row.aud, note="the service that accepts the token"),
                SummaryField("Method", row.lxm, note="the only method the token allows"),
                build_agent_field(row.agent_did),
                *([build_holder_field(row.holder)] if row.holder else []),
                SummaryField("Issued", render_time_ago(row.at), note=f"requested by {row.actor}" if row.actor else ""),
                SummaryField("Expires", render_token_expiry(row, database_time.now()), note=render_timestamp(row.expires_at)),
                SummaryField("Signed with", _render_key_link(row.key), note=render_key_state(row.key)),
            ]
        }


def render_token_expiry(row: MintedToken, now: datetime) -> SafeString:
    left = row.expires_at - now
    return render_timestamp(
        row.expires_at, f"in {format_age(left)}" if left > timedelta(0) else f"expired {format_age(-left)} ago"
    )
