"""Migrated SQLite template: the first run of a set of migrations creates the file, later runs copy it."""

import hashlib
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import django
from django.apps import apps
from django.conf import settings

CACHE = Path(os.environ.get("LEASEHOLD_CACHE") or Path.home() / ".cache" / "leasehold")
SCHEMA_SOURCES = ("migrations/*.py", "models.py", "models/**/*.py")  # of an app; migrations import from the models


def template_path() -> Path | None:
    """Return the template for the schema of all installed apps, or None on another database or under pytest-xdist."""
    default = settings.DATABASES["default"]
    if "sqlite3" not in default["ENGINE"] or os.environ.get("PYTEST_XDIST_WORKER"):
        return None
    digest = hashlib.sha256(django.__version__.encode())
    for config in sorted(apps.get_app_configs(), key=lambda config: config.label):
        root = Path(config.path)
        for path in sorted(path for pattern in SCHEMA_SOURCES for path in root.glob(pattern)):
            digest.update(f"{config.label}/{path.relative_to(root)}\0".encode() + path.read_bytes())
    return CACHE / f"test-{digest.hexdigest()[:16]}.sqlite3"


def restore_template() -> bool:
    """Copy the template to the path of the test database. Return whether there was one."""
    template = template_path()
    if template is None or not template.exists():
        return False
    shutil.copyfile(template, settings.DATABASES["default"]["TEST"]["NAME"])
    return True


def save_template() -> None:
    """Store the migrated test database as the template. Concurrent runs store the same content."""
    template = template_path()
    if template is None or template.exists():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = template.with_suffix(f".{os.getpid()}")
    # The backup API, not a file copy: in WAL mode most of the database is in another file.
    with (
        closing(sqlite3.connect(settings.DATABASES["default"]["TEST"]["NAME"])) as source,
        closing(sqlite3.connect(partial)) as copy,
    ):
        source.backup(copy)
    partial.rename(template)
