"""Patterns of the claims of service tokens."""

from leases.models import DID_PATTERN

AUDIENCE_PATTERN = rf"{DID_PATTERN}(#[A-Za-z][A-Za-z0-9._~-]{{0,63}})?"
AUDIENCE_DESCRIPTION = (
    "a DID of at most 255 characters, with or without the fragment of a service, such as did:web:relay.example#relay"
)
DOMAIN_LABEL_PATTERN = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
NSID_PATTERN = rf"(?=[A-Za-z]){DOMAIN_LABEL_PATTERN}(\.{DOMAIN_LABEL_PATTERN})+\.[A-Za-z][A-Za-z0-9]{{0,62}}"
NSID_DESCRIPTION = "an NSID such as com.atproto.sync.subscribeRepos"
