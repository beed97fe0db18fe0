"""Operator against a live server."""

from typing import Any

import pytest

from leasehold import NotAllowed, NotFound, Operator, Sandbox
from leases.models import Lease
from tests.api.conftest import ApiClient
from tests.support.billing import ADA

pytestmark = pytest.mark.django_db(transaction=True)


def test_work_is_stopped_by_agent_environment_and_installation(options: dict[str, Any], operator: ApiClient) -> None:
    with Sandbox(**options, release=False) as box:
        started = box.processes.start("sleep 60")
        with Operator(url=options["url"], api_key=operator.key) as client:
            assert client.stop_agent(ADA)["processes"] == 1
            assert box.processes.get(started["process_id"])["state"] == "killed"
            assert client.stop_environment(box.environment)["failures"] == []
            assert client.stop_all(end_leases=True)["leases"] == [box.lease_id]
            with pytest.raises(NotFound):
                client.stop_agent("did:plc:nobody")
        with Operator(url=options["url"], api_key=options["api_key"]) as client, pytest.raises(NotAllowed):
            client.stop_all()
    assert Lease.objects.get().end_reason == "operator"
