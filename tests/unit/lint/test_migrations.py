"""Rules of migrations, each with a migration that breaks it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.db import migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.db.models import Q
from django.utils.module_loading import import_string

from sandboxes.db.concurrent_indexes import AddIndexConcurrently
from sandboxes.db.migration_operations import AddCheckNotValid, ChangeRowsInBatches, DropColumn, DropTable, ValidateCheck
from tests.lint import landed
from tests.lint.base import BASE_VARIABLE, find_base
from tests.lint.imports import FUNCTIONS, find_live_imports
from tests.lint.migrations import APPS
from tests.lint.operations import REASONED, check_migration, is_required

RunPython, RunSQL, AddField, RemoveField = migrations.RunPython, migrations.RunSQL, migrations.AddField, migrations.RemoveField
NAME = models.CharField(max_length=10)
CHECK = models.CheckConstraint(condition=Q(size__gt=0), name="box_size")
INDEX = models.Index(fields=["size"], name="box_size_index")
IN_BATCHES = ChangeRowsInBatches("box", lambda rows: rows.update(note="x"), Q(note=None))
TOKEN = migrations.CreateModel("token", [("id", models.AutoField(primary_key=True)), ("text", models.TextField())])


def build_state(*operations: Operation) -> ProjectState:
    """State of an app with boxes and shelves, after further operations."""
    state = ProjectState()
    key = ("id", models.AutoField(primary_key=True))
    first = [
        migrations.CreateModel("shelf", [key]),
        migrations.CreateModel("box", [
            key, ("name", NAME), ("size", models.IntegerField(db_default=0)), ("note", models.TextField(null=True)),
            ("shelf", models.ForeignKey("app.shelf", models.CASCADE)),
        ]),
    ]  # fmt: skip
    for operation in [*first, *operations]:
        operation.state_forwards("app", state)
    return state


def find_rules(*operations: Operation, earlier: tuple[Operation, ...] = (), **attributes: Any) -> list[str]:
    """Names of the rules that a migration of these operations breaks. `earlier` are those of new migrations before."""
    attributes = {"operations": list(operations)} | attributes
    migration = type("Migration", (migrations.Migration,), attributes)("0002_new", "app")
    return [rule for rule, _ in check_migration(migration, build_state(*earlier), build_state())]


def act(apps: Any, schema_editor: Any) -> None:
    """Data migration."""


def without_database(*operations: Operation) -> migrations.SeparateDatabaseAndState:
    return migrations.SeparateDatabaseAndState(state_operations=operations)


@pytest.mark.parametrize(
    ("operations", "rules"),
    [
        ([AddField("box", "color", models.TextField(default=""))], ["default"]),
        ([migrations.AlterField("box", "size", models.IntegerField())], ["default"]),
        ([RemoveField("box", "note")], ["removal"]),
        ([without_database(RemoveField("box", "name"))], ["removal"]),
        ([migrations.RenameField("box", "note", "remark")], ["removal"]),
        ([migrations.DeleteModel("box")], ["removal"]),
        ([migrations.RenameModel("box", "crate")], ["removal"]),
        ([migrations.AlterModelTable("box", "boxes")], ["removal"]),
        ([DropColumn("box", "note")], ["removal"]),
        ([DropColumn("box", "shelf_id")], ["removal"]),
        ([DropTable("app_box")], ["removal"]),
        ([migrations.AlterField("box", "note", models.TextField(default=""))], ["not-null"]),
        ([migrations.AlterField("box", "size", models.BigIntegerField(db_default=0))], ["type"]),
        ([migrations.AlterField("box", "name", models.CharField(max_length=9))], ["type"]),
        ([migrations.AlterField("box", "name", models.CharField(max_length=10, unique=True))], ["index"]),
        ([AddField("box", "color", models.TextField(null=True, db_index=True))], ["index"]),
        ([migrations.AddIndex("box", INDEX)], ["index"]),
        ([migrations.AlterUniqueTogether("box", {("name", "size")})], ["index"]),
        ([migrations.AddConstraint("box", CHECK)], ["check"]),
        ([AddField("box", "a", models.TextField(null=True)), AddField("shelf", "a", models.TextField(null=True))], ["tables"]),
        ([AddField("box", "to", models.ForeignKey("app.shelf", models.CASCADE, null=True, db_index=False))], ["tables"]),
        ([AddField("box", "a", models.TextField(null=True)), RunPython(act)], ["data"]),
        ([AddField("box", "a", models.TextField(null=True)), RunSQL("UPDATE app_box SET a = name")], ["data"]),
        ([RunPython(act)], ["batches"]),
        ([RunSQL("UPDATE app_box SET note = name")], ["batches"]),
        ([RunSQL([("DELETE FROM app_box WHERE size = %s", [1])])], ["batches"]),
        ([RunSQL("-- rows\nWITH x AS (SELECT 1) INSERT INTO app_box (size) SELECT * FROM x")], ["batches"]),
        ([RunSQL("CREATE TABLE app_copy AS SELECT * FROM app_box")], ["batches"]),
        ([RunSQL("ALTER TABLE app_box SET (fillfactor = 80); SELECT change_rows()")], ["batches"]),
        ([migrations.SeparateDatabaseAndState(database_operations=[RunSQL("UPDATE app_box SET note = name")])], ["batches"]),
        ([IN_BATCHES], ["batches"]),
        ([type("Unknown", (Operation,), {"state_forwards": lambda *arguments: None})()], ["unknown"]),
    ],
)  # fmt: skip
def test_a_migration_that_breaks_a_rule_is_found(operations: list[Operation], rules: list[str]) -> None:
    assert find_rules(*operations) == rules


@pytest.mark.parametrize(
    "operations",
    [
        [AddField("box", "color", models.TextField(default="", db_default=""))],
        [AddField("box", "color", models.TextField(null=True)), migrations.AlterModelOptions("box", {"ordering": ["size"]})],
        [without_database(RemoveField("box", "note")), without_database(RemoveField("box", "size"))],
        [migrations.AlterField("box", "name", models.CharField(max_length=20, help_text="Of the box."))],
        [migrations.AlterField("box", "name", models.CharField(max_length=10, help_text="Of the box."))],
        [AddCheckNotValid("box", CHECK)],
        [RunSQL("CREATE TRIGGER boxes BEFORE UPDATE ON app_box EXECUTE FUNCTION act(); COMMENT ON TABLE app_box IS 'updates'")],
        [AddField("box", "a", models.TextField(null=True)), RunSQL("ALTER TABLE app_box SET (fillfactor = 80)")],
        [TOKEN, AddField("token", "a", models.TextField()), migrations.AddIndex("token", INDEX), RemoveField("token", "text")],
        [migrations.CreateModel("label", [("box", models.ForeignKey("app.box", models.CASCADE))])],
    ],
)  # fmt: skip
def test_a_migration_that_keeps_the_rules_is_not(operations: list[Operation]) -> None:
    assert find_rules(*operations) == []


def test_without_a_transaction_only_what_can_be_repeated_is_permitted() -> None:
    concurrently = AddIndexConcurrently("box", INDEX)
    assert find_rules(concurrently, ValidateCheck("box", "box_size"), atomic=False) == []
    assert find_rules(RunSQL("UPDATE app_box SET note = name"), atomic=False) == ["batches", "atomic"]
    assert find_rules(concurrently, AddField("box", "color", models.TextField(null=True)), atomic=False) == ["atomic"]


def test_rows_are_changed_in_batches_and_in_a_migration_of_their_own() -> None:
    assert find_rules(IN_BATCHES, atomic=False) == []
    assert find_rules(IN_BATCHES, AddIndexConcurrently("box", INDEX), atomic=False) == ["data"]
    assert find_rules(RunPython(act), atomic=False) == ["batches"]
    assert find_rules(RunPython(act), RunSQL("DELETE FROM app_shelf"), reasons={"batches": "Ten rows each."}) == []
    assert find_rules(TOKEN, RunPython(act), reasons={"batches": "Ten rows."}) == ["data", "reasons"]


def test_what_the_base_does_not_have_may_be_removed() -> None:
    added = AddField("box", "color", models.TextField(null=True))
    assert find_rules(RemoveField("box", "color"), earlier=(added,)) == []
    assert find_rules(DropColumn("box", "old"), DropTable("app_old")) == []


def test_a_reason_permits_what_needs_one_and_nothing_else() -> None:
    add_check, add_required = migrations.AddConstraint("box", CHECK), AddField("box", "color", models.TextField())
    assert find_rules(add_check, reasons={"check": "The table has ten rows."}) == []
    assert find_rules(add_check, reasons={"check": ""}) == ["check"]
    assert find_rules(add_check, reasons={"check": "Ten rows.", "index": "None."}) == ["reasons"]
    assert find_rules(add_required, reasons={"default": "Nothing is inserted."}) == ["default", "reasons"]
    assert {"default", "removal", "data"}.isdisjoint(REASONED)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from django.db import models\nfrom sandboxes.db import dialect", []),
        ("from sandboxes.db.concurrent_indexes import AddIndexConcurrently", []),
        ("import sandboxes.models.pools\nx = sandboxes.models.pools.validate_images", []),
        ("import sandboxes.models.pools\nx = sandboxes.models.pools.Pool.objects", ["sandboxes.models.pools.Pool"]),
        ("import leases.models as m\nx = m.Lease", ["leases.models as m"]),
        ("def act(apps, editor):\n    from leases.models import Lease", ["leases.models.Lease"]),
        ("from sandboxes import roles", ["sandboxes.roles"]),
        ("from ..models import Lease", ["..models.Lease"]),
    ],
)
def test_imports_of_code_that_changes_are_found(source: str, found: list[str]) -> None:
    assert [*find_live_imports(source)] == found


def test_columns_that_were_added_later_have_a_database_default() -> None:
    loader = MigrationLoader(None)
    state, without = loader.project_state(), []
    for app, name in loader.graph.nodes:
        operations = loader.get_migration(app, name).operations if app in APPS else []
        created = {step.name_lower for step in operations if isinstance(step, migrations.CreateModel)}
        for step in operations:
            if isinstance(step, AddField) and step.model_name_lower not in created:
                model = state.models.get((app, step.model_name_lower))
                field = model.fields.get(step.name) if model else None
                if field and not field.many_to_many and not isinstance(field, models.GeneratedField) and is_required(field):
                    without.append(f"{app}.{step.model_name}.{step.name}")
    assert without == []


def test_defaults_of_the_database_are_those_of_the_models() -> None:
    fields = [field for app in APPS for model in apps.get_app_config(app).get_models() for field in model._meta.local_fields]
    compared = [field for field in fields if field.has_default() and field.has_db_default()]
    assert len(compared) > 70
    in_database = {field: getattr(field.db_default, "value", field.db_default) for field in compared}
    differing = [str(field) for field in compared if field.get_default() != in_database[field]]
    assert differing == []


def test_functions_to_which_migrations_refer_exist() -> None:
    assert all(callable(import_string(name)) for name in FUNCTIONS)


def run_git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.invalid"]
    return subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Clone of a repository with three migrations."""
    monkeypatch.delenv(BASE_VARIABLE, raising=False)
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    (origin / "app" / "migrations").mkdir(parents=True)
    run_git(origin, "init", "--initial-branch=main")
    for name in ("__init__", "0001_initial", "0002_a", "0003_b"):
        (origin / "app" / "migrations" / f"{name}.py").write_text(name)
    run_git(origin, "add", ".")
    run_git(origin, "commit", "-m", "first")
    run_git(tmp_path, "clone", str(origin), str(clone))
    return clone


def test_landed_migrations_are_not_edited_renamed_or_removed(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, directory = find_base(clone), clone / "app" / "migrations"
    assert base == run_git(clone, "rev-parse", "HEAD").strip()
    (directory / "0004_c.py").write_text("new")
    (directory / "__init__.py").write_text("edited")
    run_git(clone, "add", ".")
    assert [*landed.check_landed(base, clone)] == []
    (directory / "0001_initial.py").write_text("edited")
    (directory / "0002_a.py").unlink()
    run_git(clone, "mv", "app/migrations/0003_b.py", "app/migrations/0003_c.py")
    run_git(clone, "commit", "--all", "-m", "second")
    found = {Path(finding.path).stem: finding.text.split(",")[0] for finding in landed.check_landed(base, clone)}
    assert found == {"0001_initial": "edited", "0002_a": "removed or renamed", "0003_b": "removed or renamed"}
    assert landed.list_landed(base, clone) == {("app", name) for name in ("0001_initial", "0002_a", "0003_b")}
    monkeypatch.setattr(landed, "REPLACED_AT", base)
    assert [*landed.check_landed(base, clone)] == [] and landed.list_landed(base, clone) == set()


def test_a_history_that_was_replaced_counts_from_the_replacement_on(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landed, "REPLACED_AT", run_git(clone, "rev-parse", "HEAD").strip())
    (clone / "app" / "migrations" / "0002_a.py").unlink()
    run_git(clone, "commit", "--all", "-m", "replaced")
    base = run_git(clone, "rev-parse", "HEAD").strip()
    (clone / "app" / "migrations" / "0003_b.py").write_text("edited")
    assert [finding.text.split(",")[0] for finding in landed.check_landed(base, clone)] == ["edited"]


def test_the_commit_to_compare_with_can_be_named(clone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(BASE_VARIABLE, "HEAD")
    assert find_base(clone) == run_git(clone, "rev-parse", "HEAD").strip()
    monkeypatch.setenv(BASE_VARIABLE, "no-such-commit")
    with pytest.raises(ValueError, match="no-such-commit is not a commit"):
        find_base(clone)
    monkeypatch.delenv(BASE_VARIABLE)
    assert find_base(tmp_path / "origin") == ""  # has no remote branch
