"""Timeline of a lease over HTTP."""

from uuid import UUID

import pytest

from leases.models import LeaseEvent
from sandboxes.models import Pool, SkipReason
from tests.api.conftest import ApiClient
from tests.conftest import NOW

pytestmark = pytest.mark.django_db


def test_timeline_has_the_pools_that_were_passed_over(
    ada: ApiClient, bob: ApiClient, lease: dict[str, str], pool: Pool
) -> None:
    LeaseEvent.objects.create(
        lease_id=UUID(lease["id"]), at=NOW.replace(year=NOW.year + 5), kind="pool_skipped", pool=pool,
        skip_reason=SkipReason.UNAVAILABLE, reason="timed out",
    )  # fmt: skip
    skipped, granted = ada.get(f"leases/{lease['id']}/timeline").json()["results"]
    assert (skipped["kind"], skipped["pool"], skipped["skip_reason"], skipped["detail"]) == (
        "pool_skipped", pool.name, "unavailable", "timed out",
    )  # fmt: skip
    assert (granted["kind"], granted["pool"], granted["skip_reason"]) == ("granted", None, None)
    assert bob.get(f"leases/{lease['id']}/timeline").status_code == 404
