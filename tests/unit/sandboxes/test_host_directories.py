"""Attacks by another user of the host: links and directories planted where the control plane, often as root, works."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from django.core.checks import run_checks

from sandboxes.egress import nginx, nginx_config, server, slots
from sandboxes.hosts.directories import UnsafeDirectory, chmod_no_follow
from tests.support.servers.services import skip_or_fail

OTHER_UID = 12345


@pytest.fixture
def runtime(tmp_path: Path, settings) -> Path:
    """Runtime directory below a directory that everyone may write, as /tmp is."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    settings.RUNTIME_DIR = shared / "leasehold-0"
    settings.EGRESS_DIR = settings.RUNTIME_DIR / "egress"
    return settings.RUNTIME_DIR


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Directory of another user or service, to which the planted links lead."""
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    return target


def describe(path: Path) -> tuple[int, int, int, list[str]]:
    status = path.stat()
    return status.st_uid, status.st_gid, status.st_mode, sorted(os.listdir(path))


def require_root() -> None:
    if os.geteuid() != 0:
        skip_or_fail("Only root can give a directory to another user.")


def plant_link(runtime: Path, target: Path) -> None:
    runtime.symlink_to(target)


def plant_foreign_directory(runtime: Path, target: Path) -> None:
    require_root()
    runtime.mkdir(mode=0o700)
    os.chown(runtime, OTHER_UID, OTHER_UID)


def plant_open_directory(runtime: Path, target: Path) -> None:
    runtime.mkdir()
    runtime.chmod(0o777)


def plant_file(runtime: Path, target: Path) -> None:
    runtime.touch()


PLANTED = [
    (plant_link, "is a symbolic link"),
    (plant_foreign_directory, "belongs to the user id 12345"),
    (plant_open_directory, "has the mode 0777"),
    (plant_file, "is not a directory"),
]


@pytest.mark.parametrize(("plant", "reason"), PLANTED)
def test_planted_runtime_directory_is_refused(runtime: Path, target: Path, plant: Callable[..., None], reason: str) -> None:
    plant(runtime, target)
    before = describe(target)
    for use in (lambda: slots.ensure_slot_directory(3), nginx.ensure_logs_directory, nginx_config.write_configuration):
        with pytest.raises(UnsafeDirectory, match=reason):
            use()
    assert describe(target) == before
    [problem] = [message for message in run_checks() if message.id == "leasehold.E006"]
    assert reason in problem.msg and str(runtime) in problem.msg


def test_runtime_directory_that_others_may_replace_is_refused(runtime: Path) -> None:
    runtime.parent.chmod(0o777)
    with pytest.raises(UnsafeDirectory, match="without the sticky bit"):
        slots.ensure_root_directory()


def test_new_runtime_directory_is_private_and_used(runtime: Path) -> None:
    assert slots.ensure_slot_directory(3).is_dir()
    assert runtime.stat().st_mode & 0o777 == 0o700
    assert [message for message in run_checks() if message.id == "leasehold.E006"] == []


@pytest.mark.parametrize("use", [lambda: slots.ensure_slot_directory(3), nginx.ensure_logs_directory])
def test_link_in_place_of_a_directory_of_the_proxy_is_refused(runtime: Path, target: Path, use: Callable[[], Path]) -> None:
    directory = use()
    directory.rmdir()
    directory.symlink_to(target)
    before = describe(target)
    with pytest.raises(UnsafeDirectory, match="is a symbolic link"):
        use()
    assert describe(target) == before


def test_mode_of_a_socket_replaced_by_a_link_is_not_changed(target: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(target)
    before = describe(target)
    with pytest.raises(UnsafeDirectory):
        chmod_no_follow(tmp_path / "link", 0o666)
    assert describe(target) == before
    listener = server.bind_unix_socket(tmp_path / "socket")
    listener.close()
    assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o666
