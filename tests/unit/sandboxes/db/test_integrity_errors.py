"""Violations of unique constraints are races; those of other constraints are faults, and are raised."""

from collections.abc import Callable
from datetime import timedelta
from uuid import UUID

import pytest
from django.db import IntegrityError, connection, transaction

from leases import leasing
from leases.leasing import LeaseRequest
from leases.models import Lease
from sandboxes.db import dialect
from sandboxes.models import Host, Pool, Sweep
from tests.conftest import NOW
from tests.support.billing import ADA


def violate(act: Callable[[], object]) -> IntegrityError:
    try:
        with transaction.atomic():
            act()
            connection.check_constraints()  # foreign keys, which are checked at the commit
    except IntegrityError as error:
        return error
    raise AssertionError("nothing was violated")


@pytest.mark.django_db
@pytest.mark.parametrize("field", ["id", "name"])
def test_a_primary_key_or_a_unique_index_is_a_race(field: str) -> None:
    values = {"provider": "memory", "engine_id": "e", "queue": "q", "created_at": NOW}
    first, second = {"id": UUID(int=1), "name": "a"}, {"id": UUID(int=2), "name": "b"}
    Host.objects.create(**first, **values)
    other = second | {field: first[field]}
    dialect.raise_unless_unique(violate(lambda: Host.objects.bulk_create([Host(**other, **values)])))


@pytest.mark.django_db
@pytest.mark.parametrize(
    "act",
    [
        lambda: Sweep.objects.create(name="x", every=None),
        lambda: Lease.objects.update(status="unknown"),
        lambda: Sweep.objects.create(name="x", every=timedelta(minutes=1), host_id=UUID(int=1)),
    ],
    ids=["not null", "check", "foreign key"],
)
def test_any_other_constraint_is_raised(act: Callable[[], object], grant: Callable[..., Lease]) -> None:
    grant()
    error = violate(act)
    with pytest.raises(IntegrityError):
        dialect.raise_unless_unique(error)


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite adds no column without a default")
def test_a_lease_refused_by_a_newer_schema_is_not_answered_as_a_race(pool: Pool) -> None:
    request = LeaseRequest(ADA, "game-1", "catan", pool=pool.name)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE leases_lease ADD COLUMN newer integer NOT NULL")
        try:
            with pytest.raises(IntegrityError, match="newer"):
                leasing.acquire(request, now=NOW)
        finally:
            cursor.execute("ALTER TABLE leases_lease DROP COLUMN newer")
    assert leasing.acquire(request, now=NOW)[1]
