#!/usr/bin/env python
"""Every command of the control plane: `manage.py help` lists them."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    try:
        from django.conf import settings
        from django.core.exceptions import ImproperlyConfigured
        from django.core.management import execute_from_command_line
    except ImportError as missing:
        sys.exit(f"Django is not installed here ({missing}). Run `make install`, then use .venv/bin/python manage.py.")
    try:
        settings.INSTALLED_APPS  # noqa: B018 - read every variable now: some commands would hide that one is wrong
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as wrong:
        sys.exit(str(wrong))


if __name__ == "__main__":
    main()
