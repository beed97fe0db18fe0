"""Checks of the migrations that are new against a commit."""

import inspect
from collections.abc import Iterator
from pathlib import Path

from django.db.migrations.loader import MigrationLoader

from tests.lint.base import REPO
from tests.lint.imports import find_live_imports
from tests.lint.landed import Finding, check_landed, list_landed
from tests.lint.operations import REASONED, check_migration

APPS = ("sandboxes", "billing", "leases")


def check(base: str) -> list[Finding]:
    """Return the findings of all rules, in the order of the migrations."""
    return [*check_landed(base), *check_new(list_landed(base))]


def check_new(landed: set[tuple[str, str]]) -> Iterator[Finding]:
    """Check the migrations that are not among the landed ones."""
    loader = MigrationLoader(None)
    nodes = [*loader.graph.nodes]
    in_base = [(app, name) for app, name in nodes if app not in APPS or (app, name) in landed]
    base_state = loader.project_state(in_base)
    for key in loader.graph._generate_plan(nodes, at_end=True):
        if key in in_base:
            continue
        migration = loader.get_migration(*key)
        path = Path(inspect.getfile(type(migration)))
        name = str(path.relative_to(REPO))
        for imported in find_live_imports(path.read_text()):
            yield Finding(name, "import", f"{imported} can change later. Write what is needed into the migration.")
        for rule, text in check_migration(migration, loader.project_state(key, at_end=False), base_state):
            yield Finding(name, rule, f"{text}.{f' Rule: {REASONED[rule]}.' if rule in REASONED else ''}")
