"""Signed URLs of files: access to one path of a lease by one method, without an API key.

The token in a URL is signed (django.core.signing, with a salt of its own) and not stored. A request acts with the key that has
created the URL: a revoked or expired key, a secret that is not accepted any more, or a key that may no longer act for the agent
ends all of its URLs at once, and so does the end of the lease. The token is in the query, since error logs contain the path of
a request."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from django.core import signing

from leases import leasing
from leases.errors import SignedUrlExpired, SignedUrlInvalid
from leases.grants import issuers
from leases.grants.issuers import Issuer, IssuerKind, Right
from leases.models import AgentKey
from sandboxes.db.clock import format_timestamp

SALT = "leasehold.file-url.2"
METHODS = ("GET", "PUT")
MAX_LIFETIME = timedelta(days=1)
MAX_TOKEN_CHARS = 20_000  # a path of 4000 bytes, escaped in JSON and encoded in base64


@dataclass(frozen=True)
class FileGrant:
    """Permission of a signed URL. `max_bytes` limits the body of a PUT."""

    lease_id: UUID
    root: str  # /workspace or /data
    path: str  # relative to the root
    method: str  # GET permits HEAD, too
    max_bytes: int
    key_id: int
    secret: str  # of the key, see Issuer
    expires_at: datetime

    @property
    def issuer(self) -> Issuer:
        return Issuer(IssuerKind.KEY, self.key_id, self.secret)


def sign_grant(grant: FileGrant, *, now: datetime) -> str:
    """Return the token of a URL with this permission. Raise LeaseEnded."""
    leasing.require_active(grant.lease_id, now=now)
    fields = asdict(grant) | {"lease_id": grant.lease_id.hex, "expires_at": int(grant.expires_at.timestamp())}
    return signing.Signer(salt=SALT).sign_object(fields)


def verify_token(token: str, method: str, *, now: datetime) -> tuple[FileGrant, AgentKey]:
    """Return the permission of a token and the key that has created it. Raise SignedUrlInvalid, SignedUrlExpired.

    The caller checks the key's scope and its access to the lease, and that the lease is active."""
    if len(token) > MAX_TOKEN_CHARS:
        raise SignedUrlInvalid()
    try:
        fields = signing.Signer(salt=SALT).unsign_object(token)
    except (signing.BadSignature, ValueError):
        raise SignedUrlInvalid() from None
    expires_at = datetime.fromtimestamp(fields["expires_at"], UTC)
    grant = FileGrant(**fields | {"lease_id": UUID(fields["lease_id"]), "expires_at": expires_at})
    if grant.method != ("GET" if method == "HEAD" else method):
        raise SignedUrlInvalid(f"This URL is for {grant.method} requests.")
    require_current(grant, now=now)
    key = issuers.find_key(Right(grant.issuer, scopes=()), now=now)
    if key is None:
        raise SignedUrlInvalid(f"The API key that created this URL {issuers.REVOKED}.")
    return grant, key


def require_current(grant: FileGrant, *, now: datetime) -> None:
    """Raise SignedUrlExpired if the URL has expired."""
    if grant.expires_at <= now:
        raise SignedUrlExpired(f"The URL expired at {format_timestamp(grant.expires_at)}.")
