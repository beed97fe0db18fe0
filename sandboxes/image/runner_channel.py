"""Channel of the exec runner to the gateway: requests arrive by a long poll in place of the vendor's exec.

    runner_channel.py DIRECTORY

DIRECTORY contains runner.py, and gateway.json with the gateway's address and this sandbox's token. One process polls. A fork
serves each request, because a request may wait for its command. A result that is there at once travels with the next poll, on
the connection that is open; any other is posted by the fork. A lost request or result does no harm: the control plane repeats
the request by the vendor's exec, and the runner never starts a mark twice. Standard library only: it runs in sandboxes."""

import contextlib
import fcntl
import http.client
import json
import os
import select
import signal
import socket
import sys
import time
from urllib.parse import urlsplit

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # an isolated Python does not

import gateway_relay
import runner

POLL_TIMEOUT_SECONDS = 60.0  # the gateway answers after half of this time at the latest
INLINE_SECONDS = 0.05  # for a result that travels with the next poll
MAX_PAUSE_SECONDS = 5.0  # after failed polls
FORBIDDEN_VERBS = ("connect",)  # replaces the token, which the gateway must not be able to


class Refused(Exception):
    """The gateway does not accept the poll."""


def main(directory):
    lock = os.open(os.path.join(directory, "channel.lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another one runs
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies of the forks
    pause = 0.1
    while True:
        started = time.monotonic()
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException, Refused):
            _poll(directory, lock)
        pause = 0.1 if time.monotonic() - started > MAX_PAUSE_SECONDS else min(2 * pause, MAX_PAUSE_SECONDS)
        time.sleep(pause)


def _poll(directory, lock):
    """Poll on one connection until it fails."""
    access = gateway_relay.read_access(directory)
    connection, results = gateway_relay.open_connection(urlsplit(access["url"])), []
    try:
        while True:
            response = _post(connection, access, "/runner/next", {"results": results})
            results = []
            for request in json.loads(response)["requests"]:
                results += _serve(directory, connection, lock, request)
    finally:
        connection.close()


def _post(connection, access, path, content):
    headers = {"Authorization": f"Bearer {access['token']}", "Content-Type": "application/json"}
    connection.timeout = POLL_TIMEOUT_SECONDS
    connection.request("POST", urlsplit(access["url"]).path.rstrip("/") + path, json.dumps(content).encode(), headers)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise Refused(response.status)
    return body


def _serve(directory, connection, lock, request):
    """Serve one request in a fork. Return a list with its result if that is there at once."""
    near, far = socket.socketpair()
    if os.fork() == 0:
        try:
            near.close()
            connection.sock.close()
            os.close(lock)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the runner waits for its own children
            _answer(directory, far, request)
        finally:
            os._exit(0)
    far.close()
    with near:
        if not select.select([near], [], [], INLINE_SECONDS)[0]:
            return []
        content = b""
        while chunk := near.recv(1 << 16):
            content += chunk
        if not content:
            return []
        near.sendall(b"k")
        return [json.loads(content)]


def _answer(directory, far, request):
    call = request["call"]
    if call["verb"] in FORBIDDEN_VERBS:
        return
    result = {"id": request["id"], "response": runner.VERBS[call["verb"]](call)}
    with contextlib.suppress(OSError):
        far.sendall(json.dumps(result).encode())
        far.shutdown(socket.SHUT_WR)
        if far.recv(1):
            return
    access = gateway_relay.read_access(directory)
    connection = gateway_relay.open_connection(urlsplit(access["url"]))
    _post(connection, access, "/runner/result", {"results": [result]})


if __name__ == "__main__":
    main(sys.argv[1])
