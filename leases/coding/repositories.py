"""Repositories and their credentials: add, open for Git and for the forge, encrypt again."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import structlog
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import ProtectedError

from leases.coding.forges import Forge, forge_of
from leases.coding.git import Git, InvalidCloneUrl, get_protocol, open_git
from leases.coding.models import ForgeKind, Repository
from leases.errors import Conflict, InvalidRequest, RepositoryNotFound, RepositoryUnavailable
from leases.projects import registry
from leases.service_urls import InvalidServiceUrl, check_service_url
from sandboxes import audit
from sandboxes.db import encryption

PROJECT_PATTERN = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")
log = structlog.get_logger(__name__)


def find(name: str) -> Repository:
    """Return a repository. Raise RepositoryNotFound."""
    row = Repository.objects.filter(name=name).first()
    if row is None:
        raise RepositoryNotFound()
    return row


def save(
    name: str, *, token: str | None = None, project: str | None = None, now: datetime,
    actor: audit.Actor = audit.CONTROL_PLANE, **fields: Any,
) -> tuple[Repository, bool]:  # fmt: skip
    """Add or change a repository, and return whether it is new. Fields that are None keep their value; an empty token removes
    the stored one.

    Raise InvalidRequest that names the field, and Conflict for another project than that of its tasks."""
    stored = Repository.objects.filter(name=name).first()
    row, is_new = build(name, project=project, now=now, **fields)
    changed = [field for field, value in {**fields, "project": project}.items() if value is not None]
    if token is not None:
        row.sealed_token = encryption.encrypt(token.encode(), row=_encryption_context(row)) if token else None
        changed.append("sealed_token")
    with transaction.atomic():
        if is_new:
            row.save(force_insert=True)
        else:
            row.save(update_fields=changed)
        _record(stored, row, changed, actor=actor, now=now)
    log.info("repository saved", repository=name, is_new=is_new, actor=actor)
    return row, is_new


def build(name: str, *, project: str | None = None, now: datetime, **fields: Any) -> tuple[Repository, bool]:
    """Validate the values of `save` without saving them. Return the repository with them, and whether it is new.

    Raise the errors of `save`."""
    row = Repository.objects.filter(name=name).first()
    is_new = row is None
    if row is None:
        row = Repository(name=name, created_at=now)
    for field, value in fields.items():
        if value is not None:
            setattr(row, field, value)
    if project is not None:
        _set_project(row, project)
    _validate(row)
    return row, is_new


def _record(stored: Repository | None, row: Repository, changed: Sequence[str], *, actor: audit.Actor, now: datetime) -> None:
    """Record the new and the former columns, and of the token only that there is another one."""
    columns = [name for name in changed if name != "sealed_token"]
    if stored is None:
        detail = audit.describe_values(row, columns)
    else:
        detail = audit.describe_changes({name: getattr(stored, name) for name in columns}, row)
    token = "" if "sealed_token" not in changed else "access token set" if row.sealed_token else "access token removed"
    action = "Add repository" if stored is None else "Change repository"
    if text := ", ".join(filter(None, [detail, token])):
        audit.record(row, action, text, actor=actor, now=now)


def remove(name: str, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> None:
    """Delete a repository with its credentials. Raise RepositoryNotFound, and Conflict for one that has tasks."""
    row = find(name)
    try:
        with transaction.atomic():
            audit.record(row, "Remove repository", row.clone_url, actor=actor, now=now)
            row.delete()
    except ProtectedError:
        raise Conflict("The repository has tasks. Disable it instead.") from None
    log.info("repository removed", repository=name, actor=actor)


def set_enabled(name: str, enabled: bool, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> bool:
    """Accept new tasks in a repository, or refuse them. Existing tasks go on. Return False if nothing changed."""
    with transaction.atomic():
        changed = Repository.objects.filter(name=name, enabled=not enabled).update(enabled=enabled)
        if changed:
            action = "Enable repository" if enabled else "Disable repository"
            audit.record(find(name), action, actor=actor, now=now)
    if changed:
        log.info("repository enabled" if enabled else "repository disabled", repository=name, actor=actor)
    return bool(changed)


def _set_project(row: Repository, name: str) -> None:
    project = registry.find(name)
    if row.pk and row.project_id != project.pk and row.tasks.exists():
        raise Conflict("The repository has tasks in another project.", field="project")
    row.project = project


def _validate(row: Repository) -> None:
    try:
        get_protocol(row.clone_url)
    except InvalidCloneUrl as error:
        raise InvalidRequest("clone_url", str(error)) from None
    if row.forge == ForgeKind.GITHUB:
        _validate_forge(row)
    try:
        row.full_clean(validate_unique=False)
    except ValidationError as error:
        field, messages = next(iter(error.message_dict.items()))
        raise InvalidRequest(field, messages[0]) from None


def _validate_forge(row: Repository) -> None:
    try:
        check_service_url(row.api_url, example="https://api.github.com")
    except InvalidServiceUrl as error:
        raise InvalidRequest("api_url", str(error)) from None
    if not PROJECT_PATTERN.fullmatch(row.forge_project):
        raise InvalidRequest("forge_project", "Must be owner/name.")


def read_token(row: Repository) -> str:
    """Return the access token, "" without one. Raise RepositoryUnavailable."""
    if not row.sealed_token:
        return ""
    try:
        return encryption.decrypt(bytes(row.sealed_token), row=_encryption_context(row))[0].decode()
    except encryption.DecryptionFailed:
        raise RepositoryUnavailable("The token of the repository cannot be decrypted.") from None


@contextmanager
def open_repository_git(row: Repository) -> Iterator[Git]:
    """Yield Git in a new bare repository, with the credentials for the clone URL."""
    token = read_token(row)
    with open_git(row.clone_url, token=token, ssh_key_path=row.ssh_key_path, max_file_bytes=row.max_mib << 20) as git:
        yield git


def open_forge(row: Repository, git: Git) -> Forge:
    return forge_of(
        row.forge, repository=row.clone_url, api_url=row.api_url, project=row.forge_project,
        token=read_token(row), git=git.read,
    )  # fmt: skip


def reencrypt() -> encryption.ReencryptionResult[Repository]:
    """Encrypt the token of every repository under the first encryption key. Idempotent."""
    result: encryption.ReencryptionResult[Repository] = encryption.ReencryptionResult()
    for row in Repository.objects.exclude(sealed_token=None).order_by("pk"):
        sealed = bytes(row.sealed_token or b"")
        try:
            secret, is_current = encryption.decrypt(sealed, row=_encryption_context(row))
        except encryption.DecryptionFailed:
            result.undecryptable.append(row)
            continue
        if is_current:
            result.current += 1
            continue
        unchanged = Repository.objects.filter(pk=row.pk, sealed_token=row.sealed_token)
        result.changed += unchanged.update(sealed_token=encryption.encrypt(secret, row=_encryption_context(row)))
    return result


def _encryption_context(row: Repository) -> str:
    return f"repository {row.name}"
