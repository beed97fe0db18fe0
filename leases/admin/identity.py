"""Operators' pages on signing keys and service tokens as seen from here: a holder is a lease, and an agent has a page."""

from typing import Any

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.http import HttpRequest
from django.urls import reverse

from leases.admin.formatting import HeldByLease
from leases.models import DID_ACCEPTS, Agent, is_did
from sandboxes.admin.base import Fact
from sandboxes.admin.formatting import link
from sandboxes.admin.identity import Create, MintedTokenAdmin, SigningKeyAdmin, state
from sandboxes.models import MintedToken, SigningKey


def signs(request: HttpRequest, did: str) -> Fact:
    """What an agent signs with, on its page; where it is given a key, if it has none."""
    key = SigningKey.objects.filter(agent_did=did).order_by("-pk").first()
    if key and key.is_active:
        return Fact("Signing key", link("sandboxes_signingkey", key.pk, key.algorithm), note=state(key))
    may = request.user.has_perm("sandboxes.manage_identity")
    href = reverse("admin:sandboxes_signingkey_add", query={"agent_did": did}) if may else ""
    return Fact("Signing key", "create one" if may else "none", href=href, note=state(key) if key else "it has none")


class AgentsKey(Create):
    def clean_agent_did(self) -> str:
        did = super().clean_agent_did()
        try:
            is_did(did)
        except ValidationError:
            raise ValidationError(f"{did[:80]!r} is not {DID_ACCEPTS}.") from None
        return did


for model in (SigningKey, MintedToken):
    admin.site.unregister(model)


@admin.register(SigningKey)
class AgentsKeyAdmin(HeldByLease, SigningKeyAdmin):
    form = AgentsKey

    def save_model(self, request: HttpRequest, obj: SigningKey, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        Agent.objects.get_or_create(did=obj.agent_did)


@admin.register(MintedToken)
class LeasedTokenAdmin(HeldByLease, MintedTokenAdmin):
    pass
