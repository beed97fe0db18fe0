"""Orphaned nginx containers and the heartbeat of the egress command."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from django.conf import settings
from django.test import override_settings

from sandboxes import reconciliation
from sandboxes.egress import slots
from sandboxes.egress.logs import collection
from sandboxes.egress.nginx import DIRECTORY_LABEL, NginxProxy, get_server_socket_path, is_open
from sandboxes.egress.server import EgressServer
from sandboxes.management.commands import egress
from sandboxes.models import Sweep
from sandboxes.providers.docker.engine import Engine
from tests.support.egress import EventLoopThread
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db]
GRACE = timedelta(minutes=2)


@pytest.fixture
def nginx(docker_ready: None, tmp_path: Path) -> Iterator[NginxProxy]:
    """nginx without a server, as left by a killed server."""
    settled = {"RUNTIME_DIR": tmp_path, "EGRESS_DIR": tmp_path / "egress", "EGRESS_SLOTS": 2, "EGRESS_PROXY": "nginx"}
    with override_settings(**settled):
        nginx = NginxProxy(Engine())
        nginx.start()
        try:
            yield nginx
        finally:
            nginx.stop()


def later() -> datetime:
    return datetime.now(UTC) + GRACE + timedelta(seconds=5)


def test_nginx_without_a_server_is_removed_after_the_grace_period(nginx: NginxProxy) -> None:
    assert reconciliation.reconcile(now=datetime.now(UTC), grace=GRACE).counts == {}
    assert nginx.get_state() == "running"
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


def test_nginx_of_another_installation_is_kept_until_its_directory_is_gone(nginx: NginxProxy, tmp_path: Path) -> None:
    with override_settings(EGRESS_DIR=tmp_path / "other"):
        assert reconciliation.reconcile(now=later(), grace=GRACE).counts == {}
        assert nginx.engine.client.containers(filters={"label": f"{DIRECTORY_LABEL}={tmp_path / 'egress'}"})
        shutil.rmtree(tmp_path / "egress")
        assert reconciliation.reconcile(now=later(), grace=GRACE).counts == {"egress proxies removed": 1}


def test_orphans_are_not_searched_without_docker(nginx: NginxProxy) -> None:
    with override_settings(EGRESS_PROXY="none"):
        assert reconciliation.reconcile(now=later(), grace=GRACE).counts == {}
    assert nginx.get_state() == "running"


def test_nginx_is_not_restarted_with_the_engine(nginx: NginxProxy) -> None:
    policy = nginx.engine.client.inspect_container(nginx.name)["HostConfig"]["RestartPolicy"]["Name"]
    assert policy == "on-failure"


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
