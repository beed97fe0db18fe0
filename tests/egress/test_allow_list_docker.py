"""Allow list with real sandboxes: curl, pip and git reach a listed domain, and nothing else is reached."""

import http.server
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings

from leases import leasing
from leases.models import EnvironmentType
from sandboxes.agent.gateway import AgentGateway
from sandboxes.egress import slots
from sandboxes.egress.allow_list import connections, destinations
from sandboxes.egress.allow_list.proxy import AllowListProxy
from sandboxes.egress.call_tracking import DatabaseThreads
from sandboxes.models import EgressConnection, Policy
from tests.conftest import NOW
from tests.egress.stack import EgressStack, LeasedSandbox, run_in_thread
from tests.support.servers.tls import TlsFiles, create_certificates
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
DOMAIN, OTHER_DOMAIN, INTERNAL_DOMAIN = "files.registry.test", "other.registry.test", "metadata.registry.test"
ADDRESSES = {DOMAIN: "127.0.0.1", OTHER_DOMAIN: "127.0.0.1", INTERNAL_DOMAIN: "169.254.169.254", "local.test": "127.0.0.1"}
MIB = 1 << 20


class Upstream:
    """TLS server of a directory on loopback. `paths` are those of its requests."""

    def __init__(self, directory: Path, files: TlsFiles) -> None:
        paths = self.paths = list[str]()

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                paths.append(self.path)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(directory)))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return create_certificates(tmp_path_factory.mktemp("tls"), DOMAIN, OTHER_DOMAIN)


@pytest.fixture
def upstream(tmp_path: Path, certificates: TlsFiles) -> Iterator[Upstream]:
    upstream = Upstream(tmp_path, certificates)
    (tmp_path / "hello.txt").write_text("hello\n")
    yield upstream
    upstream.server.shutdown()
    upstream.server.server_close()


@pytest.fixture
def policy(db: None, upstream: Upstream, settings: Any) -> Policy:
    settings.EGRESS_ALLOWED_NETWORKS = [ip_network("127.0.0.0/8")]
    policy = Policy.objects.create(
        name="allow-list", allowed_domains=[f"{DOMAIN}:{upstream.port}", "*.metadata.test", f"{INTERNAL_DOMAIN}"]
    )
    EnvironmentType.objects.filter(name="coding").update(policy=policy)
    return policy


@pytest.fixture
def proxy(egress: EgressStack, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllowListProxy]:
    """The proxy of all slots, and the gateway in the same process. Names of ADDRESSES are resolved without a name server."""
    look_up = socket.getaddrinfo

    def resolve(host: str, *args: Any, **kwargs: Any) -> Any:
        return look_up(ADDRESSES.get(str(host).rstrip("."), host), *args, **kwargs)

    monkeypatch.setattr(destinations.socket, "getaddrinfo", resolve)
    with serve(egress) as proxy:
        yield proxy


@contextmanager
def serve(egress: EgressStack) -> Iterator[AllowListProxy]:
    database = DatabaseThreads()
    proxy = AllowListProxy(egress.clock, database)
    directories = [slots.ensure_agent_directory(slot) for slot in range(django_settings.EGRESS_SLOTS)]
    sockets = {directory / slots.PROXY_SOCKET_NAME: slot for slot, directory in enumerate(directories)}
    with egress.loop.run_context(proxy.listening(sockets)):
        yield proxy
    egress.loop.run(database.close())


@pytest.fixture
def box(egress: EgressStack, policy: Policy, proxy: AllowListProxy, enter: Callable[..., LeasedSandbox]) -> LeasedSandbox:
    return enter()


def curl(box: LeasedSandbox, certificates: TlsFiles, url: str, *options: str) -> tuple[int, str]:
    """Return curl's exit code and its output."""
    script = 'cat > /tmp/ca.pem; exec curl -sS --cacert /tmp/ca.pem --max-time 20 "$@" 2>&1'
    done = box.run("sh", "-c", script, "sh", url, *options, stdin=certificates.authority.read_bytes())
    return done.exit_code, done.stdout.decode()


def closed_rows(count: int) -> list[EgressConnection]:
    """Wait until `count` rows exist and all are closed. Return them."""

    def is_done() -> bool:
        rows = EgressConnection.objects
        return rows.count() >= count and not rows.filter(ended_at__isnull=True).exists()

    wait_until(is_done, f"{count} connections are closed")
    rows = [*EgressConnection.objects.order_by("pk")]
    assert len(rows) == count
    return rows


def test_curl_reaches_an_allowed_domain(box: LeasedSandbox, upstream: Upstream, certificates: TlsFiles) -> None:
    assert curl(box, certificates, f"https://{DOMAIN}:{upstream.port}/hello.txt") == (0, "hello\n")
    (row,) = closed_rows(1)
    assert (row.outcome, row.code, row.domain, row.port) == ("ok", "", DOMAIN, upstream.port)
    assert (row.holder, row.sandbox_id, row.address) == (box.lease.pk, box.box.pk, "127.0.0.1")
    assert row.run_id is not None
    assert 500 < row.sent_bytes < 10_000
    assert 1000 < row.received_bytes < 10_000
