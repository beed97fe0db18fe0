"""Calls of the runner in a remote sandbox through the gateway of this host, in place of the vendor's exec."""

import http.client
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESPONSE_GRACE_SECONDS = 10.0  # beyond the time that the runner waits


class NotConnected(Exception):
    """The sandbox is not connected to the gateway of this host, or has not responded. The request may have had its effect."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("gateway", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(os.fspath(self._path))


def call(path: Path, ref: str, fields: Mapping[str, Any], *, wait: float) -> dict[str, Any]:
    """Send one request of the runner through the gateway's socket, and return the response. Raise NotConnected."""
    seconds = wait + RESPONSE_GRACE_SECONDS
    connection = _UnixConnection(path, timeout=seconds + RESPONSE_GRACE_SECONDS)
    try:
        connection.request("POST", f"/call?ref={ref}&timeout={seconds}", json.dumps(fields).encode())
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise NotConnected(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise NotConnected(f"status {response.status}")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("state"), str):
        raise NotConnected("invalid response")
    return content
