#!/usr/bin/env python
"""Entry point of the management commands; `manage.py help` lists them."""

import os
import sys

from controlplane import stages


def is_help_request(argv: list[str]) -> bool:
    """Return whether argv asks for help or the version. Such a command reads no data and signs nothing."""
    return argv[1:2] in ([], ["help"], ["--help"], ["-h"], ["version"], ["--version"]) or argv[2:] in (["--help"], ["-h"])


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    if is_help_request(sys.argv) and not os.environ.get("SECRET_KEY"):
        os.environ["SECRET_KEY"] = "placeholder-of-the-help-command"  # noqa: S105
    if sys.argv[1:2] == ["up"]:
        stages.begin()
    try:
        from django.conf import settings
        from django.core.exceptions import ImproperlyConfigured
        from django.core.management import execute_from_command_line
        from django.db import DatabaseError, OperationalError
    except ImportError as error:
        sys.exit(f"Django is not installed here ({error}). Run `make install`, then use .venv/bin/python manage.py.")
    try:
        settings.INSTALLED_APPS  # noqa: B018 - load the settings now: some commands hide an invalid variable
        if not is_help_request(sys.argv) and sys.argv[1] != "config":  # which shows all variables, and warns of unknown ones
            from controlplane import env

            env.require_known_variables()
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        sys.exit(str(error))
    except DatabaseError as error:
        from sandboxes.management.base import explain_database_error, find_schema_error

        if (
            "--traceback" in sys.argv
            or sys.argv[1] == "migrate"
            or not (isinstance(error, OperationalError) or find_schema_error())
        ):
            raise
        sys.exit(explain_database_error(error))


if __name__ == "__main__":
    main()
