"""Indexes of all tables."""

from django.apps import apps
from django.db.models import Index, Model, UniqueConstraint


def test_no_index_repeats_the_first_columns_of_another() -> None:
    """Each index is written with each row. One over the first columns of another finds nothing that the other does not find."""
    models = [model for model in apps.get_models() if model._meta.app_label in ("leases", "billing", "sandboxes")]
    assert [name for model in models for name in find_redundant_indexes(model)] == []


def find_redundant_indexes(model: type[Model]) -> list[str]:
    complete = [
        each
        for each in [*model._meta.indexes, *model._meta.constraints]
        if isinstance(each, Index | UniqueConstraint) and each.condition is None
    ]
    columns = {each.name: list(each.fields) or [getattr(each.expressions[0], "name", "")] for each in complete}
    narrow = {
        field.name: [field.name] for field in model._meta.local_concrete_fields if field.db_index and not field.unique
    } | {each.name: list(each.fields) for each in complete if isinstance(each, Index)}
    return [
        f"{model._meta.label}: {name} by {other}"
        for name, first in narrow.items()
        for other, wider in columns.items()
        if other != name and wider[: len(first)] == first
    ]
