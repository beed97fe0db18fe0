"""Console and API behind nginx with TLS, configured as docs/operations.md shows."""

import http.client
import json
import re
import ssl
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
from django.conf import settings
from docker.errors import NotFound
from docker.types import Mount

from sandboxes.providers.docker.engine import Engine
from tests.commands.manage import run_manage
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.support.servers import ports
from tests.support.servers.tls import create_certificates
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
NAME = "leasehold.example.com"
TIMEOUT_SECONDS = 60


class Proxy:
    """nginx in a container, in the network of this host, with the documented configuration of the console."""

    def __init__(self, path: Path, upstream_port: int) -> None:
        self.port, self.plain_port = ports.find_free_ports(2)
        self.address = f"{NAME}:{self.port}"
        self._path, self._upstream_port = path, upstream_port

    def write_configuration(self) -> Path:
        """Write the documented server blocks, with ports and files of this test in place of those of the example."""
        [example] = re.findall(r"\n(    server \{\n        listen 80;.*?)\n\n[A-Z]", DOCUMENT.read_text(), re.DOTALL)
        for shown, used in {
            "listen 80;": f"listen 127.0.0.1:{self.plain_port};", "listen 443 ssl;": f"listen 127.0.0.1:{self.port} ssl;",
            "/etc/letsencrypt/live/leasehold.example.com/fullchain.pem": "/proxy/server.pem",
            "/etc/letsencrypt/live/leasehold.example.com/privkey.pem": "/proxy/server.key",
            "http://127.0.0.1:8000;": f"http://127.0.0.1:{self._upstream_port};",
        }.items():  # fmt: skip
            assert shown in example
            example = example.replace(shown, used)
        head = "pid /tmp/nginx.pid;\nerror_log stderr;\nevents {}\nhttp {\naccess_log off;\n"
        paths = "".join(f"{kind}_temp_path /tmp/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        (self._path / "nginx.conf").write_text(f"{head}{paths}{example}\n}}\n")
        return self._path

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Send a request over TLS, with the name of the certificate."""
        context = ssl.create_default_context(cafile=self._path / "authority.pem")
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS, context=context)
        with closing(connection):
            connection.request(method, path, body, {"Host": self.address, **(headers or {})})
            response = connection.getresponse()
            return response, response.read()


@pytest.fixture
def proxy(fleet: Fleet, tmp_path: Path) -> Iterator[Proxy]:  # noqa: F811
    directory = tmp_path / "proxy"
    directory.mkdir()
    create_certificates(directory, NAME, "127.0.0.1")
    proxy = Proxy(directory, fleet.port)
    fleet.env["LEASEHOLD_PUBLIC_URL"] = f"https://{proxy.address}"
    fleet.up("--no-worker")
    name, client = f"leasehold-test-tls-{uuid.uuid4().hex[:12]}", Engine().client
    client.create_container(
        settings.EGRESS_IMAGE, name=name, command=["nginx", "-c", "/proxy/nginx.conf", "-g", "daemon off;"],
        host_config=client.create_host_config(
            network_mode="host", mounts=[Mount("/proxy", str(proxy.write_configuration()), type="bind", read_only=True)]
        ),
    )  # fmt: skip
    try:
        client.start(name)

        def is_ready() -> bool:
            with suppress(OSError):
                return proxy.send("GET", "/livez")[0].status == 200
            assert client.inspect_container(name)["State"]["Running"], client.logs(name).decode()
            return False

        wait_until(is_ready, "nginx answers", within=TIMEOUT_SECONDS)
        yield proxy
    finally:
        with suppress(NotFound):
            client.remove_container(name, force=True)


def test_everything_behind_the_documented_proxy_is_https(fleet: Fleet, proxy: Proxy) -> None:  # noqa: F811
    public = f"https://{proxy.address}"
    with closing(http.client.HTTPConnection("127.0.0.1", proxy.plain_port, timeout=TIMEOUT_SECONDS)) as connection:
        connection.request("GET", "/admin/?a=1", headers={"Host": NAME})
        redirect = connection.getresponse()
        assert (redirect.status, redirect.headers["Location"]) == (301, f"https://{NAME}/admin/?a=1")

    lease = fleet.join(0)
    headers = {"Authorization": f"Bearer {fleet.key}", "Content-Type": "application/json", "X-Forwarded-Proto": "http"}
    for method, body in (("PUT", b"content"), ("GET", None)):
        wanted = json.dumps({"path": "a.txt", "method": method}).encode()
        created, content = proxy.send("POST", f"/api/v1/leases/{lease}/file-urls", wanted, headers)
        assert created.status == 201, content
        url = json.loads(content)["url"]
        assert url.startswith(f"{public}/api/v1/signed-files?token=")
        used, content = proxy.send(method, url.removeprefix(public), body)
        assert (used.status, content) == ((204, b"") if method == "PUT" else (200, b"content"))
        assert used.headers.get_all("Strict-Transport-Security") == ["max-age=31536000"]

    created_user = run_manage(fleet.path, "quickstart", **fleet.env).stdout
    [(username, password)] = re.findall(r'as "(\S+)" with the password (\S+)', created_user)
    page, content = proxy.send("GET", "/admin/login/")
    [cookie] = page.headers.get_all("Set-Cookie") or []
    assert re.fullmatch(r"__Host-csrftoken=\w+; .*Path=/; SameSite=Lax; Secure", cookie), cookie
    [token] = re.findall(rb'name="csrfmiddlewaretoken" value="(\w+)"', content)
    fields = {"username": username, "password": password, "csrfmiddlewaretoken": token.decode()}
    form = urlencode(fields).encode()
    sent = {"Cookie": cookie.partition(";")[0], "Content-Type": "application/x-www-form-urlencoded"}
    for origin in (
        {"Origin": f"http://{proxy.address}"}, {"Origin": "https://evil.example"}, {"Referer": "https://evil.example/"},
        {"Origin": f"http://127.0.0.1:{fleet.port}"}, {"Referer": f"http://{proxy.address}/admin/login/"}, {},
    ):  # fmt: skip
        assert proxy.send("POST", "/admin/login/?next=/admin/", form, {**sent, **origin})[0].status == 403, origin
    signed_in, _ = proxy.send("POST", "/admin/login/?next=/admin/", form, {**sent, "Origin": public})
    assert signed_in.status == 302
    assert urlsplit(signed_in.headers["Location"]).path == "/admin/"
    names = {cookie.partition("=")[0] for cookie in signed_in.headers.get_all("Set-Cookie") or []}
    assert names == {"__Host-csrftoken", "__Host-sessionid", "__Host-leasehold_browser"}
    assert all("Secure" in cookie and "Domain" not in cookie for cookie in signed_in.headers.get_all("Set-Cookie") or [])
