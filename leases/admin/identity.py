"""Operators' pages on signing keys and service tokens as seen from here: a holder is a lease, and an agent has a page."""

from typing import Any

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.http import HttpRequest
from django.urls import reverse

from leases.admin.formatting import LeaseHolderMixin
from leases.models import DID_DESCRIPTION, Agent, validate_did
from sandboxes.admin.base import SummaryField
from sandboxes.admin.formatting import render_admin_link
from sandboxes.admin.identity import MintedTokenAdmin, SigningKeyAdmin, SigningKeyForm, render_key_state
from sandboxes.models import MintedToken, SigningKey


def build_signing_key_field(request: HttpRequest, did: str) -> SummaryField:
    """What an agent signs with, on its page; where it is given a key, if it has none."""
    key = SigningKey.objects.filter(agent_did=did).order_by("-pk").first()
    if key and key.is_active:
        return SummaryField(
            "Signing key", render_admin_link("sandboxes_signingkey", key.pk, key.algorithm), note=render_key_state(key)
        )
    may = request.user.has_perm("sandboxes.manage_identity")
    href = reverse("admin:sandboxes_signingkey_add", query={"agent_did": did}) if may else ""
    return SummaryField(
        "Signing key", "create one" if may else "none", href=href, note=render_key_state(key) if key else "it has none"
    )


class LeasedSigningKeyForm(SigningKeyForm):
    def clean_agent_did(self) -> str:
        did = super().clean_agent_did()
        try:
            validate_did(did)
        except ValidationError:
            raise ValidationError(f"{did[:80]!r} is not {DID_DESCRIPTION}.") from None
        return did


for model in (SigningKey, MintedToken):
    admin.site.unregister(model)


@admin.register(SigningKey)
class LeasedSigningKeyAdmin(LeaseHolderMixin, SigningKeyAdmin):
    form = LeasedSigningKeyForm

    def save_model(self, request: HttpRequest, obj: SigningKey, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        Agent.objects.get_or_create(did=obj.agent_did)


@admin.register(MintedToken)
class LeasedMintedTokenAdmin(LeaseHolderMixin, MintedTokenAdmin):
    pass
