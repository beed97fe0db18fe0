"""Sleep and wake of an unusual tree on a real engine: what comes back, and what the snapshot names as omitted."""

import json
from collections.abc import Callable

import pytest
from django.utils import timezone

from leases import execution
from leases.models import Lease
from sandboxes.models import Pool, Snapshot
from sandboxes.runs.operations import Command
from tests.conftest import MINUTE
from tests.support.leases import evict, get_sandbox

pytestmark = [pytest.mark.docker, pytest.mark.django_db]
BUILD = r"""
import os, socket
os.chdir("/workspace")
for name in ("deep/a", "sticky"):
    os.makedirs(name)
open("one", "w").write("shared")
os.link("one", "deep/a/two")
os.symlink("nowhere", "dangling")
os.symlink("deep", "linked")
open(b"bytes-\xff\xfe\n", "w").close()
open("n" * 255, "w").close()
with open("sparse", "wb") as file:
    file.write(b"begin")
    file.seek(64 << 20)
    file.write(b"end")
open("program", "w").close()
os.chmod("program", 0o4755)
os.mkfifo("pipe")
socket.socket(socket.AF_UNIX).bind("socket")
open("locked", "w").write("no permission")
os.chmod("locked", 0)
os.chmod("sticky", 0o1777)
for name, at in (("one", 1_700_000_000_123_456_789), ("sparse", -86_400_000_000_001), ("dangling", 5), ("deep", 987_654_321)):
    os.utime(name, ns=(at, at), follow_symlinks=False)
"""
DESCRIBE = r"""
import hashlib, json, os, stat
tree = {}
for parent, directories, files in os.walk(b"/workspace"):
    for path in (os.path.join(parent, name) for name in directories + files):
        status = os.lstat(path)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFREG and status.st_mode & 0o400:
            content = hashlib.sha256(open(path, "rb").read()).hexdigest()
        else:
            content = repr(os.readlink(path)) if kind == stat.S_IFLNK else ""
        row = [oct(status.st_mode), status.st_uid, status.st_mtime_ns, content]
        if kind == stat.S_IFREG:
            row += [status.st_size, status.st_nlink, status.st_blocks * 512 <= 1 << 20]
        tree[repr(path)] = row
print(json.dumps(tree))
"""
SET_ID_PROGRAM = "b'/workspace/program'"
NOT_KEPT = ["b'/workspace/pipe'", "b'/workspace/socket'"]


def run_python(lease: Lease, script: str) -> str:
    run, result = execution.exec_command(lease.pk, Command(["python3", "-c", script], MINUTE), now=timezone.now())
    assert (run.exit_code, result.stderr) == (0, b""), result.stderr
    return result.stdout.decode()


def describe(lease: Lease) -> dict[str, list[object]]:
    tree: dict[str, list[object]] = json.loads(run_python(lease, DESCRIBE))
    return tree


def test_a_tree_comes_back_as_it_was_and_the_snapshot_names_the_rest(grant: Callable[..., Lease], docker_pool: Pool) -> None:
    lease = grant(pool=docker_pool.name, now=timezone.now())
    run_python(lease, BUILD)
    before, incarnation = describe(lease), get_sandbox(lease).incarnation
    evict(lease, now=timezone.now())
    after = describe(lease)
    assert get_sandbox(lease).incarnation == incarnation + 1
    for path in NOT_KEPT:
        del before[path]
    assert before[SET_ID_PROGRAM][0] == "0o104755" and after[SET_ID_PROGRAM][0] == "0o100755"
    before[SET_ID_PROGRAM][0] = after[SET_ID_PROGRAM][0]
    assert after == before
    omitted = {each["kind"]: each["paths"] for each in Snapshot.objects.latest("at").omitted}
    assert omitted == {"pipe": ["pipe"], "socket": ["socket"], "set_id_bit": ["program"]}
