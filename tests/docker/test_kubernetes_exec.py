"""Commands by the API server, for debugging sandboxes whose agent does not connect."""

from datetime import timedelta

import pytest

from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.errors import Unavailable
from tests.conftest import DOCKER_IMAGE
from tests.emulators.base import CUT_AFTER, Fault
from tests.emulators.registry import serve_kubernetes
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.docker,
    pytest.mark.matrix("the fallback is off by default: commands go through the gateway"),
]


def test_command_of_a_sandbox_without_an_agent_by_the_api_server(docker_ready, tmp_path):
    with serve_kubernetes(tmp_path) as emulator:
        cluster = Cluster(emulator)
        emulator.authorizer.is_enforced = False  # the permission is optional in docs/kubernetes.md
        provider = cluster.connect(exec_fallback=True)
        spec = SandboxSpec(name="lhp-exec", owner="o", image=DOCKER_IMAGE, memory_mib=128)
        provider.create(cluster.admit_nobody(spec))
        wait_until(lambda: provider.inspect(spec.name).running, "the Pod runs", within=30.0)

        def run(*argv, **fields):
            limit = timedelta(seconds=20)
            return provider.exec(spec.name, argv, env={"A": "b c"}, cwd="/tmp", timeout=limit, mark="m", **fields)

        result = run("sh", "-c", 'cat; pwd; printf "$A"; echo error >&2; exit 7', stdin=b"in ")
        assert (result.exit_code, result.stdout, result.stderr) == (7, b"in /tmp\nb c", b"error\n")
        provider.write_file(spec.name, "/workspace/a", b"content")
        assert provider.read_file(spec.name, "/workspace/a", limit=100) == b"content"
        emulator.faults.append(Fault("/exec", CUT_AFTER))
        with pytest.raises(Unavailable, match="may still run"):
            run("true")
