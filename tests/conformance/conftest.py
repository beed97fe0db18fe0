"""Fixtures of the provider conformance suite: every provider behind one interface.

Each test's sandboxes have their own owner label, by which they are removed. Concurrent runs and real sandboxes therefore do
not interfere."""

from dataclasses import dataclass, field
from datetime import timedelta
from uuid import uuid4

import pytest

from sandboxes.providers import PROVIDER_CLASSES
from sandboxes.providers.base import WORKSPACE, ExecResult, Provider, SandboxSpec
from sandboxes.providers.process import ProcessProvider
from tests.conftest import DOCKER_IMAGE

MEMORY_HOG_SCRIPT = "x = b'x' * (1 << 30)"  # written, not only reserved


def unique_name():
    return f"lhc-{uuid4().hex[:16]}"


def unique_sleep_seconds():
    """Return about 300 seconds for `sleep`, unique so that the process can be identified."""
    return f"300.{uuid4().int % 10**12:012}"


@dataclass
class SandboxHandle:
    """A ready sandbox."""

    provider: Provider
    ref: str
    name: str

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


@dataclass
class ProviderBench:
    """A provider, and the sandboxes of one owner."""

    provider: Provider
    owner: str = field(default_factory=unique_name)

    def spec(self, **more):
        return SandboxSpec(name=unique_name(), owner=self.owner, image=DOCKER_IMAGE, **more)

    def box(self, **more):
        spec = self.spec(**more)
        ref = self.provider.create(spec)
        self.provider.wait_ready(ref, timeout=timedelta(seconds=60))
        return SandboxHandle(self.provider, ref, spec.name)

    def hog(self):
        """Return the command line of a program that uses 1 GiB of memory."""
        return ["oom"] if self.provider.name == "memory" else ["python3", "-c", MEMORY_HOG_SCRIPT]

    def clean(self):
        for found in self.provider.list(self.owner):
            self.provider.destroy(found.ref)


def make_bench_fixture(*kinds):
    """Create a fixture parametrized by provider. Without Docker it skips or fails, see tests/conftest.py."""

    @pytest.fixture(params=[pytest.param(kind, marks=[pytest.mark.docker] * (kind == "docker")) for kind in kinds])
    def fixture(request, tmp_path):
        if request.param == "docker":
            request.getfixturevalue("docker_ready")
        bench = ProviderBench(ProcessProvider(tmp_path) if request.param == "process" else PROVIDER_CLASSES[request.param]())
        yield bench
        bench.clean()

    return fixture


bench = make_bench_fixture("memory", "process", "docker")
real_bench = make_bench_fixture("process", "docker")  # providers that execute real programs
limiting_bench = make_bench_fixture("memory", "docker")  # enforces_limits


@pytest.fixture
def box(bench):
    return bench.box()


@pytest.fixture
def real_box(real_bench):
    return real_bench.box()


@pytest.fixture
def workspace(box):
    """File access by paths relative to /workspace."""
    return Workspace(box)


@dataclass
class Workspace:
    box: SandboxHandle

    def write(self, path, content):
        self.box.provider.write_file(self.box.ref, f"{WORKSPACE}/{path}", content)

    def read(self, path, limit=1 << 20):
        return self.box.provider.read_file(self.box.ref, f"{WORKSPACE}/{path}", limit=limit)

    def remove(self, path):
        self.box.provider.remove_file(self.box.ref, f"{WORKSPACE}/{path}")
