"""What requests say and answers show of who an agent is to others."""

from datetime import timedelta
from typing import Any

from rest_framework import serializers

from leases.api.fields import Matching, Whole
from leases.models import DID
from sandboxes.db.clock import iso
from sandboxes.identity.signing import LIFETIME, LONGEST, SHORTEST
from sandboxes.models import MintedToken

AUDIENCE = rf"{DID}(#[A-Za-z][A-Za-z0-9._~-]{{0,63}})?"
AUDIENCE_ACCEPTS = "a DID of at most 255 characters, or one with the fragment of a service: did:web:relay.example#relay"
LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
NSID = rf"(?=[A-Za-z]){LABEL}(\.{LABEL})+\.[A-Za-z][A-Za-z0-9]{{0,62}}"
NSID_ACCEPTS = "an NSID such as com.atproto.sync.subscribeRepos"


def _seconds(length: timedelta) -> int:
    return int(length.total_seconds())


class AskToken(serializers.Serializer):
    aud = Matching(AUDIENCE, AUDIENCE_ACCEPTS, max_length=320, help_text="The service that is to be called, by its DID.")
    lxm = Matching(NSID, NSID_ACCEPTS, max_length=317, help_text="The one method that the token is good for, by its NSID.")
    lifetime_seconds = Whole(
        min_value=_seconds(SHORTEST), max_value=_seconds(LONGEST), required=False, allow_null=True,
        help_text=f"Default: {_seconds(LIFETIME)}.",
    )  # fmt: skip


class TokenShown(serializers.Serializer):
    token = serializers.CharField(help_text="A signed JWT for `Authorization: Bearer`. It is stored nowhere.")
    expires_at = serializers.DateTimeField(help_text="The end of the lease does not bring it forward.")


def token_shown(token: str, minted: MintedToken) -> dict[str, Any]:
    return {"token": token, "expires_at": iso(minted.expires_at)}
