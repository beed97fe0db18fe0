"""Relay of model calls in a remote sandbox: plain HTTP on a port of the loopback, to the gateway of the control plane.

    gateway_relay.py DIRECTORY

DIRECTORY contains gateway.json with the address of the gateway and the token of this sandbox, which only the sandbox's user can
read. Programs in the sandbox need neither: they call the port, which is written to gateway.port, and the relay adds the token.
Responses are passed on while they arrive. Standard library only: this runs inside sandboxes."""

import fcntl
import http.client
import json
import os
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PREFERRED_PORT = 4010
TIMEOUT_SECONDS = 600.0
CHUNK_BYTES = 1 << 16
MAX_BODY_BYTES = 64 << 20
HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "upgrade", "te", "trailer"}
TOKEN_HEADERS = {"authorization", "x-api-key"}


class RelayHandler(BaseHTTPRequestHandler):
    """Forwards one request, with the token in place of any credentials."""

    protocol_version = "HTTP/1.1"

    def relay(self):
        try:
            size = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            size = -1
        if not 0 <= size <= MAX_BODY_BYTES or self.headers.get("Transfer-Encoding"):
            self._fail(411, "A request needs a Content-Length of at most 64 MiB.")
            return
        body = self.rfile.read(size)
        access = read_access(self.server.directory)
        target = urlsplit(access["url"])
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS | TOKEN_HEADERS}
        headers["Authorization"] = f"Bearer {access['token']}"
        try:
            connection = open_connection(target)
            connection.request(self.command, target.path.rstrip("/") + self.path, body, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._fail(502, f"The gateway cannot be reached: {type(error).__name__}: {error}")
            return
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in HOP_HEADERS:
                self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            while chunk := response.read1(CHUNK_BYTES):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.write(b"0\r\n\r\n")
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # the client sees an incomplete body
        finally:
            connection.close()

    do_GET = do_POST = do_PUT = do_DELETE = relay

    def _fail(self, status, message):
        content = json.dumps({"error": {"type": "gateway_error", "message": message}}).encode()
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args):
        return


class RelayServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    directory = ""


def open_connection(target):
    if target.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(target.hostname, target.port or 443, timeout=TIMEOUT_SECONDS, context=context)
    return http.client.HTTPConnection(target.hostname, target.port or 80, timeout=TIMEOUT_SECONDS)


def read_access(directory):
    """Read address and token, for each request: a token is replaced without a restart of the relay."""
    with open(os.path.join(directory, "gateway.json")) as file:
        return json.load(file)


def main(directory):
    lock = os.open(os.path.join(directory, "gateway.lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another relay runs
    try:
        server = RelayServer(("127.0.0.1", PREFERRED_PORT), RelayHandler)
    except OSError:  # in use
        server = RelayServer(("127.0.0.1", 0), RelayHandler)
    server.directory = directory
    path = os.path.join(directory, "gateway.port")
    with open(f"{path}.tmp", "w") as file:
        file.write(str(server.server_address[1]))
    os.rename(f"{path}.tmp", path)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
