"""Request heads of the forward proxy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.egress.allow_list.request_head import InvalidRequest, parse_request_head


def test_connect_names_host_and_port() -> None:
    head = parse_request_head(b"CONNECT PyPI.org:443 HTTP/1.1\r\nHost: other.test\r\n\r\n")
    assert (head.method, head.host, head.port, head.path) == ("CONNECT", "pypi.org", 443, None)


def test_a_request_is_forwarded_with_the_checked_host_and_without_headers_of_the_connection() -> None:
    head = parse_request_head(
        b"POST http://a.test:8080/x?y=1 HTTP/1.1\r\nHost: b.test\r\nConnection: x-hop, Content-Length\r\nX-Hop: 1\r\n"
        b"Proxy-Authorization: secret\r\nAccept: */*\r\nContent-Length: 3\r\n\r\n"
    )
    assert (head.host, head.port, head.content_length) == ("a.test", 8080, 3)
    assert head.encode() == (
        b"POST /x?y=1 HTTP/1.1\r\nHost: a.test:8080\r\nAccept: */*\r\nContent-Length: 3\r\nConnection: close\r\n\r\n"
    )


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\n\r\n",  # no Host
        b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nHost: b.test\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\n\nGET http://b.test/ HTTP/1.1\r\nHost: b.test\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nX: 1\rY: 2\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nX: 1\r\n\tfolded\r\n\r\n",
        b"GET https://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET http://user@a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET http://a.test/ HTTP/2\r\nHost: a.test\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nX: 1\n\tY: 2\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nX : 1\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n folded\r\n\r\n",
        b"POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nContent-Length: +1\r\n\r\n",
        b"CONNECT a.test HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"CONNECT a.test:0 HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"CONNECT [::1]:443 HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"CONNECT a.test:99999 HTTP/1.1\r\nHost: a.test\r\n\r\n",
    ],
)
def test_a_malformed_or_ambiguous_head_is_refused(head: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_request_head(head)


@given(st.binary(max_size=300))
def test_an_encoded_head_has_one_request(content: bytes) -> None:
    """Nothing that the sandbox writes into a header ends the head of the upstream's request."""
    try:
        head = parse_request_head(b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nX: " + content + b"\r\n\r\n")
    except InvalidRequest:
        return
    assert head.encode().count(b"\r\n\r\n") == 1
    assert head.encode().endswith(b"\r\n\r\n")


@pytest.mark.parametrize("method", ["TRACE", "TRACK", "DEBUG", "SEARCH", "get"])
def test_method_outside_of_the_list_is_refused(method: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_request_head(f"{method} http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n".encode())
    assert refused.value.status == 405


def test_header_names_with_underscores_are_dropped() -> None:
    head = parse_request_head(
        b"POST http://a.test/ HTTP/1.1\r\nHost: a.test\r\nContent_Length: 9\r\nTransfer_Encoding: chunked\r\nX-A: 1\r\n"
        b"Content-Length: 1\r\n\r\n"
    )
    assert (head.headers, head.content_length) == ((("X-A", "1"), ("Content-Length", "1")), 1)


@pytest.mark.parametrize(
    ("request_line", "only_reads"),
    [
        ("GET /simple/", True), ("HEAD /simple/", True), ("POST /a/b.git/git-upload-pack", True),
        ("POST /a/b.git/git-receive-pack", False), ("POST /x?y=/git-upload-pack", False), ("POST /", False), ("PUT /a", False),
        ("PATCH /a", False), ("DELETE /a", False), ("OPTIONS /a", False), ("PROPFIND /a", False),
    ],
)  # fmt: skip
def test_downloads_are_reads_and_gits_fetch(request_line: str, only_reads: bool) -> None:
    method, path = request_line.split()
    head = parse_request_head(f"{method} http://a.test{path} HTTP/1.1\r\nHost: a.test\r\n\r\n".encode())
    assert head.only_reads is only_reads


def test_credential_replaces_that_of_the_sandbox_and_forbids_compression() -> None:
    head = parse_request_head(
        b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nAuthorization: mine\r\nAccept-Encoding: gzip, br\r\n\r\n"
    )
    assert head.encode("Bearer theirs") == (
        b"GET / HTTP/1.1\r\nHost: a.test\r\nAuthorization: Bearer theirs\r\nAccept-Encoding: identity\r\n"
        b"Connection: close\r\n\r\n"
    )
