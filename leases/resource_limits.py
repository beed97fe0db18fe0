"""Limits of the resources that a request may state: of an API key, an environment type or a pool."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction

from leases.errors import InvalidRequest
from sandboxes import audit
from sandboxes.formatting import pluralize
from sandboxes.models.resource_limits import ResourceLimits

LIMIT_FIELDS = tuple(field.name for field in ResourceLimits._meta.local_fields)


def check_limits(row: ResourceLimits, changes: Mapping[str, Any]) -> None:
    """Set limits of a row without saving it. Raise InvalidRequest, naming the field."""
    for name, value in changes.items():
        setattr(row, name, value)
    try:
        row.clean_fields(exclude={field.name for field in row._meta.get_fields()} - set(changes))
    except ValidationError as error:
        name, messages = next(iter(error.message_dict.items()))
        raise InvalidRequest(name, " ".join(messages)) from None


def set_limits(row: ResourceLimits, changes: Mapping[str, Any], *, actor: audit.Actor, now: datetime) -> None:
    """Change limits of a row, by the names of their columns. Raise InvalidRequest. Existing leases keep their resources."""
    before = {name: getattr(row, name) for name in changes}
    check_limits(row, changes)
    if changes:
        with transaction.atomic():
            row.save(update_fields=[*changes])
            audit.record(row, "Set limits", audit.describe_changes(before, row), actor=actor, now=now)


def describe_limits(row: ResourceLimits) -> list[str]:
    """Return the limits that are set, as text."""
    amounts = [
        f"{row.max_memory_mib:,} MiB of memory" if row.max_memory_mib is not None else "",
        f"{row.max_millicpus / 1000:g} CPU" if row.max_millicpus is not None else "",
        f"{row.max_disk_mib:,} MiB of disk" if row.max_disk_mib is not None else "",
        pluralize(row.max_gpus, "GPU", "GPUs") if row.max_gpus is not None else "",
    ]
    lists = {"images": row.allowed_images, "sizes": row.allowed_sizes, "GPU types": row.allowed_gpu_types}
    return [f"at most {text}" for text in amounts if text] + [
        f"{name}: {', '.join(names)}" for name, names in lists.items() if names
    ]
