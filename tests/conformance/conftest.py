"""Fixtures of the provider conformance suite: every provider behind one interface.

Sandboxes have an owner label of this run, by which they are removed. Concurrent runs and real sandboxes therefore do not
interfere."""

import io
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from sandboxes.agent import gateway as agent_gateways
from sandboxes.agent import operations as agent_operations
from sandboxes.agent import runs as agent_runs
from sandboxes.providers import load_class
from sandboxes.providers.base import DATA, WORKSPACE, FileStat, Provider, SandboxSpec
from sandboxes.providers.command_results import ExecResult
from sandboxes.providers.docker import agent_exec
from sandboxes.providers.docker.provider import DockerProvider
from sandboxes.providers.errors import Missing, Unavailable
from sandboxes.providers.process import ProcessProvider
from tests.conftest import DOCKER_IMAGE
from tests.emulators.registry import EMULATORS, serve_kubernetes
from tests.support import real_cluster
from tests.support.cluster import Cluster, running_gateway
from tests.support.remote import connect_provider, emulators  # noqa: F401 - fixture
from tests.support.selection import MATRIX_REASONS, REFERENCE_VENDOR, find_kind, mark_matrix
from tests.support.servers.services import require_gvisor
from tests.support.storage.tars import TarMember, pack

MEMORY_HOG_SCRIPT = "x = b'x' * (1 << 30)"  # written, not only reserved
# In steps, at most 12 MiB a second: where the agent has to be faster than the kernel, a busy machine does not decide the test.
SLOW_MEMORY_HOG_SCRIPT = "import time; x = [time.sleep(0.02) or b'x' * (i + (1 << 18)) for i in range(4000)]"
AGENT_SECONDS = 60.0  # for an agent to connect
REMOTE = tuple(EMULATORS)
SHARED = {"docker", "kubernetes", "cluster", *REMOTE}  # providers whose sandbox is shared by the tests of a module
BY_ENGINE = "docker by engine"  # commands and file operations by the engine's exec instead of the agent in the container
GVISOR = "docker under gvisor"  # by the engine's exec, too: the gateway cannot identify the agent
CLUSTER = "cluster of Kubernetes"  # the emulator is "kubernetes"
IN_NEED_OF_DOCKER = ("docker", "kubernetes", "cluster")
# Providers with an implementation of their own: the fast lanes have all of their cases.
FULL_KINDS = ("memory", "process", "docker", REFERENCE_VENDOR)
# Providers that share most of their implementation with one of these, by reason: the fast lanes have their smoke cases.
SMOKE_KINDS = {
    **MATRIX_REASONS,
    "kubernetes": "the agent in a Pod executes commands and file operations as in a container of Docker",
    BY_ENGINE: "the engine executes the same programs in the container as the agent does",
}


# Providers whose smoke tests are elsewhere.
MATRIX_KINDS = {
    GVISOR: "tests/docker/test_gvisor.py has the smoke cases",
    CLUSTER: "the emulator has the smoke cases",
}
# Cases that fail under gVisor, by reason.
NO_AGENT = "the agent is not used: the gateway cannot identify it"
NO_HOLES = "its files have no holes that a program could find: a sparse file is stored whole, at its apparent size"
GVISOR_FAILURES = {
    "test_agent_needs_no_exec_and_its_files_are_owned_by_the_agents_user": NO_AGENT,
    "test_digest_stated_by_the_agent_is_that_of_the_listing": NO_AGENT,
    "test_stdin_is_written_by_offset_or_refused_from_the_start": NO_AGENT,
    "test_all_commands_are_killed_by_kill_all_or_a_restart_and_the_files_are_kept": NO_AGENT,
    "test_exact_tar_restores_links_holes_times_and_sticky_bits": NO_HOLES,
    "test_exact_tar_keeps_the_links_and_times_of_a_tar": "it stores times before 1970 as times after 2100",
    "test_oom_kill_is_reported": "its kernel ends as a whole, and the exec ends by its timeout",
}


def pytest_itemcollected(item):
    mark_matrix(item, SMOKE_KINDS)
    mark_matrix(item, MATRIX_KINDS, has_smoke_cases=False)
    if find_kind(item, [GVISOR]) and (reason := GVISOR_FAILURES.get(item.originalname)):
        item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def unique_name():
    return f"lhc-{uuid4().hex[:16]}"


def unique_sleep_seconds():
    """Return about 300 seconds for `sleep`, unique so that the process can be identified."""
    return f"300.{uuid4().int % 10**12:012}"


@dataclass
class SandboxHandle:
    """A ready sandbox, with shorthands for file verbs below `root`."""

    provider: Provider
    ref: str
    name: str
    root: str = WORKSPACE

    def run(self, *argv, env=None, seconds=60, mark="", **more) -> ExecResult:
        limit = timedelta(seconds=seconds)
        return self.provider.exec(self.ref, argv, env=env or {}, timeout=limit, mark=mark or unique_name(), **more)

    def path(self, path):
        return self.provider.inside(self.ref, path)

    def asleep(self, nap):
        """Count processes with this word on their command line, as seen inside the sandbox.

        The mark is not used: a command need not see the environment of another exec."""
        unlike_itself = f"[{nap[0]}]{nap[1:]}"
        return self.run("sh", "-c", f"grep -lsaz '{unlike_itself}' /proc/[0-9]*/cmdline").stdout.split()

    def write(self, path, content=b""):
        self.provider.write_file(self.ref, f"{self.root}/{path}", content)

    def read(self, path, limit=1 << 20):
        return self.provider.read_file(self.ref, f"{self.root}/{path}", limit=limit)

    def remove_file(self, path):
        self.provider.remove_file(self.ref, f"{self.root}/{path}")

    def make_directory(self, path):
        self.provider.make_directory(self.ref, f"{self.root}/{path}")

    def move(self, source, target, *, overwrite=False):
        self.provider.move_file(self.ref, f"{self.root}/{source}", f"{self.root}/{target}", overwrite=overwrite)

    def put(self, *members: TarMember):
        self.provider.put_files(self.ref, self.root, pack(*members))

    def get_members(self, **more) -> dict[str, tuple[tarfile.TarInfo, bytes | str | None]]:
        """Return the tar of get_files as name -> (member, content, link target, or None for a directory)."""
        content = io.BytesIO(b"".join(self.provider.get_files(self.ref, self.root, **more)))
        with tarfile.open(fileobj=content, mode="r:") as tar:
            return {
                member.name.removeprefix("./"): (
                    member,
                    tar.extractfile(member).read() if member.isreg() else member.linkname or None,
                )
                for member in tar
            }

    def get(self, **more):
        """Return the tar of get_files as name -> content, link target, or None for a directory."""
        return {name: content for name, (_, content) in self.get_members(**more).items()}

    def look(self, **more) -> Mapping[str, FileStat]:
        return self.provider.manifest(self.ref, self.root, **more)

    def names(self):
        """Return the paths in the manifest, without the home directory."""
        return {*self.look()} - {".home"}

    def remove(self, *paths):
        self.provider.remove_files(self.ref, self.root, paths)

    def range(self, path, start, length):
        return self.provider.read_range(self.ref, f"{self.root}/{path}", start=start, length=length)

    def python(self, code):
        """Run a Python script in the root. Return its output."""
        done = self.run("python3", "-c", f"import os, socket\n{code}", cwd=self.root)
        assert done.exit_code == 0, done.stderr
        return done.stdout


@dataclass
class ProviderBench:
    """A provider, and the sandboxes of one owner."""

    provider: Provider
    owner: str = field(default_factory=unique_name)
    agent: Path | None = None  # directory of the gateway's socket
    admit: Callable[[SandboxSpec], SandboxSpec] = lambda spec: spec  # adds the access to a gateway that the agent joins
    names: list[str] = field(default_factory=list)  # of all specs
    runtime: str = ""
    stop: Callable[[str], object] | None = None  # stops a sandbox from outside, by its ref; its files stay

    def spec(self, **more):
        image = DOCKER_IMAGE if self.provider.name in ("docker", "kubernetes") else ""
        self.names.append(unique_name())
        return self.admit(
            SandboxSpec(name=self.names[-1], owner=self.owner, image=image, agent=self.agent, runtime=self.runtime, **more)
        )

    def box(self, **more):
        spec = self.spec(**more)
        ref = self.provider.create(spec)
        self.provider.wait_ready(ref, timeout=timedelta(seconds=60))
        return SandboxHandle(self.provider, ref, spec.name)

    def hog(self):
        """Return the command line of a program that uses 1 GiB of memory."""
        script = SLOW_MEMORY_HOG_SCRIPT if self.provider.name == "kubernetes" else MEMORY_HOG_SCRIPT
        return ["oom"] if self.provider.name == "memory" else ["python3", "-c", script]

    def list(self, owner=""):
        """List the sandboxes of an owner, by default of this bench. Without a list of the engine, inspect each name."""
        if self.provider.can_list:
            return self.provider.list(owner or self.owner)
        with pytest.raises(Unavailable, match="cannot list"):
            self.provider.list(owner or self.owner)
        found = []
        for name in [] if owner else self.names:
            with suppress(Missing):
                found.append(self.provider.inspect(name))
        return found

    def clean(self):
        for found in self.list():
            self.provider.destroy(found.ref)


def make_params(kinds):
    return [
        pytest.param(kind, marks=[pytest.mark.docker] * kind.startswith(("docker", "kubernetes", "cluster"))) for kind in kinds
    ]


@pytest.fixture(scope="package")
def gateway(agent_gateway):
    """The gateway, to which the agents of all containers of this suite connect."""
    before = Counter(agent_exec.fallbacks)
    yield agent_gateway
    assert set(agent_exec.fallbacks - before) <= {"too_long"}  # no other command was executed by the engine


@pytest.fixture(scope="package")
def kubernetes(docker_ready, tmp_path_factory):
    """The emulator of a cluster on the Docker Engine, and the gateway that the agents of its Pods join."""
    with running_gateway() as gateway, serve_kubernetes(tmp_path_factory.mktemp("kubernetes")) as emulator:
        yield Cluster(emulator, gateway)


@pytest.fixture(scope="package")
def cluster(cluster_access, tmp_path_factory):
    """A real cluster, and the gateway that the agents of its Pods join."""
    directory = tmp_path_factory.mktemp("cluster")
    with (
        real_cluster.reachable_gateway(cluster_access) as gateway,
        real_cluster.prepared_cluster(cluster_access, directory, gateway) as cluster,
    ):
        yield cluster


def connect_cluster(cluster):
    return ProviderBench(cluster.connect(), admit=cluster.admit)


def wait_for_late_agents(monkeypatch):
    """Let requests wait for an agent that connects late on a busy machine. After the usual time the engine would take over."""
    monkeypatch.setattr(agent_gateways, "MAX_WAIT_SECONDS", AGENT_SECONDS)
    for module in (agent_runs, agent_operations):
        monkeypatch.setattr(module, "CONNECT_SECONDS", AGENT_SECONDS)


def make_bench(request, tmp_path):
    """Create the bench of a fixture's parameter. Without Docker it skips or fails, see tests/conftest.py."""
    kind = request.param.split()[0]
    if kind == "docker":
        gateway, settings = request.getfixturevalue("gateway"), request.getfixturevalue("settings")
        settings.AGENT_GATEWAY = tmp_path / "none" if request.param == BY_ENGINE else gateway.client_path
        wait_for_late_agents(request.getfixturevalue("monkeypatch"))
        provider, runtime = DockerProvider(), require_gvisor() if request.param == GVISOR else ""
        return ProviderBench(provider, agent=gateway.mount, runtime=runtime, stop=provider._engine.client.kill)
    if kind in ("kubernetes", "cluster"):
        return connect_cluster(request.getfixturevalue(kind))
    if kind in REMOTE:
        emulator = request.getfixturevalue("emulators")(kind)
        return ProviderBench(connect_provider(kind, emulator), stop=emulator.stop_idle)
    if kind == "process":
        return ProviderBench(ProcessProvider(tmp_path))
    provider = load_class(kind)()
    return ProviderBench(provider, stop=provider.stop)


def make_bench_fixture(*kinds):
    """Create a fixture parametrized by provider, for tests that create or destroy sandboxes."""

    @pytest.fixture(params=make_params(kinds))
    def fixture(request, tmp_path):
        bench = make_bench(request, tmp_path)
        yield bench
        bench.clean()

    return fixture


@pytest.fixture(scope="module")
def shared_box(request):
    """Sandbox of a provider shared by successive tests, because starting one takes longer than most tests."""
    benches = {}

    def get(kind, runtime):
        if (kind, runtime) not in benches:
            if kind == "docker":
                bench = ProviderBench(DockerProvider(), agent=request.getfixturevalue("gateway").mount, runtime=runtime)
            elif kind in ("kubernetes", "cluster"):
                bench = connect_cluster(request.getfixturevalue(kind))
            else:
                bench = ProviderBench(connect_provider(kind, request.getfixturevalue("emulators")(kind)))
            benches[kind, runtime] = bench, bench.box()
        return benches[kind, runtime][1]

    yield get
    for bench, _ in benches.values():
        bench.clean()


def make_box_fixture(*kinds, root=WORKSPACE):
    """Create a fixture parametrized by provider and access path, with an empty sandbox that tests do not destroy."""

    @pytest.fixture(params=make_params(kinds))
    def fixture(request, tmp_path):
        bench = make_bench(request, tmp_path)
        kind = request.param.split()[0]
        if kind in SHARED:
            box = request.getfixturevalue("shared_box")(kind, bench.runtime)
            for directory in (WORKSPACE, DATA):
                box.provider.clear(box.ref, directory)
        else:
            box = bench.box()
        yield replace(box, root=root)
        bench.clean()

    return fixture


bench = make_bench_fixture("memory", "process", "docker", GVISOR, "kubernetes", CLUSTER, *REMOTE)
real_bench = make_bench_fixture(
    "process", "docker", GVISOR, "kubernetes", CLUSTER, *REMOTE
)  # providers that execute real programs
limiting_bench = make_bench_fixture("memory", "docker", GVISOR, "kubernetes", CLUSTER)  # enforces_limits
# Providers whose sandboxes keep their files when they stop; those of Kubernetes, Cloudflare and Modal do not. Stops of
# containers with an agent, after which the engine executes the next command, are in tests/docker.
stopping_bench = make_bench_fixture("memory", BY_ENGINE, "daytona", "langsmith", "runloop")
suspending_bench = make_bench_fixture("memory", "docker")  # can_suspend
box = make_box_fixture("memory", "process", "docker", "kubernetes", CLUSTER, *REMOTE)
real_box = make_box_fixture("process", "docker", "kubernetes", CLUSTER, *REMOTE)
exec_box = make_box_fixture("memory", "process", "docker", BY_ENGINE, GVISOR, "kubernetes", CLUSTER, *REMOTE)
real_exec_box = make_box_fixture("process", "docker", BY_ENGINE, GVISOR, "kubernetes", CLUSTER, *REMOTE)
file_box = make_box_fixture("memory", "process", "docker", BY_ENGINE, GVISOR, "kubernetes", CLUSTER, *REMOTE, root=DATA)
