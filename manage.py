#!/usr/bin/env python
"""Every command of the control plane: `manage.py help` lists them."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    try:
        from django.core.management import execute_from_command_line
    except ImportError as missing:
        sys.exit(f"Django is not installed here ({missing}). Run `make install`, then use .venv/bin/python manage.py.")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
