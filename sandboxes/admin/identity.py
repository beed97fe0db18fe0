"""Operators' pages on what agents sign with and what was signed for them. `leases` names the holders and the agents."""

import json
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.db.models import Count, Max, Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import action, display
from unfold.enums import ActionVariant
from unfold.widgets import UnfoldAdminTextInputWidget

from sandboxes.admin.base import (
    AdminAction,
    ConsoleModelAdmin,
    HolderDisplayMixin,
    ListTab,
    ReadOnlyModelAdmin,
    ReasonForm,
    SummaryField,
    build_all_fields_fieldset,
    list_audit_entries,
)
from sandboxes.admin.formatting import (
    build_changelist_url,
    format_age,
    render_admin_link,
    render_badge,
    render_time_ago,
    render_timestamp,
    render_two_lines,
)
from sandboxes.errors import SigningKeyExists
from sandboxes.identity import curves, signing
from sandboxes.models import MintedToken, SigningKey
from sandboxes.models.identity import ACTIVE_KEY_FILTER

MAX_AUDIT_ENTRIES = 12  # newest entries of what operators did
DID_KEY_PREFIX = "did:key:"


def _rotate_key(key: SigningKey, actor: str, why: str, now: datetime) -> bool:
    return signing.replace_key(key, now=now, actor=actor) is not None


ROTATE_KEY_ACTION = AdminAction(
    title="Rotate key",
    warning=(
        "A new key signs from now on, and the private half of this one is destroyed. Services refuse the new signatures "
        "until the agent's DID document has the new key."
    ),
    done="rotated",
    refusal_reason="it does not sign any more",
    legal=lambda key: key.is_active,
    verb=_rotate_key,
)
REVOKE_KEY_ACTION = AdminAction(
    title="Revoke key",
    warning="Nothing is signed for this agent until it has another key. The private half of this one is destroyed.",
    done="revoked",
    refusal_reason="it does not sign any more",
    legal=lambda key: key.is_active,
    verb=lambda key, actor, why, now: signing.revoke_key(key, now=now, actor=actor),
)


class SigningKeyForm(forms.ModelForm):
    """Whose key, and on which curve."""

    class Meta:
        model = SigningKey
        fields = ["agent_did", "algorithm"]
        help_texts = {"algorithm": "AT Protocol takes both; ES256K is what it uses if nothing else is said."}

    reason = forms.CharField(
        min_length=5,
        max_length=200,
        widget=UnfoldAdminTextInputWidget({"autocomplete": "off"}),
        help_text="Kept in the history, beside your name.",
    )

    def clean_agent_did(self) -> str:
        did: str = self.cleaned_data["agent_did"].strip()
        if SigningKey.objects.filter(ACTIVE_KEY_FILTER, agent_did=did).exists():
            raise forms.ValidationError(str(SigningKeyExists()))
        return did


@admin.register(SigningKey)
class SigningKeyAdmin(HolderDisplayMixin, ConsoleModelAdmin):
    form = SigningKeyForm
    list_display = ["who", "shown", "state", "created", "last_minted"]
    list_filter = ["algorithm"]
    search_fields = ["agent_did__startswith", "public_key__startswith"]
    search_help_text = "Agent or public key"
    ordering = ["-created_at", "-pk"]
    slices = {
        "active": ListTab(
            "Active", "No agent has a signing key: none can have a service token.", lambda now: ACTIVE_KEY_FILTER
        ),
        "retired": ListTab("Retired", "No key was rotated.", lambda now: Q(retired_at__isnull=False)),
        "revoked": ListTab("Revoked", "No key was revoked.", lambda now: Q(revoked_at__isnull=False)),
        "all": ListTab("All", "No agent ever had a signing key."),
    }
    change_form_outer_before_template = "admin/sandboxes/signingkey/publish.html"
    acts = {"rotate": ROTATE_KEY_ACTION, "revoke": REVOKE_KEY_ACTION}
    actions_detail = ["rotate", "revoke"]

    def has_manage_permission(self, request: HttpRequest, object_id: str | None = None) -> bool:
        return request.user.has_perm("sandboxes.manage_identity")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return self.has_manage_permission(request)

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

    def complete(self, rows: list[SigningKey]) -> None:
        found = MintedToken.objects.filter(key__in=[row.pk for row in rows]).order_by()
        latest = dict(found.values_list("key").annotate(Max("at")))
        for row in rows:
            row.minted_at = latest.get(row.pk)  # type: ignore[attr-defined]

    @display(description="Agent")
    def who(self, row: SigningKey) -> SafeString:
        return render_two_lines(row.agent_did, row.algorithm)

    @display(description="Public key")
    def shown(self, row: SigningKey) -> SafeString:
        return format_html('<span class="lh-command lh-digest">{}</span>', row.did_key)

    @display(description="State")
    def state(self, row: SigningKey) -> SafeString:
        return render_two_lines(render_key_state(row), render_time_ago(row.retired_at or row.revoked_at, ""))

    @display(description="Created")
    def created(self, row: SigningKey) -> SafeString | str:
        return render_time_ago(row.created_at)

    @display(description="Last minted")
    def last_minted(self, row: SigningKey) -> SafeString | str:
        return render_time_ago(row.minted_at)  # type: ignore[attr-defined]

    def page(self, request: HttpRequest, row: SigningKey) -> dict[str, Any]:
        minted = row.tokens.aggregate(count=Count("pk"), latest=Max("at"))
        ended = row.retired_at or row.revoked_at
        return {
            "facts": [
                SummaryField(
                    "State",
                    render_key_state(row),
                    note=format_html("{} by {}", render_time_ago(ended), row.ended_by or "–") if ended else "",
                ),
                self.agent(row.agent_did),
                SummaryField("Algorithm", row.get_algorithm_display()),
                SummaryField("Created", render_time_ago(row.created_at), note=f"by {row.created_by}" if row.created_by else ""),
                SummaryField("Last minted", render_time_ago(minted["latest"])),
                SummaryField(
                    "Service tokens",
                    f"{minted['count']:,}",
                    href=build_changelist_url("sandboxes_mintedtoken", slice="all", q=row.did_key),
                    note="minted with this key",
                ),
                *self.others(request, row),
            ],
            "did_key": row.did_key,
            "document": json.dumps(signing.build_verification_method(row), indent=2) if row.is_active else "",
            "done": list_audit_entries(row, MAX_AUDIT_ENTRIES),
        }

    def others(self, request: HttpRequest, row: SigningKey) -> list[SummaryField]:
        """The key before this one, and what signs if this one does not any more."""
        keys = SigningKey.objects.filter(agent_did=row.agent_did)
        before, signs = keys.filter(pk__lt=row.pk).order_by("-pk").first(), keys.filter(ACTIVE_KEY_FILTER).first()
        found = [SummaryField("Before it", _render_key_link(before), note=render_key_state(before))] if before else []
        if signs is None:
            may = self.has_manage_permission(request)
            href = reverse("admin:sandboxes_signingkey_add", query={"agent_did": row.agent_did}) if may else ""
            found.append(SummaryField("Signs now", "none: create one" if may else "none", href=href))
        elif signs != row:
            found.append(SummaryField("Signs now", _render_key_link(signs), note=render_key_state(signs)))
        return found

    def construct_change_message(self, request: HttpRequest, form: Any, formsets: Any, add: bool = False) -> Any:
        return f"Create key: {form.cleaned_data['reason']}"

    def save_model(self, request: HttpRequest, obj: SigningKey, form: Any, change: bool) -> None:
        private = curves.generate_key(obj.algorithm)
        row = signing.create_key(obj.agent_did, now=timezone.now(), actor=request.user.get_username(), private=private)
        obj.pk, obj.public_key = row.pk, row.public_key

    def add_view(self, request: HttpRequest, form_url: str = "", extra_context: Any = None) -> HttpResponse:
        try:
            buttons = {"show_save_and_add_another": False, "show_save_and_continue": False}
            answer: HttpResponse = super().add_view(request, form_url, {**(extra_context or {}), **buttons})
        except SigningKeyExists as refused:  # a rival was first, after the form was found to be good
            messages.error(request, str(refused))
            return HttpResponseRedirect(build_changelist_url("sandboxes_signingkey"))
        return answer

    def response_add(self, request: HttpRequest, obj: SigningKey, post_url_continue: str | None = None) -> HttpResponse:
        messages.success(request, f"{obj.agent_did} has a signing key. Publish what is below, and services know it.")
        return HttpResponseRedirect(reverse("admin:sandboxes_signingkey_change", args=[obj.pk]))

    def after(self, act: AdminAction, row: SigningKey, form: ReasonForm) -> str:
        """The key that signs now, if there is another."""
        key = SigningKey.objects.filter(ACTIVE_KEY_FILTER, agent_did=row.agent_did).first()
        return reverse("admin:sandboxes_signingkey_change", args=[key.pk if key else row.pk])

    @action(description="Rotate key…", permissions=["manage"], icon="autorenew", dialog=ROTATE_KEY_ACTION.dialog)
    def rotate(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, ROTATE_KEY_ACTION, form)

    @action(
        description="Revoke key…",
        permissions=["manage"],
        icon="key_off",
        variant=ActionVariant.DANGER,
        dialog=REVOKE_KEY_ACTION.dialog,
    )
    def revoke(self, request: HttpRequest, form: ReasonForm, object_id: str) -> HttpResponse:
        return self.answer(request, object_id, REVOKE_KEY_ACTION, form)


def _render_key_link(key: SigningKey) -> SafeString:
    return render_admin_link("sandboxes_signingkey", key.pk, key.did_key)


def render_key_state(key: SigningKey) -> SafeString:
    if key.is_active:
        return render_badge("ok", "active")
    return render_badge("cold", "retired") if key.retired_at else render_badge("expired", "revoked")


@admin.register(MintedToken)
class MintedTokenAdmin(HolderDisplayMixin, ReadOnlyModelAdmin):
    list_display = ["what", "who", "by", "minted", "ends"]
    search_fields = ["agent_did__startswith", "aud__startswith", "lxm__startswith", "key__public_key__exact"]
    search_help_text = "Agent, audience, method, or a whole id or key"
    ordering = ["-at", "-pk"]
    slices = {
        "all": ListTab("All", "No service token was minted yet."),
        "valid": ListTab("Not expired", "Every service token has expired.", lambda now: Q(expires_at__gt=now)),
    }
    fieldsets = build_all_fields_fieldset("jti", "holder", "agent_did", "key", "aud", "lxm", "at", "expires_at", "actor")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        term = search_term.strip().removeprefix(DID_KEY_PREFIX)
        try:
            whole = UUID(term)
        except ValueError:
            return super().get_search_results(request, queryset, term)
        return queryset.filter(Q(pk=whole) | Q(holder=whole)), False

    def complete(self, rows: list[MintedToken]) -> None:
        found = self.holders({row.holder for row in rows if row.holder})
        for row in rows:
            row.held = found[row.holder] if row.holder else "–"  # type: ignore[attr-defined]

    @display(description="Audience and method")
    def what(self, row: MintedToken) -> SafeString:
        return render_two_lines(row.aud, row.lxm)

    @display(description="Agent and lease")
    def who(self, row: MintedToken) -> SafeString:
        return render_two_lines(row.agent_did, row.held)  # type: ignore[attr-defined]

    @display(description="Asked for by")
    def by(self, row: MintedToken) -> str:
        return row.actor or "–"

    @display(description="Minted")
    def minted(self, row: MintedToken) -> SafeString | str:
        return render_time_ago(row.at)

    @display(description="Expires")
    def ends(self, row: MintedToken) -> SafeString:
        return render_token_expiry(row, timezone.now())

    def page(self, request: HttpRequest, row: MintedToken) -> dict[str, Any]:
        return {
            "facts": [
                SummaryField("Audience", row.aud, note="the service that takes it"),
                SummaryField("Method", row.lxm, note="all that it is good for"),
                self.agent(row.agent_did),
                *([self.holder(row.holder)] if row.holder else []),
                SummaryField("Minted", render_time_ago(row.at), note=f"asked for by {row.actor}" if row.actor else ""),
                SummaryField("Expires", render_token_expiry(row, timezone.now()), note=render_timestamp(row.expires_at)),
                SummaryField("Signed with", _render_key_link(row.key), note=render_key_state(row.key)),
            ]
        }


def render_token_expiry(row: MintedToken, now: datetime) -> SafeString:
    left = row.expires_at - now
    return render_timestamp(
        row.expires_at, f"in {format_age(left)}" if left > timedelta(0) else f"expired {format_age(-left)} ago"
    )
