"""Versions of environment packs: stored, assigned to environment types, upgraded."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction

from leases.errors import Conflict, InvalidPack, InvalidRequest
from leases.models import EnvironmentType
from leases.packs.folder import PackFolder, list_shipped_folders, read_folder
from sandboxes import audit
from sandboxes.db.durations import parse_duration
from sandboxes.models import PackAssignment, PackOrigin, PackVersion, Policy
from sandboxes.state.skills import MARKER_NAME, build_marker, pack_archive

_DURATION_KEYS = ("ttl", "max_ttl", "suspend_after", "turn_timeout", "auto_stop", "auto_delete")
_OPTIONAL_DURATION_KEYS = frozenset({"auto_stop", "auto_delete"})  # may be 0: never


@dataclass(frozen=True)
class Assigned:
    """Result of an assignment."""

    environment_type: str
    was: PackVersion | None
    version: PackVersion
    changed: dict[str, Any]  # field of the environment type -> new value
    kept: list[str]  # fields with a new default that an operator has changed


def add_version(
    folder: PackFolder, *, now: datetime, origin: PackOrigin = PackOrigin.ADDED, actor: audit.Actor = audit.CONTROL_PLANE
) -> tuple[PackVersion, bool]:
    """Store a version. Return the row, and whether it is new. Idempotent.

    Raise Conflict if the version exists with other content, InvalidPack for an invalid default."""
    marker = build_marker(folder.name, folder.version, folder.files)
    columns: dict[str, Any] = {
        "digest": folder.digest, "description": folder.description, "origin": origin, "defaults": dict(folder.defaults),
        "schemas": dict(folder.schemas), "files": folder.files, "marker_digest": hashlib.sha256(marker).hexdigest(),
        "archive": pack_archive({**folder.skill, MARKER_NAME: marker}), "created_at": now,
    }  # fmt: skip
    _parse_defaults(folder.defaults, folder.name)
    with transaction.atomic():
        version, is_new = PackVersion.objects.get_or_create(pack=folder.name, version=folder.version, defaults=columns)
        if is_new:
            audit.record(version, "Add pack version", f"digest {version.digest[:12]}", actor=actor, now=now)
    if version.digest != folder.digest:
        raise Conflict(f"{version} exists with other content. Raise the version in pack.toml.", field="version")
    return version, is_new


def assign(
    version: PackVersion, environment_type: str, *, now: datetime, dry_run: bool = False,
    actor: audit.Actor = audit.CONTROL_PLANE,
) -> Assigned:  # fmt: skip
    """Let an environment type use a version. Creates the type if there is none. Idempotent.

    A field of the type takes the new default unless an operator has changed it: its value is neither that of the version
    assigned before nor the general default. Sandboxes get the skill when they start or wake."""
    with transaction.atomic():
        EnvironmentType.objects.get_or_create(name=environment_type)
        row = EnvironmentType.objects.select_for_update().get(name=environment_type)
        assignment = PackAssignment.objects.filter(environment_type=environment_type).select_related("version").first()
        was = assignment.version if assignment else None
        changed, kept = _merge_defaults(row, was.defaults if was else {}, version.defaults)
        _validate(row)
        if dry_run:
            transaction.set_rollback(True)
        else:
            row.save()
            PackAssignment.objects.update_or_create(
                environment_type=environment_type, defaults={"version": version, "assigned_at": now}
            )
            fields = "".join(f", {name} {audit.format_value(value)}" for name, value in changed.items())
            audit.record(row, "Assign pack version", f"{was or 'no pack'} → {version}{fields}", actor=actor, now=now)
    return Assigned(environment_type, was, version, changed, kept)


def _merge_defaults(row: EnvironmentType, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Set the fields that still have a default. Return the new values, and the names of the fields left as they are."""
    general, before, wanted = (EnvironmentType(name=row.name) for _ in range(3))
    _apply(before, _parse_defaults(old, row.name))
    _apply(wanted, _parse_defaults(new, row.name))
    changed: dict[str, Any] = {}
    kept: list[str] = []
    for name in sorted({*old, *new}):
        field = f"{name}_id" if name == "policy" else name
        value, default = getattr(row, field), getattr(wanted, field)
        if value == default:
            continue
        if value in (getattr(before, field), getattr(general, field)):
            changed[name] = new.get(name)
            setattr(row, field, default)
        else:
            kept.append(name)
    return changed, kept


def find_version(pack: str, version: str = "") -> PackVersion:
    """Return a version of a pack, the newest by default. Raise InvalidRequest."""
    versions = PackVersion.objects.filter(pack=pack).defer("archive").order_by("-pk")
    if not version and (newest := versions.first()):
        return newest
    found = versions.filter(version=version).first()
    if found is None:
        known = ", ".join(versions.values_list("version", flat=True)[:20])
        detail = f"Pack {pack} has no version {version}: {known}." if known else f"There is no pack {pack}."
        raise InvalidRequest("version", detail)
    return found


def list_environment_types(pack: str) -> list[str]:
    """Return the names of the environment types that use a pack."""
    return list(PackAssignment.objects.filter(version__pack=pack).values_list("environment_type", flat=True))


def install_shipped_packs(*, now: datetime) -> list[Assigned]:
    """Store the packs of this release, and assign them where their earlier version or none is assigned. Idempotent.

    A pack that an operator has added and assigned under the same name stays assigned."""
    assigned = []
    for path in list_shipped_folders():
        version = _add_shipped(read_folder(path), now=now)
        assignment = PackAssignment.objects.filter(environment_type=version.pack).select_related("version").first()
        if assignment is None or (
            assignment.version.origin == PackOrigin.SHIPPED
            and assignment.version.pack == version.pack
            and assignment.version != version
        ):
            assigned.append(assign(version, version.pack, now=now))
    return assigned


def _add_shipped(folder: PackFolder, *, now: datetime) -> PackVersion:
    try:
        return add_version(folder, now=now, origin=PackOrigin.SHIPPED)[0]
    except Conflict:  # a development version, or a version of an operator
        labelled = PackFolder(**{**vars(folder), "version": f"{folder.version}+{folder.digest[:8]}"})
        return add_version(labelled, now=now, origin=PackOrigin.SHIPPED)[0]


def _parse_defaults(defaults: Mapping[str, Any], environment_type: str) -> dict[str, Any]:
    """Return the values of model fields. Raise InvalidPack naming the key."""
    values = dict(defaults)
    for key in _DURATION_KEYS:
        if key in values:
            if key in _OPTIONAL_DURATION_KEYS and values[key] in (0, "0"):
                values[key] = timedelta(0)
                continue
            try:
                values[key] = parse_duration(values[key])
            except ValueError as error:
                raise InvalidPack("pack.toml", f"environment_type.{key}: {error}") from error
    if "llm_limit" in values:
        try:
            values["llm_limit"] = Decimal(str(values["llm_limit"]))
        except InvalidOperation as error:
            raise InvalidPack("pack.toml", "environment_type.llm_limit: must be an amount in USD.") from error
    if not isinstance(values.get("llm_token_limit", 0), int) or isinstance(values.get("llm_token_limit"), bool):
        raise InvalidPack("pack.toml", "environment_type.llm_token_limit: must be a whole number of tokens.")
    if "turn_argv" in values and isinstance(values["turn_argv"], list):
        folder = f"/data/skills/{environment_type}"
        values["turn_argv"] = [str(word).replace("{skill}", folder) for word in values["turn_argv"]]
    if "policy" in values:
        policy = Policy.objects.filter(name=values["policy"]).first()
        if policy is None:
            raise InvalidPack("pack.toml", f"environment_type.policy: there is no policy {values['policy']!r}. Add it first.")
        values["policy"] = policy
    checked = EnvironmentType(name=environment_type)
    _apply(checked, values)
    _validate(checked)
    return values


def _apply(row: EnvironmentType, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(row, name, value)


def _validate(row: EnvironmentType) -> None:
    try:
        row.clean_fields(exclude=["name"])
        row.validate_constraints()
    except ValidationError as error:
        messages = error.message_dict if hasattr(error, "error_dict") else {"": error.messages}
        field, [message, *_] = next(iter(messages.items()))
        raise InvalidPack("pack.toml", f"environment_type.{field}: {message}") from error
