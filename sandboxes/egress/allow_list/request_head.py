"""Parser of the request heads that a forward proxy accepts (RFC 9112): CONNECT, and http URLs in absolute form.

The sandbox and the upstream must not read two different requests from the same bytes: h11 parses the head, and the upstream
gets one that is built from the result. A head has CRLF line ends, no folded lines and no Transfer-Encoding."""

import re
from dataclasses import dataclass

import h11

MAX_HEAD_BYTES = 16 << 10
FORWARDED_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND")  # TRACE answers with the request
READING_METHODS = ("GET", "HEAD")
GIT_DOWNLOAD_PATH = re.compile(r"[^?#]*/git-upload-pack")  # of the POST request by which git clones and fetches
TARGET_PATTERN = re.compile(r"(?P<host>[A-Za-z0-9._-]{1,253}):(?P<port>[0-9]{1,5})")
URL_PATTERN = re.compile(r"http://(?P<host>[A-Za-z0-9._-]{1,253})(?::(?P<port>[0-9]{1,5}))?(?P<path>/[\x21-\x7e]*)?", re.I)
NO_LINE_END = re.compile(rb"(?<!\r)\n|\r(?!\n)|\r\n[ \t]")  # a bare CR or LF, and a folded line
# Headers of one connection (RFC 9110, section 7.6.1), and the host, which follows from the checked name.
DROPPED_HEADERS = {
    "connection", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
    "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip


class InvalidRequest(Exception):
    """The head is malformed or asks for something that the proxy does not forward."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


@dataclass(frozen=True)
class RequestHead:
    """Parsed request. `path` is None for CONNECT."""

    method: str
    host: str  # lower-case
    port: int
    path: str | None = None
    headers: tuple[tuple[str, str], ...] = ()  # to forward
    content_length: int = 0
    expects_continue: bool = False

    @property
    def only_reads(self) -> bool:
        """Return whether the request is one by which programs download, git's included."""
        is_git = self.method == "POST" and GIT_DOWNLOAD_PATH.fullmatch(self.path or "") is not None
        return self.method in READING_METHODS or is_git

    def encode(self, authorization: str = "") -> bytes:
        """Return the head for the upstream: one request, after which the upstream closes the connection.

        With a credential, the upstream may not compress the response, from which the credential is removed."""
        replaced = ("authorization", "accept-encoding") if authorization else ()
        headers = [(name, value) for name, value in self.headers if name.lower() not in replaced]
        headers += [("Authorization", authorization), ("Accept-Encoding", "identity")] if authorization else []
        host = self.host if self.port == 80 else f"{self.host}:{self.port}"
        lines = [f"{self.method} {self.path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers)]
        return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")


def parse_request_head(head: bytes) -> RequestHead:
    """Parse a head, which ends with an empty line. Raise InvalidRequest."""
    request = _read(head)
    method, target = request.method.decode(), request.target.decode("latin-1")
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw_items()]
    if method == "CONNECT":
        names = TARGET_PATTERN.fullmatch(target)
        if names is None:
            raise InvalidRequest(400, "CONNECT needs a target of the form HOST:PORT.")
        return RequestHead("CONNECT", _normalize_host(names["host"]), _parse_port(names["port"]))
    if method not in FORWARDED_METHODS:
        raise InvalidRequest(405, f"The proxy forwards {', '.join(FORWARDED_METHODS)} only.")
    return _parse_absolute_form(method, target, headers)


def _read(head: bytes) -> h11.Request:
    """Return the only request in these bytes. Raise InvalidRequest."""
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    try:
        if NO_LINE_END.search(head):
            raise InvalidRequest(400, "Malformed line end.")
        parser.receive_data(head)
        request = parser.next_event()
    except h11.RemoteProtocolError as error:
        raise InvalidRequest(400, f"Malformed request: {error}.") from error
    if not isinstance(request, h11.Request) or request.http_version not in (b"1.0", b"1.1") or parser.trailing_data[0]:
        raise InvalidRequest(400, "Malformed request.")
    return request


def _parse_absolute_form(method: str, target: str, headers: list[tuple[str, str]]) -> RequestHead:
    url = URL_PATTERN.fullmatch(target.partition("#")[0])
    if url is None:
        raise InvalidRequest(400, "This is an HTTP proxy: send CONNECT, or a request with a complete http:// URL.")
    lengths = [value.strip() for name, value in headers if name.lower() == "content-length"]
    if any(name.lower() == "transfer-encoding" for name, _ in headers):
        raise InvalidRequest(411, "A request body needs a Content-Length here. Use https for others.")
    if len(lengths) > 1 or not all(re.fullmatch(r"[0-9]{1,12}", length) for length in lengths):
        raise InvalidRequest(400, "Invalid Content-Length.")
    connection_options = {
        option.strip().lower() for name, value in headers if name.lower() == "connection" for option in value.split(",")
    }
    forwarded = tuple(
        (name, value)
        for name, value in headers
        if name.lower() not in DROPPED_HEADERS
        and "_" not in name  # some servers read Content_Length as Content-Length
        and (name.lower() not in connection_options or name.lower() == "content-length")
    )
    return RequestHead(
        method, _normalize_host(url["host"]), _parse_port(url["port"] or "80"), url["path"] or "/", forwarded,
        int(lengths[0]) if lengths else 0,
        any(name.lower() == "expect" and value.strip().lower() == "100-continue" for name, value in headers),
    )  # fmt: skip


def _normalize_host(host: str) -> str:
    return host.lower().removesuffix(".")


def _parse_port(port: str) -> int:
    if not 0 < int(port) < 65536:
        raise InvalidRequest(400, "Invalid port.")
    return int(port)
