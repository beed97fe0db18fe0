"""Agent signing keys and service tokens. No function returns a private key."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import structlog
from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from sandboxes import audit
from sandboxes.audit import Actor
from sandboxes.db import dialect, encryption
from sandboxes.errors import SigningKeyDecryptionFailed, SigningKeyExists, SigningKeyNotFound, SigningKeyRevoked
from sandboxes.identity import curves
from sandboxes.identity.curves import PrivateKey
from sandboxes.lifecycle import checkpoint
from sandboxes.models.identity import ACTIVE_KEY_FILTER, MintedToken, SigningKey

log = structlog.get_logger(__name__)
DEFAULT_TOKEN_LIFETIME = timedelta(seconds=60)
MIN_TOKEN_LIFETIME, MAX_TOKEN_LIFETIME = timedelta(seconds=1), timedelta(minutes=5)
TOKEN_RETENTION = timedelta(days=90)  # of the rows that record minted tokens


# --- keys ---------------------------------------------------------------------------------------------------------


def get_active_key(agent_did: str, *, lock: bool = False) -> SigningKey:
    """Return the active key of the agent, read from the database. Raise SigningKeyNotFound or SigningKeyRevoked.

    With `lock` the key cannot be rotated or revoked before the transaction ends."""
    keys = SigningKey.objects.filter(agent_did=agent_did).order_by("-pk")
    while True:
        active = keys.filter(ACTIVE_KEY_FILTER)
        if key := (active.select_for_update(no_key=True) if lock else active).first():
            return key
        latest = keys.first()
        if latest is None:
            raise SigningKeyNotFound
        if latest.revoked_at:
            raise SigningKeyRevoked
        # The key was rotated between the two queries: the next iteration finds its successor.


def create_key(
    agent_did: str, *, now: datetime, actor: Actor = audit.CONTROL_PLANE, private: PrivateKey | None = None
) -> SigningKey:
    """Create the agent's first active key from `private` or a generated key. Raise SigningKeyExists if the agent has one."""
    with transaction.atomic():
        key = _insert_key(agent_did, private or curves.generate_key(), now=now, actor=actor)
        audit.record(key, "Create signing key", f"{key.did_key}, {key.algorithm}", actor=actor, now=now)
    return key


def _insert_key(agent_did: str, private: PrivateKey, *, now: datetime, actor: str) -> SigningKey:
    key = SigningKey(
        agent_did=agent_did, algorithm=private.algorithm, public_key=private.public, created_at=now, created_by=actor
    )
    key.sealed = encryption.encrypt(private.secret, row=_encryption_context(key))
    try:
        with transaction.atomic():
            key.save(force_insert=True)
    except IntegrityError as error:
        dialect.raise_unless_unique(error)
        if SigningKey.objects.filter(public_key=key.public_key).exists():
            raise SigningKeyExists(
                "This key was used before. A key belongs to one agent and cannot be used again after it was retired or revoked."
            ) from None
        raise SigningKeyExists from None
    log.info("signing key created", agent=agent_did, key=key.did_key, actor=actor)
    return key


def rotate_key(
    agent_did: str, *, now: datetime, actor: Actor = audit.CONTROL_PLANE, private: PrivateKey | None = None
) -> SigningKey:
    """Replace the agent's active key by `private` or a generated key of the same algorithm, and delete the old private key.

    Raise SigningKeyNotFound or SigningKeyRevoked."""
    while True:
        if key := replace_key(get_active_key(agent_did), now=now, actor=actor, private=private):
            return key


def replace_key(
    old: SigningKey, *, now: datetime, actor: Actor = audit.CONTROL_PLANE, private: PrivateKey | None = None
) -> SigningKey | None:
    """Replace `old`, if it is the active key. Return its successor, or None if `old` is not active."""
    with transaction.atomic(durable=True):
        if not _end_key(old, retired_at=now, ended_by=actor):
            return None
        key = _insert_key(old.agent_did, private or curves.generate_key(old.algorithm), now=now, actor=actor)
        audit.record(old, "Rotate signing key", f"{old.did_key} replaced by {key.did_key}", actor=actor, now=now)
        return key


def revoke_active_key(agent_did: str, *, now: datetime, actor: Actor = audit.CONTROL_PLANE) -> SigningKey:
    """Revoke the agent's active key and return it. No token is minted until the agent has another key.

    Raise SigningKeyNotFound or SigningKeyRevoked."""
    while True:
        key = get_active_key(agent_did)
        if revoke_key(key, now=now, actor=actor):
            key.refresh_from_db()
            return key


def revoke_key(key: SigningKey, *, now: datetime, actor: Actor = audit.CONTROL_PLANE) -> bool:
    """Revoke `key`. Return False if `key` is not active."""
    with transaction.atomic():
        revoked = _end_key(key, revoked_at=now, ended_by=actor)
        if revoked:
            audit.record(key, "Revoke signing key", key.did_key, actor=actor, now=now)
    return revoked


def _end_key(key: SigningKey, **changes: Any) -> bool:
    ended = SigningKey.objects.filter(ACTIVE_KEY_FILTER, pk=key.pk).update(sealed=None, **changes)
    if ended:
        log.info("signing key ended", agent=key.agent_did, key=key.did_key, actor=changes["ended_by"])
    return bool(ended)


def reencrypt_keys() -> encryption.ReencryptionResult[SigningKey]:
    """Encrypt every private key under the first encryption key, so that the other keys can be removed. Idempotent."""
    result: encryption.ReencryptionResult[SigningKey] = encryption.ReencryptionResult()
    for key in SigningKey.objects.filter(ACTIVE_KEY_FILTER):
        try:
            private, is_current = _decrypt_private_key(key)
        except SigningKeyDecryptionFailed:
            result.undecryptable.append(key)
            continue
        if is_current:
            result.current += 1
        else:
            sealed = encryption.encrypt(private.secret, row=_encryption_context(key))
            result.changed += SigningKey.objects.filter(ACTIVE_KEY_FILTER, pk=key.pk).update(sealed=sealed)
    return result


def build_verification_method(key: SigningKey) -> dict[str, str]:
    """Build the verification method to publish in the agent's DID document."""
    return {
        "id": f"{key.agent_did}#atproto",
        "type": "Multikey",
        "controller": key.agent_did,
        "publicKeyMultibase": key.public_key,
    }


def _decrypt_private_key(key: SigningKey) -> tuple[PrivateKey, bool]:
    """Return the private key and whether the first encryption key encrypted it."""
    try:
        secret, is_current = encryption.decrypt(bytes(key.sealed or b""), row=_encryption_context(key))
    except encryption.DecryptionFailed:
        log.error("signing key decryption failed", agent=key.agent_did, key=key.did_key)
        raise SigningKeyDecryptionFailed from None
    return PrivateKey(key.algorithm, secret), is_current


def _encryption_context(key: SigningKey) -> str:
    return f"{key.agent_did} {key.algorithm} {key.public_key}"


# --- tokens -------------------------------------------------------------------------------------------------------


def create_service_token(
    agent_did: str, *, aud: str, lxm: str, now: datetime, lifetime: timedelta = DEFAULT_TOKEN_LIFETIME, **options: Any
) -> str:
    """Like mint_service_token, which takes the `options`. Return the token alone."""
    return mint_service_token(agent_did, aud=aud, lxm=lxm, now=now, lifetime=lifetime, **options)[0]


def mint_service_token(
    agent_did: str,
    *,
    aud: str,
    lxm: str,
    now: datetime,
    lifetime: timedelta = DEFAULT_TOKEN_LIFETIME,
    holder: UUID | None = None,
    actor: str = "",
    fence: Callable[[], object] | None = None,
) -> tuple[str, MintedToken]:
    """Mint an AT Protocol service token for one method (`lxm`, an NSID) of one service (`aud`, a DID).

    Inserts the row that records the token, in the same transaction. `fence` is called first in this transaction: to lock the
    rows that grant the right to mint, or to raise.
    Raise SigningKeyNotFound, SigningKeyRevoked, SigningKeyDecryptionFailed, or ValueError for a lifetime outside
    MIN_TOKEN_LIFETIME to MAX_TOKEN_LIFETIME."""
    if not MIN_TOKEN_LIFETIME <= lifetime <= MAX_TOKEN_LIFETIME:
        raise ValueError(f"The lifetime of a service token must be {MIN_TOKEN_LIFETIME} to {MAX_TOKEN_LIFETIME}.")
    issued = int(now.timestamp())
    expires = issued + int(lifetime.total_seconds())
    with transaction.atomic(durable=True):
        if fence:
            fence()
        key = get_active_key(agent_did, lock=True)
        private, _ = _decrypt_private_key(key)
        jti = uuid4()
        claims = {"iss": agent_did, "aud": aud, "exp": expires, "iat": issued, "lxm": lxm, "jti": jti.hex}
        token = curves.sign_jwt(private, claims)
        minted = MintedToken.objects.create(
            jti=jti, holder=holder, agent_did=agent_did, key=key, aud=aud, lxm=lxm, at=now,
            expires_at=datetime.fromtimestamp(expires, UTC), actor=actor,
        )  # fmt: skip
        checkpoint("token minted", minted)
    return token, minted


def find_old_tokens(*, now: datetime) -> QuerySet[MintedToken]:
    """Return the rows of tokens older than TOKEN_RETENTION, oldest first."""
    return MintedToken.objects.filter(at__lt=now - TOKEN_RETENTION).order_by("at", "jti")
