"""Credentials for domains of an allow list: stored encrypted, and added to requests outside of the sandbox.

A program in the sandbox sends a plain-http request to the domain. The proxy sends it over TLS, to port 443 in place of port 80,
with the credential in the Authorization header. Only downloads have the credential, unless the operator says more."""

import re
from dataclasses import dataclass
from datetime import datetime

from sandboxes.db import encryption
from sandboxes.egress.allow_list.domains import is_allowed, is_domain
from sandboxes.models import EgressCredential, Policy

HTTP_PORT, HTTPS_PORT = 80, 443
AUTHORIZATION_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31} [\x21-\x7e](?:[\x20-\x7e]{0,4094}[\x21-\x7e])?")


@dataclass(frozen=True)
class Credential:
    """Authorization header of a domain."""

    authorization: str
    writes: bool = False  # sent with every method, not only with downloads


class InvalidCredential(ValueError):
    """The domain or the header value is not valid. The message never contains the value."""


def set_credential(policy: Policy, domain: str, authorization: str, *, writes: bool = False, now: datetime) -> bool:
    """Store or replace the Authorization header for a domain. Return whether it is new. Raise InvalidCredential."""
    if not is_domain(domain):
        raise InvalidCredential("The domain is not a lower-case domain name with at least two labels.")
    if not any(is_allowed(domain, port, [entry]) for entry in policy.allowed_domains for port in _list_ports(entry)):
        raise InvalidCredential(f"{domain} is not on the allow list of the policy {policy}.")
    if not AUTHORIZATION_PATTERN.fullmatch(authorization):
        raise InvalidCredential('Not an Authorization header such as "Bearer TOKEN": a scheme, a space, ASCII text.')
    sealed = encryption.encrypt(authorization.encode(), row=_encryption_context(policy.pk, domain))
    changes = {"sealed_authorization": sealed, "writes": writes, "changed_at": now}
    return EgressCredential.objects.update_or_create(policy=policy, domain=domain, defaults=changes)[1]


def remove_credential(policy: Policy, domain: str) -> bool:
    """Remove a credential. Return whether there was one. Open connections keep it until their end."""
    return bool(EgressCredential.objects.filter(policy=policy, domain=domain).delete()[0])


def find_credential(policy: Policy, domain: str) -> Credential | None:
    """Return the credential of a domain. Raise DecryptionFailed."""
    row = EgressCredential.objects.filter(policy=policy.pk, domain=domain).first() if policy.pk else None
    if row is None:
        return None
    secret = encryption.decrypt(bytes(row.sealed_authorization), row=_encryption_context(row.policy_id, domain))[0]
    return Credential(secret.decode(), row.writes)


def reencrypt() -> encryption.ReencryptionResult[EgressCredential]:
    """Encrypt every credential under the first encryption key, so that the other keys can be removed. Idempotent."""
    result: encryption.ReencryptionResult[EgressCredential] = encryption.ReencryptionResult()
    for row in EgressCredential.objects.select_related("policy"):
        context, sealed = _encryption_context(row.policy_id, row.domain), bytes(row.sealed_authorization)
        try:
            secret, is_current = encryption.decrypt(sealed, row=context)
        except encryption.DecryptionFailed:
            result.undecryptable.append(row)
            continue
        if is_current:
            result.current += 1
        else:
            unchanged = EgressCredential.objects.filter(pk=row.pk, sealed_authorization=row.sealed_authorization)
            result.changed += unchanged.update(sealed_authorization=encryption.encrypt(secret, row=context))
    return result


def _list_ports(entry: str) -> tuple[int, ...]:
    port = entry.rpartition(":")[2]
    return (int(port),) if port.isdigit() else (HTTP_PORT,)


def _encryption_context(policy_id: int, domain: str) -> str:
    return f"egress credential {policy_id} {domain}"
