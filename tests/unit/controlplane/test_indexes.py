"""Indexes of all tables: none repeats another, and those of two purposes serve both on each database."""

from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.db import connection
from django.db.models import CharField, Index, Model, UniqueConstraint

from billing.models import CostRecord, UsageRecord
from leases.atproto.models import AtprotoRecord
from leases.coding.models import CodingTask
from leases.models import Lease, QueuedRun
from leases.retention import permanent
from sandboxes.db.prefix_index import PrefixIndex
from sandboxes.models import DataEvent, EgressConnection, Event, LlmCall, MintedToken, Sandbox

PATTERN = "varchar_pattern_ops"
OWN_APPS = ("leases", "billing", "sandboxes")
SEARCHED: list[tuple[type[Model], str, str]] = [
    (CostRecord, "agent_did", "cost_agent_prefix"),
    (CostRecord, "environment_id", "cost_environment_prefix"),
    (UsageRecord, "agent_did", "usage_agent_prefix"),
    (UsageRecord, "environment_id", "usage_environment_prefix"),
    (Lease, "agent_did", "lease_agent_prefix"),
    (Lease, "environment_id", "lease_environment_prefix"),
    (LlmCall, "agent_did", "llmcall_agent_prefix"),
    (LlmCall, "environment_id", "llmcall_environment_prefix"),
    (EgressConnection, "agent_did", "egressconn_agent_prefix"),
    (EgressConnection, "environment_id", "egressconn_environment_prefix"),
    (EgressConnection, "domain", "egressconn_domain_prefix"),
    (Sandbox, "environment_id", "sandbox_environment_prefix"),
    (MintedToken, "agent_did", "mintedtoken_agent_prefix"),
    (QueuedRun, "agent_did", "queuedrun_agent_prefix"),
]
SEARCHED_BY_PREFIX_ONLY: list[tuple[type[Model], str, str]] = [
    (LlmCall, "model", "llmcall_model_prefix"),
    (Event, "key", "event_key_prefix"),
    (DataEvent, "path", "dataevent_path_prefix"),
    (MintedToken, "aud", "mintedtoken_aud_prefix"),
    (MintedToken, "lxm", "mintedtoken_lxm_prefix"),
    (AtprotoRecord, "agent_did", "atprotorecord_agent_prefix"),
    (AtprotoRecord, "record_key", "atprotorecord_key_prefix"),
    (CodingTask, "title", "codingtask_title_prefix"),
    (CodingTask, "branch", "codingtask_branch_prefix"),
]
PREFIX = "__startswith"


def test_each_search_by_prefix_in_a_growing_table_has_an_index() -> None:
    """Columns of another table are searched there first (sandboxes.admin.base.owner_search)."""
    admin.autodiscover()
    fields = [
        (model, field.removesuffix(PREFIX))
        for model, page in admin.site._registry.items()
        for field in page.search_fields
        if model._meta.app_label in OWN_APPS and field.endswith(PREFIX) and model._meta.label not in permanent.REASONS
    ]
    own = [(model, column) for model, column in fields if "__" not in column.replace("environment__pk", "environment")]
    assert len(own) > 20
    assert [f"{model._meta.label}.{column}" for model, column in own if not has_prefix_index(model, column)] == []


def has_prefix_index(model: type[Model], column: str) -> bool:
    """Return whether the index of a field, to which Django adds one for prefixes, or one with the operator class exists."""
    field = model._meta.pk if column == "pk" else model._meta.get_field(column.partition("__")[0])
    indexes = [each for each in model._meta.indexes if each.fields and each.fields[0] == column]
    return field.db_index or field.unique or any(each.opclasses[0] == PATTERN for each in indexes if each.opclasses)


def test_no_index_repeats_the_first_columns_of_another() -> None:
    """Each index is written with each row. One over the first columns of another finds nothing that the other does not find."""
    models = [model for model in apps.get_models() if model._meta.app_label in OWN_APPS]
    assert [name for model in models for name in find_redundant_indexes(model)] == []


def find_redundant_indexes(model: type[Model]) -> list[str]:
    """Return the indexes of all rows that another replaces. One without the operator class replaces none that has it."""
    complete = [
        each
        for each in [*model._meta.indexes, *model._meta.constraints]
        if isinstance(each, Index | UniqueConstraint) and each.condition is None
    ]
    columns = {each.name: list(each.fields) or [getattr(each.expressions[0], "name", "")] for each in complete}
    indexed = [field for field in model._meta.local_concrete_fields if field.db_index and not field.unique]
    narrow = {field.name: [field.name] for field in indexed} | {
        each.name: list(each.fields) for each in complete if isinstance(each, Index)
    }
    for_prefixes = {each.name for each in complete if PATTERN in getattr(each, "opclasses", ())}
    of_text = {field.name: [field.name] for field in indexed if isinstance(field, CharField)}  # Django adds one for prefixes
    return [
        f"{model._meta.label}: {name} by {other}"
        for name, first in narrow.items()
        for other, wider in (columns | of_text).items()
        if other != name and wider[: len(first)] == first and (name not in for_prefixes or other in {*for_prefixes, *of_text})
    ]


def explain_by_index(model: type[Model], index: str, /, **filters: Any) -> str:
    """Return the plan of a search, on PostgreSQL if `index` is the only index that is not one of a constraint.

    The statistics of the tables are those of any other tests, and of a small table PostgreSQL reads any index as a whole."""
    if connection.vendor == "postgresql":
        table = model._meta.db_table
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT quote_ident(indexrelid::regclass::text) FROM pg_index WHERE indrelid = %s::regclass"
                " AND indexrelid <> %s::regclass AND indexrelid NOT IN (SELECT conindid FROM pg_constraint)",
                [table, index],
            )
            for (other,) in cursor.fetchall():
                cursor.execute(f"DROP INDEX {other}")
            cursor.execute("SET LOCAL enable_seqscan = off")
    return str(model._base_manager.filter(**filters).values("pk").explain())


@pytest.mark.django_db
@pytest.mark.postgres("plans")
@pytest.mark.parametrize(("model", "column", "index"), SEARCHED)
def test_an_index_for_prefixes_also_finds_equal_values(model: type[Model], column: str, index: str) -> None:
    assert index in explain_by_index(model, index, **{column: "game"})


@pytest.mark.django_db
@pytest.mark.postgres("plans")
@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite uses no index for Django's LIKE")
@pytest.mark.parametrize(("model", "column", "index"), [*SEARCHED, *SEARCHED_BY_PREFIX_ONLY])
def test_an_index_finds_a_prefix_on_postgresql(model: type[Model], column: str, index: str) -> None:
    plan = explain_by_index(model, index, **{f"{column}__startswith": "game"})
    assert index in plan and "~>=~" in plan, plan


@pytest.mark.django_db
@pytest.mark.skipif(connection.vendor != "sqlite", reason="on PostgreSQL these indexes have all rows")
@pytest.mark.parametrize(("model", "column", "index"), SEARCHED_BY_PREFIX_ONLY)
def test_an_index_for_prefixes_alone_is_empty_on_sqlite(model: type[Model], column: str, index: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT sql FROM sqlite_master WHERE name = %s", [index])
        assert cursor.fetchone()[0].endswith(f'WHERE "{model._meta.pk.column}" IS NULL')
    assert index not in explain_by_index(model, index, **{column: "game"})


def test_an_index_for_prefixes_alone_is_its_copy() -> None:
    index = PrefixIndex(fields=["key"], name="event_key_prefix")
    assert index.clone() == index
    assert index.deconstruct() == (
        "sandboxes.db.prefix_index.PrefixIndex", (), {"fields": ["key"], "name": "event_key_prefix"}
    )  # fmt: skip
