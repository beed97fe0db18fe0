"""Checkout of a task's repository: fetched by the control plane, handed to the sandbox as objects, checked out there.

The sandbox gets no remote and no credential. Nothing of the repository's content is written as files on the control plane's
side."""

import io
import posixpath
import tarfile
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

from leases import execution, leasing
from leases.coding import repositories, tasks
from leases.coding.git import Git, GitError, GitTooLarge
from leases.coding.models import CodingTask, Repository
from leases.errors import CheckoutFailed, RepositoryUnavailable
from sandboxes.db.clock import clock_from
from sandboxes.models import Sandbox
from sandboxes.providers.base import WORKSPACE, Provider
from sandboxes.runs import workspace_limit
from sandboxes.runs.operations import Command

REPOSITORY_PATH = f"{WORKSPACE}/repo"
CHECKOUT_TIMEOUT = timedelta(minutes=5)
PROBE_TIMEOUT = timedelta(seconds=20)
PRESENT, ABSENT = 0, 44  # exit codes of PROBE
PROBE = f"[ -e {REPOSITORY_PATH}/.git ] || exit {ABSENT}"
# The rename makes a checkout visible as a whole. Of two at once, the second finds the first and removes its own.
SCRIPT = f"""set -e
cd {WORKSPACE}
git -C "$1" reset --quiet --hard
mv -T "$1" {REPOSITORY_PATH} 2>/dev/null || {{ rm -rf "$1"; [ -e {REPOSITORY_PATH}/.git ]; }}"""
CONFIG = b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n\tlogallrefupdates = true\n"
HANDED_OVER = ("objects", "refs", "packed-refs", "shallow", "HEAD")  # of the control plane's repository


def check_out(pk: UUID, *, now: datetime, actor: str = "") -> tuple[CodingTask, bool]:
    """Put the repository of a lease's task into its sandbox. Return the task, and whether this call did.

    An existing /workspace/repo stays as it is. A later checkout in another sandbox has the same base commit. Raise
    CodingTaskNotFound, CodingTaskEnded, RepositoryUnavailable, CheckoutFailed and the errors of exec_command."""
    clock = clock_from(now)
    lease = leasing.require_active(pk, now=now)
    task = tasks.require_open(lease.environment_id)
    probe = Command(argv=["sh", "-c", PROBE], timeout=PROBE_TIMEOUT)
    if execution.exec_command(pk, probe, now=clock(), actor=actor)[1].exit_code == PRESENT:
        return task, False
    name = f".checkout-{task.pk}"
    with tempfile.TemporaryFile() as tar:
        with repositories.open_repository_git(task.repository) as git:
            task = _fetch_base_of(task, git)
            _write_tar(git, name, tar)
        tar.seek(0)

        def put(provider: Provider, sandbox: Sandbox) -> None:
            workspace_limit.require_workspace_space(provider, sandbox, now=clock())
            provider.put_files(sandbox.ref, WORKSPACE, tar)

        transfer = Command(argv=["checkout", task.repository.name], timeout=CHECKOUT_TIMEOUT, kind="file")
        execution.call_in_sandbox(pk, transfer, put, now=clock(), actor=actor)
    command = Command(argv=["sh", "-c", SCRIPT, "checkout", name], timeout=CHECKOUT_TIMEOUT)
    _, result = execution.exec_command(pk, command, now=clock(), actor=actor)
    if result.exit_code:
        raise CheckoutFailed(result.stderr.decode(errors="replace").strip()[-300:] or f"exit code {result.exit_code}")
    return task, True


def fetch_base(git: Git, repository: Repository, branch: str, *, commit: str = "", depth: int) -> str:
    """Fetch a branch, and a commit of it if one is given. Return the commit. Raise RepositoryUnavailable."""
    options = ["--quiet", "--no-tags", "--no-write-fetch-head", f"--depth={depth}"]
    try:
        git.run("fetch", *options, "--", repository.clone_url, f"+refs/heads/{branch}:refs/heads/{branch}")
        tip = git.read("rev-parse", "--verify", f"refs/heads/{branch}^{{commit}}")
        if commit and commit != tip:
            git.run("fetch", *options, "--", repository.clone_url, f"+{commit}:refs/heads/{branch}")
        return commit or tip
    except GitTooLarge:
        raise RepositoryUnavailable(f"{repository.name} is larger than its limit of {repository.max_mib} MiB.") from None
    except GitError as error:
        raise RepositoryUnavailable(f"{repository.name} cannot be fetched: {error}") from None


def _fetch_base_of(task: CodingTask, git: Git) -> CodingTask:
    depth = task.repository.depth
    base = fetch_base(git, task.repository, task.base_branch, commit=task.base_commit, depth=depth)
    if not task.base_commit and not CodingTask.objects.filter(pk=task.pk, base_commit="").update(base_commit=base):
        task = tasks.find(task.environment_id)  # another checkout recorded the base first
        base = fetch_base(git, task.repository, task.base_branch, commit=task.base_commit, depth=depth)
    task.base_commit = base
    git.run("symbolic-ref", "HEAD", f"refs/heads/{task.base_branch}")
    return task


def _write_tar(git: Git, name: str, file: BinaryIO) -> None:
    with tarfile.open(fileobj=file, mode="w") as tar:
        config = tarfile.TarInfo(f"{name}/.git/config")
        config.size, config.mode = len(CONFIG), 0o644
        tar.addfile(config, io.BytesIO(CONFIG))
        for path in _list_files(git.directory):
            member = tar.gettarinfo(path, posixpath.join(name, ".git", path.relative_to(git.directory).as_posix()))
            member.mode = 0o755 if path.is_dir() else 0o644
            if path.is_dir():
                tar.addfile(member)
            else:
                with path.open("rb") as content:
                    tar.addfile(member, content)


def _list_files(directory: Path) -> Iterator[Path]:
    for name in HANDED_OVER:
        path = directory / name
        if path.exists():
            yield path
            yield from sorted(path.rglob("*")) if path.is_dir() else ()
