"""Repositories and their credentials: add, open for Git and for the forge, encrypt again."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import structlog
from django.core.exceptions import ValidationError

from leases.coding.forges import Forge, forge_of
from leases.coding.git import Git, InvalidCloneUrl, get_protocol, open_git
from leases.coding.models import ForgeKind, Repository
from leases.errors import InvalidRequest, RepositoryNotFound, RepositoryUnavailable
from sandboxes.db import encryption

log = structlog.get_logger(__name__)
TOKEN, WEBHOOK_SECRET = "token", "webhook_secret"  # keys of the sealed secrets


def find(name: str) -> Repository:
    """Return a repository. Raise RepositoryNotFound."""
    row = Repository.objects.filter(name=name).first()
    if row is None:
        raise RepositoryNotFound()
    return row


def save(
    name: str, *, secrets: Mapping[str, str | None], now: datetime, actor: str = "", **fields: Any
) -> tuple[Repository, bool]:
    """Add or change a repository, and return whether it is new. Fields and secrets that are None keep their value.

    Raise InvalidRequest that names the field."""
    row = Repository.objects.filter(name=name).first()
    is_new = row is None
    if row is None:
        row = Repository(name=name, created_at=now)
    for field, value in fields.items():
        if value is not None:
            setattr(row, field, value)
    _validate(row)
    changed = {key: value for key, value in secrets.items() if value is not None}
    if changed:
        merged = {**({} if is_new else read_secrets(row)), **changed}
        text = json.dumps({key: value for key, value in merged.items() if value})
        row.sealed_secrets = encryption.encrypt(text.encode(), row=_encryption_context(row))
    row.save(force_insert=is_new)
    log.info("repository saved", repository=name, is_new=is_new, actor=actor)
    return row, is_new


def _validate(row: Repository) -> None:
    try:
        get_protocol(row.clone_url)
    except InvalidCloneUrl as error:
        raise InvalidRequest("clone_url", str(error)) from None
    if row.forge == ForgeKind.GITHUB and not (row.api_url and row.project.count("/") == 1):
        raise InvalidRequest("api_url", "A GitHub-compatible forge needs api_url, and project as owner/name.")
    try:
        row.full_clean(validate_unique=False)
    except ValidationError as error:
        field, messages = next(iter(error.message_dict.items()))
        raise InvalidRequest(field, messages[0]) from None


def read_secrets(row: Repository) -> dict[str, str]:
    """Return the token and the webhook secret, as far as they are set. Raise RepositoryUnavailable."""
    if not row.sealed_secrets:
        return {}
    try:
        return dict(json.loads(encryption.decrypt(bytes(row.sealed_secrets), row=_encryption_context(row))[0]))
    except encryption.DecryptionFailed:
        raise RepositoryUnavailable("The credentials of the repository cannot be decrypted.") from None


@contextmanager
def open_repository_git(row: Repository) -> Iterator[Git]:
    """Yield Git in a new bare repository, with the credentials for the clone URL."""
    token = read_secrets(row).get(TOKEN, "")
    with open_git(row.clone_url, token=token, ssh_key_path=row.ssh_key_path, max_file_bytes=row.max_mib << 20) as git:
        yield git


def open_forge(row: Repository, git: Git) -> Forge:
    return forge_of(
        row.forge, repository=row.clone_url, api_url=row.api_url, project=row.project,
        token=read_secrets(row).get(TOKEN, ""), git=git.read,
    )  # fmt: skip


def reencrypt() -> encryption.ReencryptionResult[Repository]:
    """Encrypt the secrets of every repository under the first encryption key. Idempotent."""
    result: encryption.ReencryptionResult[Repository] = encryption.ReencryptionResult()
    for row in Repository.objects.exclude(sealed_secrets=None).order_by("pk"):
        sealed = bytes(row.sealed_secrets or b"")
        try:
            secret, is_current = encryption.decrypt(sealed, row=_encryption_context(row))
        except encryption.DecryptionFailed:
            result.undecryptable.append(row)
            continue
        if is_current:
            result.current += 1
            continue
        unchanged = Repository.objects.filter(pk=row.pk, sealed_secrets=row.sealed_secrets)
        result.changed += unchanged.update(sealed_secrets=encryption.encrypt(secret, row=_encryption_context(row)))
    return result


def _encryption_context(row: Repository) -> str:
    return f"repository {row.name}"
