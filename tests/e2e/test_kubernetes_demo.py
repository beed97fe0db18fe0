"""The demo with agents in Pods: turns, model calls by the agents' connections to the gateway over TLS, and usage."""

from types import SimpleNamespace

import pytest

from tests.commands.manage import run_manage
from tests.conftest import DOCKER_IMAGE
from tests.e2e.conftest import Home
from tests.e2e.test_remote_demo import TURNS, TURNS_WITH_CALL, USAGE
from tests.emulators.kubernetes.api.resources import PODS, SECRETS
from tests.emulators.kubernetes.emulator import GATEWAY
from tests.emulators.registry import serve_kubernetes
from tests.support.cluster import NAMESPACE, Cluster
from tests.support.servers import ports
from tests.support.servers.tls import create_certificates

pytestmark = [pytest.mark.e2e, pytest.mark.matrix("the demo in Pods")]


def test_game_is_played_in_pods(home: Home, docker_ready: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    files = create_certificates(tmp_path_factory.mktemp("tls"), GATEWAY)
    [port] = ports.find_free_ports()
    with serve_kubernetes(tmp_path_factory.mktemp("kubernetes")) as emulator:
        cluster = Cluster(emulator, SimpleNamespace(port=port))
        environment = {
            "SANDBOX_PROVIDER": "kubernetes", "KUBECONFIG": str(cluster.kubeconfig), "LEASEHOLD_SANDBOX_IMAGE": DOCKER_IMAGE,
            "LEASEHOLD_KUBERNETES_GATEWAY_ADDRESS": cluster.configuration.gateway_address, "LEASEHOLD_MAX_SANDBOXES": "8",
            "LEASEHOLD_GATEWAY_LISTEN": f"127.0.0.1:{port}", "LEASEHOLD_GATEWAY_URL": f"https://{GATEWAY}:8443",
            "LEASEHOLD_GATEWAY_CERTIFICATE": str(files.certificate), "LEASEHOLD_GATEWAY_CERTIFICATE_KEY": str(files.key),
            "LEASEHOLD_GATEWAY_AUTHORITY": str(files.authority),
        }  # fmt: skip
        demo = ("demo", "--port", str(home.port), "--agents", "2", "--points", "3", "--seed", "7", "--exit")
        process = run_manage(home.path, *demo, **environment)
        assert process.returncode == 0, process.stdout + process.stderr
        assert " wins." in process.stdout and "skipped:" not in process.stdout, process.stdout
        assert home.query_value(TURNS) == home.query_value(TURNS_WITH_CALL) > 5
        assert home.query_value(USAGE.format(vendor="kubernetes")) == 2
        assert [*emulator.store.list(PODS, NAMESPACE), *emulator.store.list(SECRETS, NAMESPACE)] == []
