"""Patterns of the claims of service tokens."""

from leases.models import DID_PATTERN
from sandboxes.nsid import NSID_DESCRIPTION as NSID_DESCRIPTION
from sandboxes.nsid import NSID_PATTERN as NSID_PATTERN

AUDIENCE_PATTERN = rf"{DID_PATTERN}(#[A-Za-z][A-Za-z0-9._~-]{{0,63}})?"
AUDIENCE_DESCRIPTION = (
    "a DID of at most 255 characters, with or without the fragment of a service, such as did:web:relay.example#relay"
)
