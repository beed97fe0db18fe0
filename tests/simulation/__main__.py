"""Deterministic simulation of hosts, processes and faults: python -m tests.simulation --seeds N [--seed S]."""

import logging
import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings is part of a history
    os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
os.environ["DATABASE_URL"] = "sqlite://:memory:"

import django

django.setup()
logging.disable(logging.CRITICAL)

from tests.simulation.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
