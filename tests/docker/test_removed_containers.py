"""Containers that someone else stops during a transfer, or removes. Their files are in volumes, and are not lost with them."""

import io
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast
from uuid import uuid4

import pytest
from django.conf import settings
from django.test import override_settings

from sandboxes.models import Run
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.docker.provider import DockerProvider
from sandboxes.providers.errors import FailureCause, Missing, Rejected, Stopped, Unavailable
from sandboxes.runs.failures import describe_unusable_directory
from sandboxes.state import disk_space
from tests.conftest import MINUTE
from tests.docker.test_provider import Box, docker, executor, own_box, owner, volumes_of  # noqa: F401 - fixtures
from tests.support.storage.tars import file, pack
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("docker_ready")]
VERBS_AFTER_REMOVAL: dict[str, Callable[[DockerProvider, str], object]] = {
    "exec": lambda provider, ref: provider.exec(ref, ["true"], env={}, timeout=MINUTE, mark=uuid4().hex),
    "write_file": lambda provider, ref: provider.write_file(ref, "/workspace/f", b"x"),
    "get_files": lambda provider, ref: b"".join(provider.get_files(ref, "/data")),
    "kill": lambda provider, ref: provider.kill(ref, uuid4().hex),
    "stats": lambda provider, ref: provider.stats(ref),
    "resume": lambda provider, ref: provider.resume(ref),
    "restart": lambda provider, ref: provider.restart(ref),
}


TRANSFERS: dict[str, Callable[[Box], object]] = {
    "archive": lambda box: b"".join(read_slowly(box)),
    "unpacking": lambda box: box.provider.put_files(box.ref, "/workspace", cast(BinaryIO, StoppingFile(box))),
}


def read_slowly(box: Box) -> Iterator[bytes]:
    """Read an archive, and kill the container after the first part."""
    chunks = box.provider.get_files(box.ref, "/workspace")
    yield next(chunks)
    docker("kill", box.ref)
    yield from chunks


class StoppingFile(io.BytesIO):
    """Archive of 50 MB whose reader finds the container killed after the first part."""

    def __init__(self, box: Box) -> None:
        super().__init__(pack(file("big", bytes(50_000_000))).getvalue())
        self._box = box

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() > 0 and self._box.provider.inspect(self._box.ref).running:
            docker("kill", self._box.ref)
        return super().read(size)


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_container_death_during_a_transfer_is_no_loss(own_box: Box, transfer: str) -> None:  # noqa: F811
    own_box.run("sh", "-c", "echo kept > f; head -c 100M /dev/zero > big")
    with pytest.raises(Unavailable):
        TRANSFERS[transfer](own_box)
    # The engine notices the stop late while output of an exec is not read.
    wait_until(lambda: not own_box.provider.inspect(own_box.ref).running, "the engine has noticed the stop")
    assert own_box.run("cat", "f").stdout == b"kept\n"


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("executor", ["agent"], indirect=True)
@pytest.mark.parametrize("end", ["kill", "rm -f"])
def test_end_of_a_container_ends_the_stream_of_its_command(own_box: Box, end: str) -> None:  # noqa: F811
    provider, ref, mark = own_box.provider, own_box.ref, uuid4().hex
    own_box.run("sh", "-c", "echo kept > f")
    with ThreadPoolExecutor(1) as thread:
        command = ["sh", "-c", "echo begun; sleep 300"]
        running = thread.submit(provider.exec, ref, command, env={}, timeout=5 * MINUTE, mark=mark, retain=True)
        wait_until(lambda: "sleep 300" in own_box.processes(), "it sleeps")
        reader = provider.open_output(ref, mark, stdout=0, stderr=0)
        assert reader and (part := reader.read(wait=30)) and part.content == b"begun\n"
        docker(*end.split(), ref)
        assert reader.read(wait=30) is None
        with pytest.raises(Stopped):
            running.result()
    assert provider.find_exec(ref, mark) is None
    assert own_box.run("cat", "f").stdout == b"kept\n"


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("verb", VERBS_AFTER_REMOVAL)
def test_verb_after_the_removal_of_a_container_has_the_files_of_its_volumes(own_box: Box, verb: str) -> None:  # noqa: F811
    own_box.run("sh", "-c", "echo kept > /data/file")
    docker("rm", "-f", own_box.ref)
    assert not own_box.provider.inspect(own_box.ref).running
    VERBS_AFTER_REMOVAL[verb](own_box.provider, own_box.ref)
    assert own_box.run("cat", "/data/file").stdout == b"kept\n"


def interrupt_removal(ref: str) -> None:
    """Leave the container dead, as an engine does that is killed while it removes a container: its files cannot be deleted."""
    root, container = docker("info", "--format", "{{.DockerRootDir}}").strip(), docker("inspect", "-f", "{{.Id}}", ref).strip()
    directory = Path(root) / "containers" / container
    subprocess.run(["chattr", "+i", directory], check=True)
    try:
        with pytest.raises(subprocess.CalledProcessError):
            docker("rm", "-f", ref)
    finally:
        subprocess.run(["chattr", "-i", directory], check=True)
    assert docker("inspect", "-f", "{{.State.Status}}", ref).strip() == "dead"


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("verb", VERBS_AFTER_REMOVAL)
def test_verb_after_an_interrupted_removal_of_a_container_has_the_files_of_its_volumes(
    own_box: Box,  # noqa: F811
    verb: str,
) -> None:
    own_box.run("sh", "-c", "echo kept > /data/file")
    interrupt_removal(own_box.ref)
    assert not own_box.provider.inspect(own_box.ref).running
    VERBS_AFTER_REMOVAL[verb](own_box.provider, own_box.ref)
    assert own_box.run("cat", "/data/file").stdout == b"kept\n"


def test_sandbox_whose_removal_was_interrupted_is_destroyed_or_created_again(own_box: Box) -> None:  # noqa: F811
    own_box.run("sh", "-c", "echo kept > /data/file")
    interrupt_removal(own_box.ref)
    own_box.provider.create(SandboxSpec(own_box.ref, own_box.owner, memory_mib=128, pids=64))
    assert own_box.run("cat", "/data/file").stdout == b"kept\n"
    interrupt_removal(own_box.ref)
    own_box.provider.destroy(own_box.ref)
    assert own_box.provider.list(own_box.owner) == [] and volumes_of(own_box) == []


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("verb", VERBS_AFTER_REMOVAL)
def test_verb_after_the_removal_of_a_container_and_a_volume_raises_missing(own_box: Box, verb: str) -> None:  # noqa: F811
    docker("rm", "-f", own_box.ref)
    docker("volume", "rm", f"{own_box.ref}-data")
    with pytest.raises(Missing):
        VERBS_AFTER_REMOVAL[verb](own_box.provider, own_box.ref)


def test_concurrent_commands_create_a_removed_container_once(own_box: Box) -> None:  # noqa: F811
    docker("rm", "-f", own_box.ref)
    with ThreadPoolExecutor(4) as threads:
        results = [*threads.map(lambda _: replace(own_box, provider=DockerProvider()).run("true"), range(4))]
    assert {result.exit_code for result in results} == {0}
    assert [found.ref for found in own_box.provider.list(own_box.owner)] == [own_box.ref]


@pytest.mark.parametrize("removed", [["data"], ["data", "workspace"]])
def test_container_is_not_created_on_volumes_that_are_removed_meanwhile(
    own_box: Box,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    removed: list[str],
) -> None:
    """Between the look at the volumes and the creation, as by a destroy. The engine would create them anew, and empty."""
    create = DockerProvider._create_container

    def create_late(provider: DockerProvider, spec: SandboxSpec, parked: str | None = None) -> bool:
        docker("volume", "rm", *(f"{own_box.ref}-{name}" for name in removed))
        return create(provider, spec, parked)

    docker("rm", "-f", own_box.ref)
    kept = {*volumes_of(own_box)} - {f"{own_box.ref}-{name}" for name in removed}
    monkeypatch.setattr(DockerProvider, "_create_container", create_late)
    with pytest.raises(Missing):
        own_box.run("true")
    assert docker("ps", "-aq", "--filter", f"name={own_box.ref}") == ""
    assert {*volumes_of(own_box)} == kept


def test_volumes_wait_for_an_image_that_was_removed(own_box: Box) -> None:  # noqa: F811
    own_box.run("sh", "-c", "echo kept > f")
    docker("rm", "-f", own_box.ref)
    with override_settings(SANDBOX_IMAGE="leasehold-nowhere:latest"), pytest.raises(Unavailable, match="does not exist"):
        own_box.run("true")
    assert own_box.run("cat", "f").stdout == b"kept\n"


def test_missing_images_and_the_disk_of_the_engine_are_found(own_box: Box) -> None:  # noqa: F811
    provider = own_box.provider
    assert provider.find_missing_images({settings.SANDBOX_IMAGE, "leasehold-nowhere:latest"}) == {"leasehold-nowhere:latest"}
    assert provider.find_disk() == Path(docker("info", "--format", "{{.DockerRootDir}}").strip())
    assert disk_space.measure_engine_space(provider)


def test_image_that_is_missing_or_has_no_guest_is_unusable(own_box: Box, tmp_path: Path) -> None:  # noqa: F811
    name = f"leasehold-empty-{uuid4().hex[:12]}:latest"
    (tmp_path / "Dockerfile").write_text('FROM scratch\nLABEL leasehold.test="1"\n')
    docker("build", "-q", "-t", name, str(tmp_path))
    try:
        for image in ("leasehold-nowhere:latest", name):
            spec = SandboxSpec(name=f"leasehold-{uuid4().hex}", owner="images", image=image)
            with pytest.raises(Rejected) as raised:
                own_box.provider.create(spec)
            assert raised.value.cause == FailureCause.IMAGE_UNUSABLE
            own_box.provider.destroy(spec.name)
    finally:
        docker("rmi", "-f", name)


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("executor", ["agent"], indirect=True)
def test_command_is_not_repeated_in_a_container_that_was_created_during_it(own_box: Box) -> None:  # noqa: F811
    """A container that has never run does not show that the command had not begun in its predecessor."""
    since = time.monotonic()
    docker("rm", "-f", own_box.ref)
    assert own_box.provider._recreate(own_box.ref)
    assert not own_box.provider._engine.ended_before(own_box.ref, since)
    with pytest.raises(Stopped):
        own_box.provider._require_running(own_box.ref, since)


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("end", ["kill", "rm -f"])
def test_process_is_started_in_a_container_that_was_stopped_or_removed(own_box: Box, end: str) -> None:  # noqa: F811
    provider, ref, mark = own_box.provider, own_box.ref, uuid4().hex
    own_box.run("true")
    docker(*end.split(), ref)
    assert provider.start(ref, ["sleep", "300"], env={}, mark=mark).running
    assert provider.processes(ref, [mark])[mark].running


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("executor", ["agent"], indirect=True)
def test_denied_working_directory_is_recognized_and_repaired_from_another_one(own_box: Box) -> None:  # noqa: F811
    own_box.run("chmod", "000", "/workspace")
    denied = own_box.run("true")
    assert denied.exit_code == 126 and describe_unusable_directory(Run(cwd="/workspace"), denied)
    repair = ["chmod", "u+rwx", "/workspace"]
    result = own_box.provider.exec(own_box.ref, repair, env={}, cwd="/tmp", timeout=MINUTE, mark=uuid4().hex)
    assert result.exit_code == 0 and own_box.run("true").exit_code == 0


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("shift", [3600.0, -3600.0])
def test_a_killed_command_is_no_stop_of_the_sandbox_while_the_clock_is_wrong(
    own_box: Box,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    shift: float,
) -> None:
    """The container was started within the hour by which the clock of the control plane is behind."""
    host_time = time.time
    monkeypatch.setattr(time, "time", lambda: host_time() + shift)
    assert own_box.run("sh", "-c", "kill -9 $$").exit_code == 137
    engine, since = own_box.provider._engine, time.monotonic()
    assert not engine.has_stopped(own_box.ref, since)
    docker("restart", "-t", "0", own_box.ref)
    assert engine.has_stopped(own_box.ref, since)
