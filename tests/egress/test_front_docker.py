"""Orphaned nginx containers, the heartbeat of the egress command, and many slots."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from django.conf import settings
from django.test import override_settings

from sandboxes.egress import slots
from sandboxes.egress.logs import collection
from sandboxes.egress.nginx import DIRECTORY_LABEL, NginxProxy, get_server_socket_path, is_open
from sandboxes.egress.server import EgressServer
from sandboxes.management.commands import egress
from sandboxes.models import Sweep
from sandboxes.providers.docker.engine import Engine
from sandboxes.sweeps import reconciliation
from tests.support.servers.egress import EventLoopThread, post
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db]
GRACE = timedelta(minutes=2)


@contextmanager
def run_nginx(runtime: Path, slot_count: int) -> Iterator[NginxProxy]:
    """Run nginx without a server, as left by a killed server."""
    settled = {"RUNTIME_DIR": runtime, "EGRESS_DIR": runtime / "egress", "EGRESS_SLOTS": slot_count, "EGRESS_PROXY": "nginx"}
    with override_settings(**settled):
        nginx = NginxProxy(Engine())
        nginx.start()
        try:
            yield nginx
        finally:
            nginx.stop()


@pytest.fixture(scope="module")
def shared_nginx(docker_ready: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NginxProxy]:
    with run_nginx(tmp_path_factory.mktemp("r"), 2) as nginx:
        yield nginx


@pytest.fixture
def nginx(shared_nginx: NginxProxy) -> NginxProxy:
    if not shared_nginx.get_state():  # removed by the test before
        shared_nginx.start()
    return shared_nginx


def later() -> datetime:
    return datetime.now(UTC) + GRACE + timedelta(seconds=5)


def test_nginx_without_a_server_is_removed_after_the_grace_period(nginx: NginxProxy) -> None:
    assert reconciliation.reconcile(now=datetime.now(UTC), grace=GRACE).counts == {}
    with override_settings(EGRESS_PROXY="none"):  # without Docker there is no search for orphans
        assert reconciliation.reconcile(now=later(), grace=GRACE).counts == {}
    state = nginx.engine.client.inspect_container(nginx.name)
    assert state["State"]["Running"] and state["HostConfig"]["RestartPolicy"]["Name"] == "on-failure"  # not with the engine
    result = reconciliation.reconcile(now=later(), grace=GRACE)
    assert (result.counts, result.failures) == ({"egress proxies removed": 1}, [])
    assert nginx.get_state() == ""
    assert reconciliation.reconcile(now=later(), grace=GRACE).counts == {}


def test_nginx_with_a_server_is_kept(nginx: NginxProxy) -> None:
    loop = EventLoopThread()
    with closing(loop), loop.run_context(EgressServer().listening({get_server_socket_path(): None})):
        assert is_open()
        assert reconciliation.reconcile(now=later(), grace=GRACE).counts == {}
    assert not is_open()
    assert nginx.get_state() == "running"


def test_nginx_of_another_installation_is_kept_whatever_is_seen_of_its_directory(docker_ready: None, tmp_path: Path) -> None:
    with run_nginx(tmp_path, 2) as nginx, override_settings(EGRESS_DIR=tmp_path / "other"):
        shutil.rmtree(tmp_path / "egress")
        assert reconciliation.reconcile(now=later(), grace=GRACE).counts == {}
        assert nginx.engine.client.containers(filters={"label": f"{DIRECTORY_LABEL}={tmp_path / 'egress'}"})


def test_heartbeat_is_recorded_and_rotates_the_log(nginx: NginxProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    log = collection.access_log_path()
    wait_until(log.exists, "nginx has a log")
    egress.record_heartbeat(nginx)
    row = Sweep.objects.get(name="egress")
    assert row.succeeded_at is not None and row.counts == {}
    first = log.stat().st_ino
    monkeypatch.setattr("sandboxes.egress.logs.access_log.rotate_log.__kwdefaults__", {"max_bytes": -1})
    egress.record_heartbeat(nginx)
    wait_until(log.exists, "nginx has a new log")
    assert log.stat().st_ino != first
    assert Sweep.objects.get(name="egress").counts == {"logs rotated": 1}


def test_failed_heartbeat_is_not_recorded_and_does_not_end_the_command(nginx: NginxProxy) -> None:
    nginx.stop()
    path = collection.access_log_path()
    path.with_name(f"{path.name}.1").touch()
    egress.record_heartbeat(nginx)
    row = Sweep.objects.get(name="egress")
    assert row.succeeded_at is None and "No such container" in row.last_error
    assert slots.ensure_root_directory().is_dir() and settings.EGRESS_SLOTS == 2


def test_two_thousand_slots_are_served_and_distinguished(docker_ready: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    tested_slots = [0, 1, 11, 111, 1023, 2047]  # the default is 1024 slots
    with run_nginx(tmp_path_factory.mktemp("r"), 2048) as nginx:
        for slot in tested_slots:
            path: Path = slots.ensure_slot_directory(slot) / slots.SOCKET_NAME
            assert post(path, {}, "/v1/files", **{"X-Leasehold-Slot": "7", "Host": "5"})[0] == 403
            assert post(path, {}, "/v1/embeddings")[0] == 502  # no server is running
        log = collection.access_log_path()
        wait_until(lambda: log.read_bytes().count(b"\n") == 2 * len(tested_slots), "all are logged")
        lines = [json.loads(line) for line in log.read_text().splitlines()]  # in any order: each worker writes its own lines
        assert nginx.engine.client.inspect_container(nginx.name)["RestartCount"] == 0
    found = sorted((each["slot"], each["status"]) for each in lines)
    assert found == [(slot, status) for slot in tested_slots for status in (403, 502)]
