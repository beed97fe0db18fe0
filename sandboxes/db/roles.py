"""Operators' roles are groups. Migrations give them the permissions of what they add."""

from collections.abc import Mapping, Sequence
from typing import Any

from django.contrib.auth.management import create_permissions
from django.db.migrations import RunPython


def gives(app_label: str, roles: Mapping[str, Sequence[str]]) -> RunPython:
    """The operation by which roles may do more than they may already: role -> codenames of one app's permissions.

    A role that is not there yet is made: the migration that would make it takes it as it is."""

    def extend(apps: Any, schema_editor: Any) -> None:
        # Permissions are otherwise made after all migrations have run, which is too late here.
        config = apps.get_app_config(app_label)
        config.models_module = True
        create_permissions(config, apps=apps, verbosity=0)
        config.models_module = None
        permissions = apps.get_model("auth", "Permission").objects.filter(content_type__app_label=app_label)
        for name, held in roles.items():
            group, _ = apps.get_model("auth", "Group").objects.get_or_create(name=name)
            group.permissions.add(*permissions.filter(codename__in=held))

    return RunPython(extend, RunPython.noop)
