"""Indexes of all tables: none repeats the beginning of another, as Django's own index of a foreign key may."""

from django.apps import apps
from django.db.models import ForeignKey, Model, UniqueConstraint

OWN_APPS = ("sandboxes", "leases", "billing")


def list_leading_columns(model: type[Model]) -> set[str]:
    """Return the first field of each index and unique constraint of several fields that holds all rows."""
    indexes = [index.fields for index in model._meta.indexes if index.fields and index.condition is None]
    constraints = [
        constraint.fields for constraint in model._meta.constraints
        if isinstance(constraint, UniqueConstraint) and constraint.fields and constraint.condition is None
    ]  # fmt: skip
    return {fields[0].removeprefix("-") for fields in [*indexes, *constraints] if len(fields) > 1}


def test_no_foreign_key_has_an_index_that_a_longer_one_replaces() -> None:
    redundant = [
        f"{model._meta.label}.{field.name}"
        for app in OWN_APPS
        for model in apps.get_app_config(app).get_models()
        for field in model._meta.concrete_fields
        if isinstance(field, ForeignKey) and field.db_index and not field.unique and field.name in list_leading_columns(model)
    ]
    assert not redundant, ", ".join(redundant)
