"""Parser of the request heads that a forward proxy accepts (RFC 9112): CONNECT, and http URLs in absolute form.

Strict, because the sandbox and the upstream must not read two different requests from the same bytes: a head has CRLF line
ends, no folded lines, one Content-Length and no Transfer-Encoding."""

import re
from dataclasses import dataclass

MAX_HEAD_BYTES = 16 << 10
TARGET_PATTERN = re.compile(r"(?P<host>[A-Za-z0-9._-]{1,253}):(?P<port>[0-9]{1,5})")
URL_PATTERN = re.compile(r"http://(?P<host>[A-Za-z0-9._-]{1,253})(?::(?P<port>[0-9]{1,5}))?(?P<path>/[\x21-\x7e]*)?", re.I)
LINE_PATTERN = re.compile(r"(?P<method>[A-Z]{1,16}) (?P<target>[\x21-\x7e]+) HTTP/1\.[01]")
HEADER_PATTERN = re.compile(r"(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(?P<value>[\x20-\x7e\x80-\xff\t]*)")
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

    def encode(self, authorization: str = "") -> bytes:
        """Return the head for the upstream: one request, after which the upstream closes the connection."""
        headers = [(name, value) for name, value in self.headers if not (authorization and name.lower() == "authorization")]
        headers += [("Authorization", authorization)] if authorization else []
        host = self.host if self.port == 80 else f"{self.host}:{self.port}"
        lines = [f"{self.method} {self.path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers)]
        return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")


def parse_request_head(head: bytes) -> RequestHead:
    """Parse a head, which ends with an empty line. Raise InvalidRequest."""
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    line = LINE_PATTERN.fullmatch(first)
    if line is None:
        raise InvalidRequest(400, "Malformed request line.")
    headers = [(match["name"], match["value"]) for each in lines if (match := HEADER_PATTERN.fullmatch(each))]
    if len(headers) != len(lines):
        raise InvalidRequest(400, "Malformed header.")
    if line["method"] == "CONNECT":
        target = TARGET_PATTERN.fullmatch(line["target"])
        if target is None:
            raise InvalidRequest(400, "CONNECT needs a target of the form HOST:PORT.")
        return RequestHead("CONNECT", _normalize_host(target["host"]), _parse_port(target["port"]))
    return _parse_absolute_form(line["method"], line["target"], headers)


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
        if name.lower() not in DROPPED_HEADERS and (name.lower() not in connection_options or name.lower() == "content-length")
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
