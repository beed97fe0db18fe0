"""HTTP POST of webhooks: allowed destinations, time limits and TLS."""

import datetime
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from ipaddress import IPv4Address, ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from sandboxes.webhooks import http_post
from sandboxes.webhooks.addresses import get_refusal_reason
from sandboxes.webhooks.http_post import PostResult
from tests.support.servers.receiver import WebhookReceiver, never_respond, run_receiver, stream_endlessly, trickle_headers


def post(url: str, timeout: float = 30.0, internal: bool = True) -> PostResult:
    return http_post.post(url, b"{}", {"webhook-id": "1"}, internal=internal, timeout=timeout)


def test_body_and_headers_arrive(receiver: WebhookReceiver) -> None:
    assert post(receiver.url + "/a%20b?c=d%2Fe") == PostResult(204)
    [one] = receiver.received
    assert (one.path, one.body, one.headers["webhook-id"]) == ("/events/a%20b?c=d%2Fe", b"{}", "1")
    assert one.headers["host"] == f"127.0.0.1:{receiver.server_address[1]}"


@pytest.mark.parametrize("answer", [never_respond, trickle_headers])
def test_a_missing_answer_times_out(receiver: WebhookReceiver, answer: Callable) -> None:
    receiver.answer = answer
    assert post(receiver.url, timeout=0.4) == PostResult(error="No response within 0.4 s.")


def test_an_endless_body_is_not_read(receiver: WebhookReceiver) -> None:
    receiver.answer = stream_endlessly
    assert post(receiver.url) == PostResult(200)


def test_endless_headers_are_refused(receiver: WebhookReceiver) -> None:
    def headers(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not receiver.stopping.is_set():
            request.wfile.write(b"X-More: " + b"a" * 4000 + b"\r\n")

    receiver.answer = headers
    assert post(receiver.url).error.startswith("Invalid HTTP response")


def test_an_answer_that_is_not_http_is_an_error(receiver: WebhookReceiver) -> None:
    receiver.answer = lambda request: request.wfile.write(b"SSH-2.0-OpenSSH_9.6 it is secret\r\n\r\n")  # type: ignore[assignment]
    answer = post(receiver.url)
    assert answer.status is None and "secret" not in answer.error and "Invalid HTTP response" in answer.error


def test_a_broken_connection_is_an_error(receiver: WebhookReceiver) -> None:
    receiver.answer = lambda request: request.connection.shutdown(socket.SHUT_RDWR)
    assert post(receiver.url).error == "The server closed the connection without a response."
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "refused" in post(f"http://127.0.0.1:{port}/").error


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(receiver: WebhookReceiver, status: int) -> None:
    with run_receiver() as other:
        receiver.status, receiver.headers = status, {"Location": other.url}
        answer = post(receiver.url)
        assert answer.status == status and answer.error.startswith(f"Status {status}")
        assert len(receiver.received) == 1 and not other.received


def test_no_proxy_of_the_environment_is_used(receiver: WebhookReceiver, monkeypatch) -> None:
    with run_receiver() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        assert post(receiver.url) == PostResult(204)
        assert not proxy.received


def test_a_cookie_is_not_kept(receiver: WebhookReceiver) -> None:
    receiver.headers = {"Set-Cookie": "a=b"}
    post(receiver.url), post(receiver.url)
    assert "cookie" not in receiver.received[1].headers


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254", "169.254.170.2", "fe80::1", "fe80::1%lo", "fd00:ec2::254", "fd20:ce::254", "100.100.100.200",
        "168.63.129.16", "192.0.0.192", "224.0.0.1", "ff02::1", "0.0.0.0", "::", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
    ],
)  # fmt: skip
def test_forbidden_addresses_are_refused_for_internal_webhooks_too(address: str) -> None:
    assert get_refusal_reason(ip_address(address), internal=True).endswith("addresses are never allowed.")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "100.64.0.1", "::1", "fd12::1", "::ffff:10.0.0.1", "64:ff9b::a00:1",
     "255.255.255.255", "fec0::1", "64:ff9b:1::a00:1", "::10.0.0.1", "::ffff:0:a00:1"],
)  # fmt: skip
def test_private_addresses_need_an_internal_webhook(address: str) -> None:
    assert '"Internal address" is not enabled' in get_refusal_reason(ip_address(address), internal=False)
    assert get_refusal_reason(ip_address(address), internal=True) == ""


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert get_refusal_reason(ip_address(address), internal=False) == ""


def test_a_loopback_name_is_refused_before_the_connection(receiver: WebhookReceiver) -> None:
    answer = post(f"http://localhost:{receiver.server_address[1]}/", internal=False)
    assert "localhost is" in answer.error and '"Internal address" is not enabled' in answer.error
    assert not receiver.received


def named(*answers: list[str]) -> Callable[..., list]:
    """Return a resolver with a different answer for each call."""
    left = iter(answers)
    return lambda host, port, **more: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in next(left)]


def test_a_name_with_one_forbidden_address_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", named(["1.1.1.1", "10.0.0.1"]))
    assert "rebind.example is 10.0.0.1: the address is private" in post("https://rebind.example/", internal=False).error


def test_a_name_is_resolved_once(receiver: WebhookReceiver, monkeypatch) -> None:
    """The connection uses the checked addresses; the second answer of the resolver is never requested."""
    monkeypatch.setattr(socket, "getaddrinfo", named(["127.0.0.1"], ["169.254.169.254"]))
    assert post(f"http://rebind.example:{receiver.server_address[1]}/") == PostResult(204)
    assert receiver.received[0].headers["host"].startswith("rebind.example:")


def test_an_unknown_name_and_a_silent_resolver_are_errors(monkeypatch) -> None:
    def unknown(*args, **more):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # a real resolver may be slow or missing
    assert post("https://nowhere.invalid/").error == "The host name nowhere.invalid is unknown."
    forever = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: forever.wait(30) or [])
    assert post("https://slow.example/", timeout=0.2).error == "No response within 0.2 s."
    forever.set()


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """Self-signed certificate of localhost and a server context that uses it."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1"))])
    unsigned = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    certificate = unsigned.add_extension(names, critical=False).sign(key, hashes.SHA256())
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return path, context


def test_an_invalid_certificate_is_refused(certified, monkeypatch) -> None:
    path, context = certified
    with run_receiver(context) as server:
        url = server.url.replace("http:", "https:")
        assert post(url).error == "Invalid certificate: self-signed certificate."
        assert not server.received
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        assert post(url) == PostResult(204)
        assert post(url.replace("127.0.0.1", "localhost")) == PostResult(204)
        monkeypatch.setattr(socket, "getaddrinfo", named(["127.0.0.1"]))
        assert "Hostname mismatch" in post(url.replace("127.0.0.1", "other.example")).error
        assert len(server.received) == 2


def test_plain_http_from_an_https_url_is_an_error(receiver: WebhookReceiver) -> None:
    assert post(receiver.url.replace("http:", "https:"), timeout=5).status is None  # the server may wait for the end of a line
