"""One-shot runs in real containers: results, and removal of containers, volumes and processes."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import docker as sdk
import pytest
from django.core.management import call_command
from django.utils import timezone

from leases.models import Lease
from leases.one_shot import OneShotOutcome, OneShotRequest, OneShotResult, run_once
from sandboxes.models import Pool, Run
from tests.unit.sandboxes.state.test_directories import read_tree

pytestmark = [pytest.mark.docker, pytest.mark.django_db]


@pytest.fixture
def play(docker_pool: Pool) -> Callable[..., OneShotResult]:
    """Execute a one-shot run in the test's pool and assert that no container or volume remains."""

    def run(*argv: str, timeout: timedelta = timedelta(seconds=60), **fields: Any) -> OneShotResult:
        result = run_once(OneShotRequest("did:plc:ada", argv, timeout, pool=docker_pool.name, **fields), now=timezone.now())
        assert result.cleaned_up
        assert list_remains(docker_pool) == []
        assert (Lease.objects.get(pk=result.lease_id).status, Pool.objects.get(pk=docker_pool.pk).used) == ("destroyed", 0)
        assert not Run.objects.filter(ended_at__isnull=True).exists()
        return result

    return run


def list_remains(pool: Pool) -> list[str]:
    """List containers and volumes of a pool."""
    client = sdk.from_env()
    label = {"label": f"leasehold.owner={pool.owner}"}
    return [each.name for each in [*client.containers.list(all=True, filters=label), *client.volumes.list(filters=label)]]


def test_command_exits_normally(play) -> None:
    result = play("sh", "-c", "cat; id -u; ls -A; echo oops >&2; exit 3", stdin=b"in\n")
    assert (result.outcome, result.exit_code) == (OneShotOutcome.FAILED, 3)
    assert (result.stdout, result.stderr) == (b"in\n10001\n.home\n", b"oops\n")


def test_workspace_directory_is_copied_in_and_out(docker_pool: Pool, tmp_path: Path, capfd) -> None:
    root = tmp_path / "folder"
    root.mkdir()
    (root / "numbers").write_text("3\n1\n2\n")
    (root / "run").write_text("#!/bin/sh\nsort numbers >sorted; rm numbers; ln -s / top; mkdir empty; echo done\n")
    (root / "run").chmod(0o755)
    words = ("--agent", "did:plc:ada", "--pool", docker_pool.name, "--workspace", str(root), "--", "./run")
    with pytest.raises(SystemExit, match="0"):
        call_command("run_once", *words)
    assert capfd.readouterr() == ("done\n", "")
    after = read_tree(root)
    assert sorted(after) == ["empty", "run", "sorted", "top"]
    assert (after["sorted"][1], after["top"][1], after["run"][0] & 0o777) == (b"1\n2\n3\n", "/", 0o755)
    assert list_remains(docker_pool) == []
