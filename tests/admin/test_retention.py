"""Console pages and API responses of rows whose lease has expired."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.conf import settings
from django.test import Client
from django.urls import reverse

from leases import api_keys, leasing, sweeps
from leases.models import Lease
from leases.retention.sweep import delete_expired
from sandboxes.models import Run, Sandbox
from tests.admin.conftest import ADA, NOW
from tests.support.leases import run

pytestmark = pytest.mark.django_db


@pytest.fixture
def deleted(grant: Callable[..., Lease]) -> Lease:
    lease = grant()
    run(lease, now=NOW)
    leasing.release(lease.pk, now=NOW)
    sweeps.reclaim(now=NOW)
    sweeps.destroy_cold(now=NOW + settings.KEEP_STATE)
    delete_expired(now=NOW + settings.KEEP_HISTORY + timedelta(days=1))
    assert not Lease.objects.exists()
    return lease


def test_pages_of_a_sandbox_and_a_run_name_their_deleted_lease(deleted: Lease, viewer: Client) -> None:
    for row in (Sandbox.objects.get(holder=deleted.pk), Run.objects.get(holder=deleted.pk)):
        page = viewer.get(reverse(f"admin:sandboxes_{row._meta.model_name}_change", args=[row.pk]))
        assert page.status_code == 200
        assert str(deleted.pk) in page.content.decode() and "deleted after its retention" in page.content.decode()


def test_lists_render_rows_of_a_deleted_lease(deleted: Lease, viewer: Client) -> None:
    for name in ("sandboxes_sandbox", "sandboxes_run", "leases_lease", "billing_usagerecord", "billing_costrecord"):
        assert viewer.get(reverse(f"admin:{name}_changelist"), {"slice": "all"}).status_code == 200


@pytest.mark.parametrize("path", ["", "/runs", "/timeline", "/snapshots", "/turns", "/processes"])
def test_api_answers_404_for_a_deleted_lease(deleted: Lease, path: str) -> None:
    secret = api_keys.issue_key([ADA], now=NOW)[1]
    response = Client().get(f"/api/v1/leases/{deleted.pk}{path}", HTTP_AUTHORIZATION=f"Bearer {secret}")
    assert response.status_code == 404
    assert response["Content-Type"].startswith("application/problem+json")
