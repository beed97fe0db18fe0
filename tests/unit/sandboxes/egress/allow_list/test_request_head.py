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
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET https://a.test/ HTTP/1.1\r\n\r\n",
        b"GET http://user@a.test/ HTTP/1.1\r\n\r\n",
        b"GET http://a.test/ HTTP/2\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nX: 1\n\tY: 2\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nX : 1\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\n folded\r\n\r\n",
        b"POST http://a.test/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST http://a.test/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST http://a.test/ HTTP/1.1\r\nContent-Length: +1\r\n\r\n",
        b"CONNECT a.test HTTP/1.1\r\n\r\n",
        b"CONNECT a.test:0 HTTP/1.1\r\n\r\n",
        b"CONNECT [::1]:443 HTTP/1.1\r\n\r\n",
        b"CONNECT a.test:99999 HTTP/1.1\r\n\r\n",
    ],
)
def test_a_malformed_or_ambiguous_head_is_refused(head: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_request_head(head)


@given(st.binary(max_size=300))
def test_an_encoded_head_has_one_request(content: bytes) -> None:
    """Nothing that the sandbox writes into a header ends the head of the upstream's request."""
    try:
        head = parse_request_head(b"GET http://a.test/ HTTP/1.1\r\nX: " + content + b"\r\n\r\n")
    except InvalidRequest:
        return
    assert head.encode().count(b"\r\n\r\n") == 1
    assert head.encode().endswith(b"\r\n\r\n")
