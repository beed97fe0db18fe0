"""Background processes in the console."""

import pytest
from django.test import Client
from django.utils import timezone

from leases import execution
from leases.models import Lease
from sandboxes import processes
from sandboxes.models import Process
from sandboxes.processes import ProcessSpec

pytestmark = pytest.mark.django_db


def start(lease: Lease, *argv: str, name: str = "") -> Process:
    now = timezone.now()
    return processes.start_process(
        execution.build_sandbox_request(lease, now=now), ProcessSpec(argv, {"TOKEN": "s3cret"}, name=name), now=now
    )


def test_the_tabs_list_running_and_all_processes(viewer: Client, lease: Lease) -> None:
    start(lease, "sleep", "300", name="relay <watcher>")
    start(lease, "no-such-program")
    running = viewer.get("/admin/sandboxes/process/").content.decode()
    assert "sleep 300" in running
    assert "relay &lt;watcher&gt;" in running
    assert "no-such-program" not in running
    every = viewer.get("/admin/sandboxes/process/?slice=all").content.decode()
    assert "exit 127" in every


def test_a_process_page_shows_its_result_and_lease(viewer: Client, lease: Lease) -> None:
    process = start(lease, "sleep", "300")
    processes.kill_process(process, now=timezone.now())
    page = viewer.get(f"/admin/sandboxes/process/{process.pk}/change/").content.decode()
    assert "killed" in page
    assert f"/admin/leases/lease/{lease.pk}/change/" in page
    assert "TOKEN" in page
    assert "s3cret" not in page


def test_a_sandboxs_page_counts_background_processes(viewer: Client, lease: Lease) -> None:
    process = start(lease, "sleep", "300")
    page = viewer.get(f"/admin/sandboxes/sandbox/{process.sandbox_id}/change/").content.decode()
    assert "Background processes" in page
    assert f"/admin/sandboxes/process/?slice=all&amp;sandbox={process.sandbox_id}" in page
    listed = viewer.get(f"/admin/sandboxes/process/?slice=all&sandbox={process.sandbox_id}").content.decode()
    assert "sleep 300" in listed
