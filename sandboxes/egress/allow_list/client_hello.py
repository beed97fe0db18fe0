"""Parser of the TLS ClientHello (RFC 8446, section 4.1.2; server_name: RFC 6066, section 3). The input is untrusted."""

from dataclasses import dataclass

HANDSHAKE_RECORD, CLIENT_HELLO = 22, 1
RECORD_HEADER_BYTES, HANDSHAKE_HEADER_BYTES = 5, 4
MAX_RECORD_BYTES = 1 << 14
MAX_HELLO_BYTES = 16 << 10  # of the message; post-quantum key shares need about 2 KiB
MAX_BUFFER_BYTES = MAX_HELLO_BYTES + 4096  # with the headers of its records
SERVER_NAME_EXTENSION, ENCRYPTED_HELLO_EXTENSION, HOST_NAME_TYPE = 0, 0xFE0D, 0


class InvalidHello(Exception):
    """The bytes are not a ClientHello."""


@dataclass(frozen=True)
class ClientHello:
    """Fields of a ClientHello that decide whether a connection is forwarded."""

    server_name: str  # lower-case; "" if the client stated none
    is_encrypted: bool  # has an encrypted ClientHello, whose server name is hidden


class _Reader:
    """Cursor over length-prefixed fields. Raise InvalidHello beyond the end."""

    def __init__(self, content: bytes) -> None:
        self._content, self._offset = content, 0

    @property
    def has_more(self) -> bool:
        return self._offset < len(self._content)

    def read(self, size: int) -> bytes:
        end = self._offset + size
        if end > len(self._content):
            raise InvalidHello("truncated")
        content, self._offset = self._content[self._offset : end], end
        return content

    def read_number(self, size: int) -> int:
        return int.from_bytes(self.read(size))

    def read_vector(self, size_bytes: int) -> bytes:
        return self.read(self.read_number(size_bytes))


def parse_client_hello(received: bytes) -> ClientHello | None:
    """Parse the first bytes of a TLS connection. Return None if more bytes are needed. Raise InvalidHello."""
    message = _join_records(received)
    if len(message) < HANDSHAKE_HEADER_BYTES:
        return None
    size = int.from_bytes(message[1:HANDSHAKE_HEADER_BYTES])
    if message[0] != CLIENT_HELLO or size > MAX_HELLO_BYTES:
        raise InvalidHello("not a ClientHello")
    if len(message) < HANDSHAKE_HEADER_BYTES + size:
        return None
    return _parse_body(message[HANDSHAKE_HEADER_BYTES : HANDSHAKE_HEADER_BYTES + size])


def _join_records(received: bytes) -> bytes:
    """Return the payload of the handshake records, as far as received. A hello may be split over several records."""
    if len(received) > MAX_BUFFER_BYTES:
        raise InvalidHello("too large")
    message, offset = bytearray(), 0
    while offset < len(received):
        header = received[offset : offset + RECORD_HEADER_BYTES]
        if header[0] != HANDSHAKE_RECORD or (len(header) > 1 and header[1] != 3):
            raise InvalidHello("not a TLS handshake")
        if len(header) < RECORD_HEADER_BYTES:
            break
        size = int.from_bytes(header[3:])
        if not 0 < size <= MAX_RECORD_BYTES:
            raise InvalidHello("record of invalid size")
        offset += RECORD_HEADER_BYTES
        message += received[offset : offset + size]
        offset += size
        if len(message) >= HANDSHAKE_HEADER_BYTES:
            end = HANDSHAKE_HEADER_BYTES + int.from_bytes(message[1:HANDSHAKE_HEADER_BYTES])
            if len(message) >= end:
                break
    return bytes(message)


def _parse_body(body: bytes) -> ClientHello:
    reader = _Reader(body)
    reader.read(2 + 32)  # legacy_version, random
    reader.read_vector(1)  # legacy_session_id
    reader.read_vector(2)  # cipher_suites
    reader.read_vector(1)  # legacy_compression_methods
    extensions = _Reader(reader.read_vector(2) if reader.has_more else b"")
    server_name, seen = "", set[int]()
    while extensions.has_more:
        kind, content = extensions.read_number(2), extensions.read_vector(2)
        if kind in seen:  # the upstream might use the other one
            raise InvalidHello("repeated extension")
        seen.add(kind)
        if kind == SERVER_NAME_EXTENSION:
            server_name = _parse_server_name(content)
    if reader.has_more:
        raise InvalidHello("bytes after the extensions")
    return ClientHello(server_name, ENCRYPTED_HELLO_EXTENSION in seen)


def _parse_server_name(content: bytes) -> str:
    outer = _Reader(content)
    names = _Reader(outer.read_vector(2))
    kind, name = names.read_number(1), names.read_vector(2)
    if kind != HOST_NAME_TYPE or names.has_more or outer.has_more:
        raise InvalidHello("not exactly one server name")
    try:
        return name.decode("ascii").lower()
    except UnicodeDecodeError as error:
        raise InvalidHello("server name is not ASCII") from error
