"""Subjects of budgets: the rows that a scope and a name refer to."""

from collections.abc import Iterable
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Model

from billing.models import HOUSE_ACCOUNT_NAME, Account
from billing.models.budgets import Scope
from leases.models import DID_DESCRIPTION, AgentKey, EnvironmentType, validate_did
from leases.projects.models import Project
from sandboxes.formatting import suggest_match

MAX_SUGGESTIONS = 1000  # newest keys compared with an unknown one
NAMED: dict[str, tuple[type[Model], str]] = {
    Scope.ENVIRONMENT_TYPE: (EnvironmentType, "environment type"),
    Scope.ACCOUNT: (Account, "account"),
    Scope.PROJECT: (Project, "project"),
}


def require_subject(scope: str, subject: str) -> None:
    """Raise ValidationError, with the nearest known name, unless the subject exists. An agent may be named before it joins."""
    if scope == Scope.AGENT:
        try:
            validate_did(subject)
        except ValidationError:
            raise ValidationError(f"{subject[:80]!r} is not {DID_DESCRIPTION}.") from None
    elif scope == Scope.KEY:
        if not (subject.isascii() and subject.isdecimal() and AgentKey.objects.filter(pk=int(subject[:18])).exists()):
            raise ValidationError(f"No such API key: {subject[:80]}.")
    elif scope in NAMED and not (scope == Scope.ACCOUNT and subject == HOUSE_ACCOUNT_NAME):
        model, label = NAMED[scope]
        rows: Any = model._default_manager
        if "\0" in subject or not rows.filter(name=subject).exists():
            names: Iterable[str] = rows.values_list("name", flat=True)
            raise ValidationError(f"no such {label}: {subject[:80]}.{suggest_match(subject, names)}")


def find_key_id(prefix: str) -> str:
    """Return the id of the API key with a prefix, in any of the forms in which it is shown. Raise ValidationError."""
    bare = prefix.removeprefix("lh_").split("_")[0]
    row = AgentKey.objects.filter(prefix=bare).first()
    if row is None:
        prefixes = AgentKey.objects.order_by("-pk").values_list("prefix", flat=True)[:MAX_SUGGESTIONS]
        raise ValidationError(f"no such API key: {prefix[:80]}.{suggest_match(bare, prefixes)}")
    return str(row.pk)
