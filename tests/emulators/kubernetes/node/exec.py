"""Exec over WebSocket, subprotocols v5.channel.k8s.io and v4.channel.k8s.io.

One thread moves the bytes of a session. Both sockets are non-blocking, because a command may write while its input is blocked.
A client that leaves does not end the command, as with the container runtimes of real nodes."""

import json
import select
import socket
import ssl
from contextlib import suppress

from docker import APIClient
from docker.errors import APIError
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage

STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
V4, V5 = "v4.channel.k8s.io", "v5.channel.k8s.io"
MAX_BUFFERED_BYTES = 1 << 20  # for each direction
CHUNK_BYTES = 64 << 10
FRAME_HEADER_BYTES = 8  # of the engine's stream: type, three zeros, length
CLOSE_TIMEOUT_SECONDS = 5.0


def open_engine_socket(client: APIClient, exec_id: str, *, tty: bool) -> tuple[socket.socket, bytes]:
    """Start an exec, and return its upgraded connection and the bytes that came with the head of the answer."""
    if client.base_url.startswith("http+docker"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(client.adapters["http+docker://"].socket_path)  # type: ignore[attr-defined]
    else:
        host, _, port = client.base_url.partition("://")[2].partition(":")
        connection = socket.create_connection((host, int(port)))
    body = json.dumps({"Detach": False, "Tty": tty}).encode()
    head = (
        f"POST /v{client.api_version}/exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
        f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    answer = b""
    while b"\r\n\r\n" not in answer:
        chunk = connection.recv(CHUNK_BYTES)
        if not chunk:
            raise OSError("the engine closed the connection of an exec")
        answer += chunk
    head_bytes, _, rest = answer.partition(b"\r\n\r\n")
    if b" 101 " not in head_bytes.partition(b"\r\n")[0] + b" ":
        raise OSError(f"the engine refused an exec: {rest.decode(errors='replace')}")
    return connection, rest


class Session:
    """One exec between a WebSocket and the engine."""

    def __init__(self, client: APIClient, exec_id: str, *, tty: bool, has_stdin: bool, cuts_status: bool) -> None:
        self.client, self.exec_id, self.tty, self.has_stdin, self.cuts_status = client, exec_id, tty, has_stdin, cuts_status
        self._protocol = Connection(ConnectionType.SERVER)
        self._to_client, self._to_engine, self._from_engine = bytearray(), bytearray(), bytearray()
        self._channel: int | None = None  # of the message that is being received
        self._is_input_closed = self._is_client_gone = False

    def serve(self, client: socket.socket) -> None:
        """Move bytes until the command ends or the client leaves."""
        engine, rest = open_engine_socket(self.client, self.exec_id, tty=self.tty)
        with engine:
            engine.setblocking(False)
            client.setblocking(False)
            self._receive_output(rest)
            is_output_open = True
            while is_output_open and not self._is_client_gone:
                is_output_open = self._step(client, engine)
        if self._is_client_gone:
            return
        client.settimeout(CLOSE_TIMEOUT_SECONDS)
        client.sendall(self._to_client)
        if self.cuts_status:
            client.shutdown(socket.SHUT_RDWR)
            return
        self._to_client.clear()
        self._send(STATUS, json.dumps(self._build_status()).encode())
        self._to_client += self._protocol.send(CloseConnection(1000))
        client.sendall(self._to_client)
        with suppress(OSError):
            while client.recv(CHUNK_BYTES):  # until the client has read the status and closed
                pass

    def _step(self, client: socket.socket, engine: socket.socket) -> bool:
        """Wait for one of the sockets and move what it has. Return False at the end of the output."""
        readable, writable = [], []
        if len(self._to_engine) < MAX_BUFFERED_BYTES:
            readable.append(client)
        if len(self._to_client) < MAX_BUFFERED_BYTES:
            readable.append(engine)
        if self._to_client:
            writable.append(client)
        if self._to_engine or (self._is_input_closed and self.has_stdin):
            writable.append(engine)
        has_pending = client in readable and isinstance(client, ssl.SSLSocket) and client.pending() > 0
        ready, free, _ = select.select(readable, writable, [], 0 if has_pending else None)
        if client in ready or has_pending:
            self._read_client(client)
        if engine in free:
            self._write_engine(engine)
        if client in free:
            with suppress(ssl.SSLWantWriteError, ssl.SSLWantReadError, BlockingIOError):
                del self._to_client[: client.send(self._to_client)]
        if engine in ready:
            with suppress(BlockingIOError):
                chunk = engine.recv(CHUNK_BYTES)
                if not chunk:
                    return False
                self._receive_output(chunk)
        return True

    def _read_client(self, client: socket.socket) -> None:
        try:
            chunk = client.recv(CHUNK_BYTES)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._is_client_gone = True
            return
        self._protocol.receive_data(chunk)
        for event in self._protocol.events():
            self._receive_event(event)

    def _receive_event(self, event: Event) -> None:
        if isinstance(event, BytesMessage | TextMessage):
            data = event.data.encode() if isinstance(event, TextMessage) else bytes(event.data)
            if self._channel is None and data:
                self._channel, data = data[0], data[1:]
            if self._channel == STDIN and self.has_stdin:
                self._to_engine += data
            elif self._channel == CLOSE and data[:1] == b"\0":
                self._is_input_closed = True
            elif self._channel == RESIZE and event.message_finished:
                self._resize(data)
            if event.message_finished:
                self._channel = None
        elif isinstance(event, Ping):
            self._to_client += self._protocol.send(event.response())
        elif isinstance(event, CloseConnection):
            self._is_client_gone = True

    def _resize(self, data: bytes) -> None:
        size = json.loads(data)
        with suppress(APIError):
            self.client.exec_resize(self.exec_id, size["Height"], size["Width"])

    def _write_engine(self, engine: socket.socket) -> None:
        try:
            if self._to_engine:
                del self._to_engine[: engine.send(self._to_engine)]
            if self._is_input_closed and not self._to_engine:
                self.has_stdin = False
                engine.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return
        except OSError:  # the command has closed its input or ended
            self._to_engine.clear()
            self.has_stdin = False

    def _receive_output(self, chunk: bytes) -> None:
        """Send output of the command on its channels."""
        if self.tty:
            self._send(STDOUT, chunk)
            return
        self._from_engine += chunk
        while len(self._from_engine) >= FRAME_HEADER_BYTES:
            end = FRAME_HEADER_BYTES + int.from_bytes(self._from_engine[4:FRAME_HEADER_BYTES], "big")
            if len(self._from_engine) < end:
                return
            self._send(self._from_engine[0], bytes(self._from_engine[FRAME_HEADER_BYTES:end]))
            del self._from_engine[:end]

    def _send(self, channel: int, content: bytes) -> None:
        if content:
            self._to_client += self._protocol.send(BytesMessage(bytes([channel]) + content))

    def _build_status(self) -> dict[str, object]:
        code = self.client.exec_inspect(self.exec_id)["ExitCode"]
        if code == 0:
            return {"metadata": {}, "status": "Success"}
        message = f"command terminated with non-zero exit code: exit status {code}"
        details = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
        return {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "message": message, "details": details}
