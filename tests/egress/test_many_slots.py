"""nginx with more slots than the default."""

import json
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from sandboxes.egress import slots
from sandboxes.egress.logs import collection
from sandboxes.egress.nginx import NginxProxy
from sandboxes.providers.docker.engine import Engine
from tests.support.egress import post
from tests.support.waiting import wait_until

pytestmark = pytest.mark.docker


@pytest.fixture
def many(docker_ready: None, tmp_path_factory: pytest.TempPathFactory, settings: Any) -> Any:
    runtime = tmp_path_factory.mktemp("r")
    with override_settings(RUNTIME_DIR=runtime, EGRESS_DIR=runtime / "egress", EGRESS_SLOTS=2048):
        nginx = NginxProxy(Engine())
        nginx.start()
        yield nginx
        nginx.stop()


def test_two_thousand_slots_are_served_and_distinguished(many: NginxProxy) -> None:
    tested_slots = [0, 1, 11, 111, 1023, 2047]
    for slot in tested_slots:
        path: Path = slots.ensure_slot_directory(slot) / slots.SOCKET_NAME
        assert post(path, {}, "/v1/files", **{"X-Leasehold-Slot": "7", "Host": "5"})[0] == 403
        assert post(path, {}, "/v1/embeddings")[0] == 502  # no server is running
    log = collection.access_log_path()
    wait_until(lambda: log.read_bytes().count(b"\n") == 2 * len(tested_slots), "all are logged")
    lines = [json.loads(line) for line in log.read_text().splitlines()]  # in any order: each worker writes its own lines
    found = sorted((each["slot"], each["status"]) for each in lines)
    assert found == [(slot, status) for slot in tested_slots for status in (403, 502)]
