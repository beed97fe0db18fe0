"""Protection of a Pod from its own commands: the memory guard and the seccomp filter of process 1, in real containers."""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.command_results import ExecResult
from tests.conftest import DOCKER_IMAGE
from tests.emulators.registry import serve_kubernetes
from tests.support import attacks
from tests.support.cluster import Cluster, running_gateway

pytestmark = pytest.mark.docker
MEMORY_MIB = 256
# At most 33 MiB a second: the speed of the guard on a busy machine does not decide the test.
HOG = "import time; x = [time.sleep(0.03) or bytes(1 << 20).replace(b'\\0', b'x') for _ in range(500)]"
# Eight processes that share 30 MiB, together less than the hog. They end when there is a file `over`.
FAMILY = """
import os, time
x = b"x" * (30 << 20)
[os.fork() for _ in range(3)]
print("up", flush=True)
open("up", "w")
while not os.path.exists("over"):
    time.sleep(0.05)
"""
PAGE_CACHE = "dd if=/dev/zero of=big bs=1M count=400 2>&1; cat big big > /dev/null; rm big"


@pytest.fixture(scope="module")
def cluster(docker_ready, tmp_path_factory):
    with running_gateway() as gateway, serve_kubernetes(tmp_path_factory.mktemp("kubernetes")) as emulator:
        yield Cluster(emulator, gateway)


@pytest.fixture(scope="module")
def run(cluster):
    """Function that runs a command in one Pod for all tests: no test ends the Pod."""
    provider, name = cluster.connect(), f"lhg-{uuid.uuid4().hex[:12]}"
    provider.create(cluster.admit(SandboxSpec(name=name, owner="o", image=DOCKER_IMAGE, memory_mib=MEMORY_MIB)))
    provider.wait_ready(name, timeout=timedelta(seconds=60))

    def run(*argv: str, **more) -> ExecResult:
        return provider.exec(name, argv, env={}, timeout=timedelta(seconds=60), mark=uuid.uuid4().hex, **more)

    yield run
    provider.destroy(name)


@pytest.mark.matrix("seconds of growing memory: the conformance suite has the end of a run out of memory")
def test_largest_run_ends_out_of_memory_and_others_go_on(run) -> None:
    with ThreadPoolExecutor() as pool:
        other = pool.submit(run, "python3", "-c", FAMILY)
        run("sh", "-c", "until [ -e up ]; do sleep 0.05; done")
        hog = run("sh", "-c", f'sleep 100 & python3 -c "{HOG}"')
        assert (hog.exit_code, hog.oom, hog.timed_out) == (137, True, False)
        run("touch", "over")
        family = other.result()
    assert (family.exit_code, family.oom, family.stdout.count(b"up")) == (0, False, 8)
    assert run("pgrep", "-c", "sleep").exit_code == 1  # with all processes of the run


@pytest.mark.matrix("seconds of disk writes, of the guard that the image has for every provider")
def test_page_cache_beyond_the_limit_is_no_lack_of_memory(run) -> None:
    done = run("sh", "-c", PAGE_CACHE)
    assert (done.exit_code, done.oom) == (0, False), done.stdout


def test_filter_of_process_1_refuses_what_the_engines_default_allows(run) -> None:
    filters = run("sh", "-c", "grep -h Seccomp_filters /proc/1/status /proc/self/status").stdout.split()[1::2]
    assert filters == [b"2", b"2"]  # that of the engine, and ours
    done = run("python3", "-I", "-", stdin=Path(attacks.__file__).read_bytes())
    results = json.loads(done.stdout)
    names = ("trace_a_child", "open_a_socket_to_the_hypervisor", "open_a_packet_socket", "leave_a_core")
    assert {name: results[name][0] for name in names} == dict.fromkeys(names, "refused"), done.stderr
