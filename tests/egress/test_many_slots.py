"""As many ways out as there are by default, and then some: nginx starts with them, and knows them apart."""

import json
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from sandboxes.egress import reconciliation, slots
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


def test_two_thousand_sockets_are_listened_on_and_known_apart(many: NginxProxy) -> None:
    asked = [0, 1, 11, 111, 1023, 2047]
    for slot in asked:
        path: Path = slots.ensure_slot_directory(slot) / slots.SOCKET_NAME
        assert post(path, {}, "/v1/files", **{"X-Leasehold-Slot": "7", "Host": "5"})[0] == 403
        assert post(path, {}, "/v1/embeddings")[0] == 502  # nobody is behind it
    log = reconciliation.access_log_path()
    wait_until(lambda: log.read_bytes().count(b"\n") == 2 * len(asked), "all are logged")
    said = [json.loads(line) for line in log.read_text().splitlines()]  # in any order: each of its processes writes its own
    found = sorted((each["slot"], each["status"]) for each in said)
    assert found == [(slot, status) for slot in asked for status in (403, 502)]
