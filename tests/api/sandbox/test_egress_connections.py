"""Connections of a lease to allowed domains through the API."""

import pytest

from sandboxes.models import EgressConnection, Sandbox
from tests.api.conftest import ApiClient
from tests.conftest import MINUTE, NOW

pytestmark = pytest.mark.django_db


def create_connection(lease: dict, number: int, **fields: object) -> EgressConnection:
    at = NOW + number * MINUTE
    columns = {"outcome": "ok", "ended_at": at, "started_at": at, "deadline_at": at, "domain": "pypi.org", "port": 443} | fields
    sandbox = Sandbox.objects.first()
    return EgressConnection.objects.create(
        connection_id=f"connection-{number}", sandbox=sandbox, holder=lease["id"], agent_did=lease["agent_did"], **columns
    )


def test_connections_are_listed_newest_first_in_pages(ada: ApiClient, lease) -> None:
    url = f"leases/{lease['id']}/connections"
    assert ada.get(url).json() == {"results": [], "next": None}
    ada.post(f"leases/{lease['id']}/exec", {"argv": ["true"]})
    create_connection(lease, 1, sent_bytes=5, received_bytes=7, address="192.0.2.1")
    create_connection(lease, 2, outcome="refused", code="domain_not_allowed", domain="evil.test")
    create_connection(lease, 3, outcome="open", ended_at=None)
    first = ada.get(f"{url}?limit=2").json()
    second = ada.get(first["next"]).json()
    rows = first["results"] + second["results"]
    assert [row["connection_id"] for row in rows] == ["connection-3", "connection-2", "connection-1"]
    assert [row["ended_at"] is None for row in rows] == [True, False, False]
    assert [(row["domain"], row["code"]) for row in rows[1:]] == [("evil.test", "domain_not_allowed"), ("pypi.org", "")]
    assert (rows[2]["sent_bytes"], rows[2]["received_bytes"], second["next"]) == (5, 7, None)
    assert "address" not in rows[2]  # addresses tell about the operator's network
