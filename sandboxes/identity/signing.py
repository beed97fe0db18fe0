"""Who an agent is to others: its signing key, and the service tokens that speak for it. No private key leaves here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import structlog
from django.db import IntegrityError, transaction

from sandboxes.db import encryption
from sandboxes.errors import SigningKeyDecryptionFailed, SigningKeyExists, SigningKeyNotFound, SigningKeyRevoked
from sandboxes.identity import curves
from sandboxes.identity.curves import PrivateKey
from sandboxes.lifecycle import checkpoint
from sandboxes.models.identity import ACTIVE_KEY_FILTER, MintedToken, SigningKey

log = structlog.get_logger(__name__)
DEFAULT_TOKEN_LIFETIME, MIN_TOKEN_LIFETIME, MAX_TOKEN_LIFETIME = (
    timedelta(seconds=60),
    timedelta(seconds=1),
    timedelta(minutes=5),
)
TOKEN_RETENTION = timedelta(days=90)  # rows that say who had which token


# --- keys ---------------------------------------------------------------------------------------------------------


def get_active_key(agent_did: str, *, lock: bool = False) -> SigningKey:
    """The key that signs for the agent, read anew each time. NoSigningKey, KeyRevoked.

    Locked, it is neither rotated nor revoked before this transaction ends."""
    keys = SigningKey.objects.filter(agent_did=agent_did).order_by("-pk")
    while True:
        signs = keys.filter(ACTIVE_KEY_FILTER)
        if key := (signs.select_for_update(no_key=True) if lock else signs).first():
            return key
        latest = keys.first()
        if latest is None:
            raise SigningKeyNotFound
        if latest.revoked_at:
            raise SigningKeyRevoked
        # It was rotated between the two looks: the next one finds its successor.


def create_key(agent_did: str, *, now: datetime, actor: str = "", private: PrivateKey | None = None) -> SigningKey:
    """The agent signs from now on, with this key or else with a new one. SigningKeyExists if it did before."""
    private = private or curves.generate_key()
    key = SigningKey(
        agent_did=agent_did, algorithm=private.algorithm, public_key=private.public, created_at=now, created_by=actor
    )
    key.sealed = encryption.seal(private.secret, row=_encryption_context(key))
    try:
        with transaction.atomic():
            key.save(force_insert=True)
    except IntegrityError:
        if SigningKey.objects.filter(public_key=key.public_key).exists():
            raise SigningKeyExists(
                "This key was here before. A key signs for one agent, and never again after its end."
            ) from None
        raise SigningKeyExists from None
    log.info("signing key created", agent=agent_did, key=key.did_key, actor=actor)
    return key


def rotate_key(agent_did: str, *, now: datetime, actor: str = "", private: PrivateKey | None = None) -> SigningKey:
    """Another key signs for the agent from now on, of the same algorithm if none is given; nothing is minted with the old
    one any more, whose private half is gone. NoSigningKey, KeyRevoked."""
    while True:
        if key := replace_key(get_active_key(agent_did), now=now, actor=actor, private=private):
            return key


def replace_key(old: SigningKey, *, now: datetime, actor: str = "", private: PrivateKey | None = None) -> SigningKey | None:
    """Rotate away from this key; None if it does not sign any more."""
    with transaction.atomic(durable=True):
        if not _end_key(old, retired_at=now, ended_by=actor):
            return None
        return create_key(old.agent_did, now=now, actor=actor, private=private or curves.generate_key(old.algorithm))


def revoke_active_key(agent_did: str, *, now: datetime, actor: str = "") -> SigningKey:
    """Nothing is minted for the agent until it has another key. The key it had; NoSigningKey, KeyRevoked."""
    while True:
        key = get_active_key(agent_did)
        if revoke_key(key, now=now, actor=actor):
            key.refresh_from_db()
            return key


def revoke_key(key: SigningKey, *, now: datetime, actor: str = "") -> bool:
    """The same for exactly this key. False if it does not sign any more."""
    return _end_key(key, revoked_at=now, ended_by=actor)


def _end_key(key: SigningKey, **how: Any) -> bool:
    ended = SigningKey.objects.filter(ACTIVE_KEY_FILTER, pk=key.pk).update(sealed=None, **how)
    if ended:
        log.info("signing key ended", agent=key.agent_did, key=key.did_key, actor=how["ended_by"])
    return bool(ended)


@dataclass
class ReencryptionResult:
    """What became of the stored private keys."""

    changed: int = 0
    already: int = 0
    unopened: list[SigningKey] = field(default_factory=list)


def reencrypt_keys() -> ReencryptionResult:
    """Seal every private key under the first encryption key, so that the others can be taken away. Safe twice."""
    found = ReencryptionResult()
    for key in SigningKey.objects.filter(ACTIVE_KEY_FILTER):
        try:
            private, newest = _decrypt_private_key(key)
        except SigningKeyDecryptionFailed:
            found.unopened.append(key)
            continue
        if newest:
            found.already += 1
        else:
            sealed = encryption.seal(private.secret, row=_encryption_context(key))
            found.changed += SigningKey.objects.filter(ACTIVE_KEY_FILTER, pk=key.pk).update(sealed=sealed)
    return found


def build_verification_method(key: SigningKey) -> dict[str, str]:
    """What the agent's DID document has to say for others to know its signatures."""
    return {
        "id": f"{key.agent_did}#atproto",
        "type": "Multikey",
        "controller": key.agent_did,
        "publicKeyMultibase": key.public_key,
    }


def _decrypt_private_key(key: SigningKey) -> tuple[PrivateKey, bool]:
    """The private key, and whether it is sealed under the first encryption key."""
    try:
        secret, newest = encryption.unseal(bytes(key.sealed or b""), row=_encryption_context(key))
    except encryption.DecryptionFailed:
        log.error("signing key cannot be opened", agent=key.agent_did, key=key.did_key)
        raise SigningKeyDecryptionFailed from None
    return PrivateKey(key.algorithm, secret), newest


def _encryption_context(key: SigningKey) -> str:
    return f"{key.agent_did} {key.algorithm} {key.public_key}"


# --- tokens -------------------------------------------------------------------------------------------------------


def create_service_token(
    agent_did: str, *, aud: str, lxm: str, now: datetime, lifetime: timedelta = DEFAULT_TOKEN_LIFETIME, **more: Any
) -> str:
    """A token by which the agent calls one method (an NSID) of one service (a DID). Like mint, where `more` is listed."""
    return mint_service_token(agent_did, aud=aud, lxm=lxm, now=now, lifetime=lifetime, **more)[0]


def mint_service_token(
    agent_did: str,
    *,
    aud: str,
    lxm: str,
    now: datetime,
    lifetime: timedelta = DEFAULT_TOKEN_LIFETIME,
    holder: UUID | None = None,
    actor: str = "",
    fence: Callable[[], object] = bool,
) -> tuple[str, MintedToken]:
    """An AT Protocol service token and the row that says so: whoever is given one is in the database.

    `fence` is called first in the transaction that writes the row; it locks what the right to mint hangs on, and may
    raise. NoSigningKey, KeyRevoked, KeyUnopened; ValueError for a lifetime not from SHORTEST to LONGEST."""
    if not MIN_TOKEN_LIFETIME <= lifetime <= MAX_TOKEN_LIFETIME:
        raise ValueError(f"A service token lives from {MIN_TOKEN_LIFETIME} to {MAX_TOKEN_LIFETIME}.")
    issued = int(now.timestamp())
    expires = issued + int(lifetime.total_seconds())
    with transaction.atomic(durable=True):
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


def purge_old_tokens(*, now: datetime, limit: int = 10_000) -> int:
    """Remove rows of service tokens minted more than TOKENS_KEPT ago, the oldest first; how many. None is good any more."""
    old = MintedToken.objects.filter(at__lt=now - TOKEN_RETENTION).order_by("at", "jti").values_list("pk", flat=True)[:limit]
    return MintedToken.objects.filter(pk__in=list(old)).delete()[0]
