"""Connection to a TCP port of the sandbox's loopback interface, relayed between stdin and stdout.

Standard library only: runs in a fork of the helper."""

import _socket as socket  # without the standard module's enumerations and helpers
import _thread
import os

ADDRESSES = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
CHUNK_BYTES = 64 << 10
NOT_LISTENING = 7  # exit code, as that of curl for a refused connection


def relay(port):
    """Connect, and relay both directions until the program in the sandbox ends its direction. Return the exit code."""
    connection = _connect(port)
    if connection is None:
        os.write(2, b"no program listens on port %d\n" % port)
        return NOT_LISTENING
    _thread.start_new_thread(_send_stdin, (connection,))
    try:
        while chunk := connection.recv(CHUNK_BYTES):
            while chunk:
                chunk = chunk[os.write(1, chunk) :]
    except ConnectionError:
        pass  # as the end of the output: the client sees an incomplete response
    return 0


def _connect(port):
    for family, address in ADDRESSES:
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.connect((address, port))
        except OSError:
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    return None


def _send_stdin(connection):
    try:
        while chunk := os.read(0, CHUNK_BYTES):
            while chunk:
                chunk = chunk[connection.send(chunk) :]
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the program has closed the connection: the other direction ends, too
