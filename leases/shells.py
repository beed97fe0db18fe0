"""Shells of a lease: a working directory and variables, which no command outside of the shell sees.

A shell is a row and has no process. It therefore costs nothing while it is not used, and outlives sleep and wake. The values of
its variables are stored encrypted, and deleted with the shell or after the end of the lease. `cd` and `export` in a command
change the command's own process, and not the shell."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from leases import leasing
from leases.errors import ShellDecryptionFailed, ShellExists, ShellNotFound, TooManyShells
from leases.models import Lease, LeaseStatus, Shell
from sandboxes.db import dialect, encryption
from sandboxes.providers.base import WORKSPACE

MAX_SHELLS = 64  # of one lease


@dataclass(frozen=True)
class CommandContext:
    """Working directory and variables of a command."""

    cwd: str
    env: Mapping[str, str]


def create_shell(pk: UUID, name: str, *, env: Mapping[str, str] | None = None, cwd: str = WORKSPACE, now: datetime) -> Shell:
    """Create a shell of an active lease. The sandbox is not used. Raise LeaseEnded, ShellExists or TooManyShells."""
    variables = dict(env or {})
    sealed = encryption.encrypt(json.dumps(variables).encode(), row=_encryption_context(pk, name))
    shell = Shell(lease_id=pk, name=name, cwd=cwd, env_names=sorted(variables), sealed_env=sealed, created_at=now)
    try:
        with transaction.atomic():
            lease = Lease.objects.select_for_update(no_key=True).get(pk=pk)  # serializes the count
            leasing.check_active(lease, now=now)
            if Shell.objects.filter(lease=pk).count() >= MAX_SHELLS:
                raise TooManyShells(f"Shell limit of the lease reached ({MAX_SHELLS}). Delete one, then try again.")
            shell.save(force_insert=True)
    except IntegrityError as error:
        dialect.raise_unless_unique(error)
        raise ShellExists(f'The lease has a shell "{name}".', field="name") from None
    return shell


def find_shell(pk: UUID, name: str) -> Shell:
    """Return a shell of a lease by its name. Raise ShellNotFound."""
    shell = Shell.objects.filter(lease=pk, name=name).first()
    if shell is None:
        raise ShellNotFound(f'The lease has no shell "{name}".')
    return shell


def delete_shell(pk: UUID, name: str) -> bool:
    """Delete a shell. Return whether there was one. Commands in progress continue."""
    return bool(Shell.objects.filter(lease=pk, name=name).delete()[0])


def build_context(pk: UUID, name: str | None, *, cwd: str | None, env: Mapping[str, str]) -> CommandContext:
    """Return the context of a command in a shell, or in none. `cwd` and `env` of the command precede those of the shell.

    Raise ShellNotFound or ShellDecryptionFailed."""
    if name is None:
        return CommandContext(cwd or WORKSPACE, env)
    shell = find_shell(pk, name)
    return CommandContext(cwd or shell.cwd, {**_decrypt_env(shell)[0], **env})


def find_of_ended_leases() -> QuerySet[Shell]:
    """Return the shells of all leases that have ended."""
    return Shell.objects.exclude(lease__status=LeaseStatus.ACTIVE).order_by("pk")


def reencrypt_shells() -> encryption.ReencryptionResult[Shell]:
    """Encrypt the variables of every shell under the first encryption key. Idempotent."""
    result: encryption.ReencryptionResult[Shell] = encryption.ReencryptionResult()
    for shell in Shell.objects.order_by("pk"):
        try:
            variables, is_current = _decrypt_env(shell)
        except ShellDecryptionFailed:
            result.undecryptable.append(shell)
            continue
        if is_current:
            result.current += 1
            continue
        sealed = encryption.encrypt(json.dumps(variables).encode(), row=_encryption_context(shell.lease_id, shell.name))
        # Guarded by the old value: a concurrent deletion and creation under the same name is left alone.
        result.changed += Shell.objects.filter(pk=shell.pk, sealed_env=bytes(shell.sealed_env)).update(sealed_env=sealed)
    return result


def _decrypt_env(shell: Shell) -> tuple[dict[str, str], bool]:
    """Return the variables, and whether the first encryption key encrypted them. Raise ShellDecryptionFailed."""
    try:
        content, is_current = encryption.decrypt(bytes(shell.sealed_env), row=_encryption_context(shell.lease_id, shell.name))
    except encryption.DecryptionFailed:
        raise ShellDecryptionFailed from None
    return json.loads(content), is_current


def _encryption_context(lease: UUID, name: str) -> str:
    return f"shell {lease} {name}"
