"""Allow list with real sandboxes: curl, pip and git reach a listed domain, and nothing else is reached."""

import http.server
import io
import socket
import ssl
import subprocess
import tarfile
import threading
import zipfile
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
from sandboxes.egress import slots
from sandboxes.egress.allow_list import connections, credentials, destinations
from sandboxes.egress.allow_list.proxy import AllowListProxy
from sandboxes.egress.call_tracking import DatabaseThreads
from sandboxes.egress.refusals import CallRefused
from sandboxes.models import EgressConnection, Policy
from tests.conftest import NOW
from tests.egress.stack import EgressStack, LeasedSandbox, run_egress_command, run_in_thread
from tests.support.servers.tls import TlsFiles, create_certificates
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
DOMAIN, OTHER_DOMAIN, INTERNAL_DOMAIN = "files.registry.test", "other.registry.test", "metadata.registry.test"
ADDRESSES = {DOMAIN: "127.0.0.1", OTHER_DOMAIN: "127.0.0.1", INTERNAL_DOMAIN: "169.254.169.254", "local.test": "127.0.0.1"}
MIB = 1 << 20


class Upstream:
    """TLS server of a directory on loopback. `paths` and `authorizations` are those of its requests."""

    def __init__(self, directory: Path, files: TlsFiles) -> None:
        paths = self.paths = list[str]()
        authorizations = self.authorizations = list[str | None]()

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                paths.append(self.path)
                authorizations.append(self.headers.get("Authorization"))

            def answer_with_request(self) -> None:
                """As a debug page, and as Apache httpd answers TRACE."""
                body = f"{self.requestline}\n{self.headers}".encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_PUT = do_TRACE = answer_with_request

            def do_GET(self) -> None:
                self.answer_with_request() if self.path == "/debug" else super().do_GET()

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


def test_a_name_that_is_not_listed_is_refused(box: LeasedSandbox, upstream: Upstream, certificates: TlsFiles) -> None:
    code, output = curl(box, certificates, f"https://{OTHER_DOMAIN}:{upstream.port}/hello.txt")
    assert code == 56
    assert "403" in output
    assert curl(box, certificates, f"https://{DOMAIN}:{upstream.port + 1}/hello.txt")[0] == 56
    assert {(row.outcome, row.code, row.address) for row in closed_rows(2)} == {("refused", "domain_not_allowed", None)}
    assert not upstream.paths


def test_a_sandbox_without_an_allow_list_has_no_proxy_variables(
    egress: EgressStack, proxy: AllowListProxy, enter: Callable[..., LeasedSandbox], certificates: TlsFiles
) -> None:
    sealed = enter()
    assert sealed.run("sh", "-c", "env | grep -i _proxy=").stdout == b""
    code, output = curl(sealed, certificates, f"https://{DOMAIN}", "--proxy", "http://127.0.0.1:4011")
    assert (code, "403" in output) == (56, True)
    assert [row.code for row in closed_rows(1)] == ["no_allow_list"]


def test_another_server_name_in_the_tunnel_is_refused(box: LeasedSandbox, upstream: Upstream, certificates: TlsFiles) -> None:
    """curl asks for a tunnel to the listed name, through which it speaks to another site of the same server."""
    where = f"{OTHER_DOMAIN}:{upstream.port}:{DOMAIN}:{upstream.port}"
    code, output = curl(box, certificates, f"https://{OTHER_DOMAIN}:{upstream.port}/hello.txt", "--connect-to", where)
    assert code == 35, output
    (row,) = closed_rows(1)
    assert (row.outcome, row.code, row.sent_bytes, row.received_bytes) == ("refused", "server_name_mismatch", 0, 0)
    assert not upstream.paths


def test_a_tunnel_carries_tls_only(box: LeasedSandbox, upstream: Upstream, certificates: TlsFiles) -> None:
    assert curl(box, certificates, f"http://{DOMAIN}:{upstream.port}/hello.txt", "--proxytunnel")[0] == 52
    assert [row.code for row in closed_rows(1)] == ["tls_expected"]


def test_private_addresses_are_refused(
    box: LeasedSandbox, policy: Policy, upstream: Upstream, certificates: TlsFiles, settings: Any
) -> None:
    """The metadata address is refused even if the operator allows its network."""
    settings.EGRESS_ALLOWED_NETWORKS = [ip_network("169.254.0.0/16")]
    for domain in (INTERNAL_DOMAIN, DOMAIN):
        port = upstream.port if domain == DOMAIN else 443
        code, output = curl(box, certificates, f"https://{domain}:{port}/")
        assert (code, "403" in output, "127.0.0.1" in output) == (56, True, False)
    assert {(row.outcome, row.code) for row in closed_rows(2)} == {("refused", "address_not_allowed")}


def test_plain_http_is_forwarded_with_its_body(
    box: LeasedSandbox, policy: Policy, egress: EgressStack, certificates: TlsFiles
) -> None:
    port = int(egress.upstream.url.rpartition(":")[2].split("/")[0])
    Policy.objects.filter(pk=policy.pk).update(allowed_domains=[f"local.test:{port}"])
    options = ("--json", '{"model": "m"}', "-o", "/dev/null", "-w", "%{http_code}")
    assert curl(box, certificates, f"http://local.test:{port}/v1/chat/completions", *options) == (0, "200")
    (row,) = closed_rows(1)
    assert (row.outcome, egress.upstream.requests[-1][2]) == ("ok", {"model": "m"})


def test_credential_is_added_outside_and_sent_over_tls_only(
    box: LeasedSandbox, policy: Policy, upstream: Upstream, certificates: TlsFiles, proxy: AllowListProxy
) -> None:
    credentials.set_credential(policy, DOMAIN, "Bearer of-the-operator", now=NOW)
    proxy._tls = ssl.create_default_context(cafile=str(certificates.authority))
    url = f"http://{DOMAIN}:{upstream.port}/hello.txt"
    assert curl(box, certificates, url, "-H", "Authorization: Bearer of-the-agent") == (0, "hello\n")
    assert upstream.authorizations == ["Bearer of-the-operator"]
    assert curl(box, certificates, url.replace("http:", "https:"))[0] == 0  # a tunnel is not read, so nothing is added
    assert upstream.authorizations == ["Bearer of-the-operator", None]
    proxy._tls = ssl.create_default_context()  # does not know the authority
    code, output = curl(box, certificates, url, "-o", "/dev/null", "-w", "%{http_code}")
    assert (code, output, len(upstream.paths)) == (0, "502", 2)
    assert b"of-the-operator" not in box.run("sh", "-c", "env; cat /proc/[0-9]*/environ 2>/dev/null").stdout
    assert [row.outcome for row in closed_rows(3)] == ["ok", "ok", "failed"]


def test_credential_is_sent_with_downloads_alone_and_removed_from_responses(
    box: LeasedSandbox, policy: Policy, upstream: Upstream, certificates: TlsFiles, proxy: AllowListProxy
) -> None:
    def call(path: str, method: str) -> str:
        return curl(box, certificates, f"http://{DOMAIN}:{upstream.port}{path}", "-X", method, "-w", "%{http_code}")[1]

    secret = "token-of-the-operator"
    proxy._tls = ssl.create_default_context(cafile=str(certificates.authority))
    credentials.set_credential(policy, DOMAIN, f"Bearer {secret}", now=NOW)
    page = call("/debug", "GET")
    assert f"Authorization: Bearer {'*' * len(secret)}\n" in page
    assert page.endswith("200")
    assert [call("/debug", method)[-3:] for method in ("TRACE", "POST", "PUT")] == ["405", "403", "403"]
    assert call("/a.git/git-upload-pack", "POST")[-3:] == "200"
    assert upstream.authorizations == [f"Bearer {secret}"] * 2
    credentials.set_credential(policy, DOMAIN, f"Bearer {secret}", writes=True, now=NOW)
    answers = [call("/x", method) for method in ("POST", "PUT", "TRACE")]
    assert [answer[-3:] for answer in answers] == ["200", "200", "405"]
    assert not any(secret in answer for answer in answers)
    assert [row.code for row in closed_rows(6)] == ["", "method_not_allowed", "method_not_allowed", "", "", ""]


@pytest.mark.matrix("a whole program; curl has the same path through the proxy")
def test_pip_installs_from_an_allowed_index(
    box: LeasedSandbox, upstream: Upstream, certificates: TlsFiles, tmp_path: Path
) -> None:
    index = tmp_path / "simple" / "hello-package"
    index.mkdir(parents=True)
    build_wheel(index / "hello_package-1.0-py3-none-any.whl")
    install = "cat > /tmp/ca.pem; pip install -q --no-input --cert /tmp/ca.pem -i $0 hello-package 2>&1"
    script = f"{install} && python3 -c 'import hello_package as h; print(h.GREETING)'"
    url = f"https://{DOMAIN}:{upstream.port}/simple"
    done = box.run("sh", "-c", script, url, stdin=certificates.authority.read_bytes())
    assert done.stdout.decode().endswith("installed\n"), done.stdout
    assert {row.outcome for row in EgressConnection.objects.all()} <= {"ok", "open"}


def build_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("hello_package/__init__.py", "GREETING = 'installed'\n")
        info = "hello_package-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: hello-package\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.matrix("a whole program; curl has the same path through the proxy")
def test_git_clones_from_an_allowed_host(
    box: LeasedSandbox, upstream: Upstream, certificates: TlsFiles, tmp_path: Path
) -> None:
    git = partial(subprocess.run, check=True, capture_output=True)
    work = tmp_path / "work"
    git(["git", "init", "-q", str(work)])
    (work / "README").write_text("cloned\n")
    git(["git", "-C", str(work), "add", "."])
    git(["git", "-C", str(work), "-c", "user.name=A", "-c", "user.email=a@a.test", "commit", "-qm", "one"])
    git(["git", "clone", "-q", "--bare", str(work), str(tmp_path / "project.git")])
    git(["git", "-C", str(tmp_path / "project.git"), "update-server-info"])
    script = "cat > /tmp/ca.pem; GIT_SSL_CAINFO=/tmp/ca.pem git clone -q $0 project 2>&1; cat project/README"
    url = f"https://{DOMAIN}:{upstream.port}/project.git"
    done = box.run("sh", "-c", script, url, stdin=certificates.authority.read_bytes())
    assert done.stdout == b"cloned\n"


def test_a_connection_ends_at_its_byte_limit(
    box: LeasedSandbox, policy: Policy, upstream: Upstream, certificates: TlsFiles, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(bytes(3 * MIB))
    Policy.objects.filter(pk=policy.pk).update(max_connection_mib=1)
    code, _ = curl(box, certificates, f"https://{DOMAIN}:{upstream.port}/large", "-o", "/dev/null")
    assert code != 0
    (row,) = closed_rows(1)
    assert (row.outcome, row.code) == ("cut", "connection_bytes_exceeded")
    assert MIB // 2 < row.sent_bytes + row.received_bytes <= MIB


def test_a_lease_ends_at_its_byte_limit(
    box: LeasedSandbox, policy: Policy, upstream: Upstream, certificates: TlsFiles, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(bytes(MIB * 3 // 4))
    Policy.objects.filter(pk=policy.pk).update(max_lease_mib=1)
    url = f"https://{DOMAIN}:{upstream.port}/large"
    assert [curl(box, certificates, url, "-o", "/dev/null")[0] == 0 for _ in range(2)] == [True, False]
    assert [(row.outcome, row.code) for row in closed_rows(2)] == [("ok", ""), ("cut", "lease_bytes_exceeded")]
    Policy.objects.filter(pk=policy.pk).update(max_connections=1)
    assert sum(row.sent_bytes + row.received_bytes for row in closed_rows(2)) <= MIB


@pytest.mark.matrix("a whole program; curl has the same path through the proxy")
def test_a_slow_reader_receives_everything(
    box: LeasedSandbox, upstream: Upstream, certificates: TlsFiles, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(bytes(2 * MIB))
    options = ("--limit-rate", "1M", "-o", "/dev/null", "-w", "%{size_download}")
    assert curl(box, certificates, f"https://{DOMAIN}:{upstream.port}/large", *options) == (0, str(2 * MIB))
    assert [row.outcome for row in closed_rows(1)] == ["ok"]


class SilentUpstream:
    """Server that completes the TLS handshake and then neither answers nor closes."""

    def __init__(self, files: TlsFiles) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(files.certificate, files.key)
        self.listener, self.held = socket.create_server(("127.0.0.1", 0)), list[ssl.SSLSocket]()
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                self.held.append(self.context.wrap_socket(self.listener.accept()[0], server_side=True))
            except OSError:
                return

    def close(self) -> None:
        for connection in (self.listener, *self.held):
            connection.close()


@pytest.fixture
def silent(policy: Policy, certificates: TlsFiles) -> Iterator[SilentUpstream]:
    silent = SilentUpstream(certificates)
    Policy.objects.filter(pk=policy.pk).update(allowed_domains=[f"{DOMAIN}:{silent.port}"], max_connections=1)
    yield silent
    silent.close()


def test_the_end_of_a_lease_closes_its_connections(box: LeasedSandbox, silent: SilentUpstream, certificates: TlsFiles) -> None:
    with run_in_thread(lambda: curl(box, certificates, f"https://{DOMAIN}:{silent.port}/")):
        wait_until(lambda: bool(silent.held), "the connection is open")
        code, output = curl(box, certificates, f"https://{DOMAIN}:{silent.port}/")
        assert (code, "429" in output) == (56, True)
        leasing.release(box.lease.pk, now=NOW)
        rows = closed_rows(2)
    assert [(row.outcome, row.code) for row in rows] == [("cut", "lease_ended"), ("refused", "too_many_at_once")]


def test_rows_of_a_dead_proxy_are_closed_by_the_sweep_and_deleted_later(
    box: LeasedSandbox, silent: SilentUpstream, certificates: TlsFiles, egress: EgressStack, proxy: AllowListProxy
) -> None:
    with run_in_thread(lambda: curl(box, certificates, f"https://{DOMAIN}:{silent.port}/", "--max-time", "3")):
        wait_until(lambda: bool(silent.held), "the connection is open")
        (row,) = EgressConnection.objects.all()
        assert connections.close_abandoned(now=NOW + connections.HEARTBEAT_TIMEOUT) == 0
        assert connections.close_abandoned(now=NOW + connections.HEARTBEAT_TIMEOUT + timedelta(seconds=1)) == 1
    silent.close()
    wait_until(lambda: not proxy.read_counts()["connections open"], "the connection has ended")
    row.refresh_from_db()
    assert row.outcome == "lost"
    assert not connections.find_expired(now=NOW + connections.RETENTION)
    assert connections.find_expired(now=NOW + connections.RETENTION + timedelta(seconds=1)).count() == 1


@pytest.mark.matrix("a whole program; curl has the same path through the proxy")
def test_the_command_serves_the_proxy_and_again_after_a_kill(
    egress: EgressStack, policy: Policy, enter: Callable[..., LeasedSandbox], certificates: TlsFiles
) -> None:
    """The name of the domain exists nowhere, so that the proxy of the command answers 502."""
    egress.serving.close()
    unknown = f"https://missing.{OTHER_DOMAIN}/"
    Policy.objects.filter(pk=policy.pk).update(allowed_domains=[f"missing.{OTHER_DOMAIN}"])
    with run_egress_command(egress) as command:
        box = enter()
        code, output = curl(box, certificates, unknown)
        assert (code, "502" in output) == (56, True)
        assert [(row.outcome, row.code) for row in closed_rows(1)] == [("failed", "not_resolved")]
        command.kill()
        command.wait(20)
        assert curl(box, certificates, unknown)[0] != 0
    with run_egress_command(egress):
        wait_until(lambda: "502" in curl(box, certificates, unknown)[1], "the proxy listens again")


@pytest.mark.matrix("a whole program; curl has the same path through the proxy")
def test_npm_installs_from_an_allowed_host(
    box: LeasedSandbox, upstream: Upstream, certificates: TlsFiles, tmp_path: Path
) -> None:
    content = b'{"name": "hello", "version": "1.0.0"}'
    with tarfile.open(tmp_path / "hello-1.0.0.tgz", "w:gz") as package:
        member = tarfile.TarInfo("package/package.json")
        member.size = len(content)
        package.addfile(member, io.BytesIO(content))
    script = "cat > ca.pem; npm install --no-audit --no-fund --cafile ca.pem $0 2>&1; cat node_modules/hello/package.json"
    url = f"https://{DOMAIN}:{upstream.port}/hello-1.0.0.tgz"
    done = box.run("sh", "-c", script, url, stdin=certificates.authority.read_bytes())
    assert done.stdout.endswith(content), done.stdout


def test_refusals_beyond_the_limit_are_not_stored(box: LeasedSandbox) -> None:
    for number in range(connections.MAX_LOGGED_REFUSALS_PER_MINUTE + 2):
        with pytest.raises(CallRefused, match="not on the allow list"):
            connections.open_connection(box.box.slot or 0, f"c{number}", "evil.test", 443, now=NOW)
    assert len(closed_rows(connections.MAX_LOGGED_REFUSALS_PER_MINUTE)) == connections.MAX_LOGGED_REFUSALS_PER_MINUTE
