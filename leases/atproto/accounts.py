"""Accounts of agents at repository servers: set, remove, and the Authorization header of a request.

Sessions are kept in the memory of the process. A session ends when the server rejects its access token; then it is refreshed,
or opened again with the password."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import structlog
from django.db import transaction

from leases.atproto.models import AtprotoAccount, Authentication
from leases.atproto.service import CREATE_RECORD, CREATE_SESSION, REFRESH_SESSION, RepositoryService, ServiceError
from leases.errors import InvalidRequest
from leases.identity_patterns import AUDIENCE_DESCRIPTION, AUDIENCE_PATTERN
from leases.models import DID_DESCRIPTION, DID_PATTERN
from leases.patterns import require_match
from leases.service_urls import InvalidServiceUrl, check_service_url
from sandboxes import audit
from sandboxes.db import encryption
from sandboxes.identity import signing
from sandboxes.server_calls import Attempt

log = structlog.get_logger(__name__)
ACTOR = "atproto"  # in the records of service tokens


class AccountPasswordUnreadable(Exception):
    """The stored password of an account cannot be decrypted."""

    def __init__(self) -> None:
        super().__init__("The password of the account cannot be decrypted.")


@dataclass(frozen=True)
class Session:
    access_token: str
    refresh_token: str
    account_changed_at: datetime


_sessions: dict[int, Session] = {}  # by primary key of the account
_locks: dict[int, threading.Lock] = {}  # held during requests that open or refresh the session of an account


def set_account(
    agent_did: str,
    *,
    service_url: str,
    service_did: str = "",
    password: str | None = None,
    now: datetime,
    actor: audit.Actor = audit.CONTROL_PLANE,
) -> tuple[AtprotoAccount, bool]:
    """Add or replace the account of an agent, and return whether it is new.

    With a password the agent writes in a session, else with service tokens for `service_did`. Raise InvalidRequest that names
    the field."""
    require_match("agent_did", agent_did, DID_PATTERN, DID_DESCRIPTION)
    try:
        check_service_url(service_url, example="https://pds.example.org")
    except InvalidServiceUrl as error:
        raise InvalidRequest("service_url", str(error)) from None
    if service_did or password is None:
        require_match("service_did", service_did, AUDIENCE_PATTERN, AUDIENCE_DESCRIPTION)
    if password == "":
        raise InvalidRequest("password", "Empty.")
    sealed = None if password is None else encryption.encrypt(password.encode(), row=_encryption_context(agent_did))
    columns = {
        "service_url": service_url, "service_did": service_did, "sealed_password": sealed, "changed_at": now,
        "authentication": Authentication.SERVICE_TOKEN if password is None else Authentication.SESSION,
        "changed_by": actor,
    }  # fmt: skip
    with transaction.atomic():
        account, is_new = AtprotoAccount.objects.update_or_create(agent_did=agent_did, defaults=columns)
        detail = audit.describe_values(account, ["service_url", "service_did", "authentication"])
        audit.record(account, "Set AT Protocol account", detail, actor=actor, now=now)
    log.info(
        "AT Protocol account set", agent=agent_did, service=service_url, authentication=account.authentication, actor=actor
    )
    return account, is_new


def remove_account(agent_did: str, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> bool:
    """Remove the account of an agent. Return whether there was one."""
    with transaction.atomic():
        account = AtprotoAccount.objects.select_for_update().filter(agent_did=agent_did).first()
        if account:
            audit.record(account, "Remove AT Protocol account", account.service_url, actor=actor, now=now)
            account.delete()
    if account:
        log.info("AT Protocol account removed", agent=agent_did, actor=actor)
    return account is not None


def authorize(account: AtprotoAccount, *, now: datetime) -> Attempt[str]:
    """Return the Authorization header of one `createRecord` request. Yields the requests that open a session.

    Raise ServiceError, AccountPasswordUnreadable, and the errors of signing.mint_service_token."""
    if account.authentication == Authentication.SERVICE_TOKEN:
        token = signing.create_service_token(
            account.agent_did, aud=account.service_did, lxm=CREATE_RECORD, now=now, actor=ACTOR
        )
    else:
        token = (yield partial(_get_session, account)).access_token
    return f"Bearer {token}"


def renew_authorization(account: AtprotoAccount, authorization: str, *, now: datetime) -> Attempt[str]:
    """Return a header in place of `authorization`, which the server rejected. As authorize."""
    if account.authentication == Authentication.SESSION:
        yield partial(_renew_session, account, authorization)
    return (yield from authorize(account, now=now))


def _renew_session(account: AtprotoAccount, authorization: str) -> None:
    with _get_lock(account):
        session = _sessions.get(account.pk)
        if session and authorization == f"Bearer {session.access_token}":  # no other thread has renewed it
            del _sessions[account.pk]
            if renewed := _refresh(account, session):
                _sessions[account.pk] = renewed


def _get_session(account: AtprotoAccount) -> Session:
    with _get_lock(account):
        session = _sessions.get(account.pk)
        if session is None or session.account_changed_at != account.changed_at:
            session = _sessions[account.pk] = _open_session(account)
        return session


def _get_lock(account: AtprotoAccount) -> threading.Lock:
    return _locks.setdefault(account.pk, threading.Lock())


def _open_session(account: AtprotoAccount) -> Session:
    try:
        password, _ = encryption.decrypt(bytes(account.sealed_password or b""), row=_encryption_context(account.agent_did))
    except encryption.DecryptionFailed:
        raise AccountPasswordUnreadable from None
    body = {"identifier": account.agent_did, "password": password.decode()}
    return _read_session(account, RepositoryService(account.service_url).call(CREATE_SESSION, json=body))


def _refresh(account: AtprotoAccount, session: Session) -> Session | None:
    """Return a new session, or None: it is opened with the password then."""
    try:
        service = RepositoryService(account.service_url)
        return _read_session(account, service.call(REFRESH_SESSION, authorization=f"Bearer {session.refresh_token}"))
    except ServiceError:
        return None


def _read_session(account: AtprotoAccount, document: Mapping[str, object]) -> Session:
    access, refresh = document.get("accessJwt"), document.get("refreshJwt")
    if document.get("did") != account.agent_did or not (isinstance(access, str) and isinstance(refresh, str)):
        raise ServiceError("The server opened a session of another account.", retryable=False)
    return Session(access, refresh, account.changed_at)


def reencrypt() -> encryption.ReencryptionResult[AtprotoAccount]:
    """Encrypt every password under the first encryption key, so that the other keys can be removed. Idempotent."""
    result: encryption.ReencryptionResult[AtprotoAccount] = encryption.ReencryptionResult()
    for account in AtprotoAccount.objects.exclude(sealed_password=None).order_by("pk"):
        context, sealed = _encryption_context(account.agent_did), bytes(account.sealed_password or b"")
        try:
            password, is_current = encryption.decrypt(sealed, row=context)
        except encryption.DecryptionFailed:
            result.undecryptable.append(account)
            continue
        if is_current:
            result.current += 1
            continue
        unchanged = AtprotoAccount.objects.filter(pk=account.pk, sealed_password=account.sealed_password)
        result.changed += unchanged.update(sealed_password=encryption.encrypt(password, row=context))
    return result


def _encryption_context(agent_did: str) -> str:
    return f"AT Protocol account {agent_did}"
