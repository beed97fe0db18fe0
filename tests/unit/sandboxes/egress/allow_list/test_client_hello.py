"""Parser of the ClientHello, with hellos of OpenSSL and hostile bytes."""

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.egress.allow_list.client_hello import MAX_BUFFER_BYTES, ClientHello, InvalidHello, parse_client_hello


def build_hello(server_name: str | None) -> bytes:
    """Return the first flight of OpenSSL."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = context.wrap_bio(incoming, outgoing, server_hostname=server_name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def split_into_records(hello: bytes, size: int) -> bytes:
    message = hello[5:]
    parts = [message[start : start + size] for start in range(0, len(message), size)]
    return b"".join(hello[:3] + len(part).to_bytes(2) + part for part in parts)


def build_raw_hello(*extensions: tuple[int, bytes]) -> bytes:
    encoded = b"".join(kind.to_bytes(2) + len(content).to_bytes(2) + content for kind, content in extensions)
    body = b"\x03\x03" + bytes(32) + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00" + len(encoded).to_bytes(2) + encoded
    message = b"\x01" + len(body).to_bytes(3) + body
    return b"\x16\x03\x01" + len(message).to_bytes(2) + message


def build_name_extension(*names: bytes, kind: int = 0) -> tuple[int, bytes]:
    listed = b"".join(kind.to_bytes(1) + len(name).to_bytes(2) + name for name in names)
    return 0, len(listed).to_bytes(2) + listed


def test_the_server_name_of_openssl_is_read_in_lower_case() -> None:
    assert parse_client_hello(build_hello("Files.Example.ORG")) == ClientHello("files.example.org", False)
    assert parse_client_hello(build_hello(None)) == ClientHello("", False)


@given(st.integers(1, 400))
def test_a_hello_split_into_records_is_the_same_hello(size: int) -> None:
    hello = build_hello("example.org")
    records = split_into_records(hello, size)
    if len(records) <= MAX_BUFFER_BYTES:
        assert parse_client_hello(records) == ClientHello("example.org", False)


@given(st.integers(0, 200))
def test_a_truncated_hello_needs_more_bytes(size: int) -> None:
    assert parse_client_hello(build_hello("example.org")[:size]) is None


@given(st.binary(max_size=400))
def test_bytes_after_the_hello_do_not_change_it(more: bytes) -> None:
    assert parse_client_hello(build_hello("example.org") + more) == ClientHello("example.org", False)


@given(st.binary(max_size=600))
def test_arbitrary_bytes_are_a_hello_or_refused(content: bytes) -> None:
    for received in (content, b"\x16\x03\x01" + len(content).to_bytes(2) + content):
        try:
            found = parse_client_hello(received)
        except InvalidHello:
            continue
        assert found is None or isinstance(found, ClientHello)


@given(st.data())
def test_a_changed_hello_is_parsed_or_refused(data: st.DataObject) -> None:
    hello = bytearray(build_hello("example.org"))
    position = data.draw(st.integers(0, len(hello) - 1))
    hello[position] = data.draw(st.integers(0, 255))
    try:
        found = parse_client_hello(bytes(hello))
    except InvalidHello:
        return
    assert found is None or isinstance(found, ClientHello)


@pytest.mark.parametrize(
    "hello",
    [
        build_raw_hello(build_name_extension(b"a.org"), build_name_extension(b"b.org")),
        build_raw_hello(build_name_extension(b"a.org", b"b.org")),
        build_raw_hello(build_name_extension(b"a.org", kind=1)),
        build_raw_hello(build_name_extension("ä.org".encode())),
        build_raw_hello((0, b"\x00\x09\x00\x00\x05a.org")),
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
    ],
    ids=["two extensions", "two names", "other kind", "not ascii", "wrong length", "http", "empty record", "long record",
         "server hello"],
)  # fmt: skip
def test_an_ambiguous_or_invalid_hello_is_refused(hello: bytes) -> None:
    with pytest.raises(InvalidHello):
        parse_client_hello(hello)


def test_an_encrypted_hello_is_recognized() -> None:
    hello = parse_client_hello(build_raw_hello(build_name_extension(b"a.org"), (0xFE0D, b"\x00")))
    assert hello == ClientHello("a.org", True)
