"""Wire protocol between the control plane and the agent in a sandbox (sandboxes/image/agent/main.py).

The agent opens a connection to the gateway (gateway.py), over which the processes of the control plane send their requests
(client.py). A frame is a request id and the sizes of head and body (three big-endian 32-bit integers), a
JSON object and raw bytes. The agent's first frame has the id 0 and states the protocol, its version and `boot`, an id that a
restart of the agent changes. From then on the control plane sends requests, and the agent sends exactly one response to each.

A client of the gateway first sends a frame with the id 0 and the fields `sandbox` (id of a container) and `wait` (seconds). It
receives the greeting of that sandbox's agent, or a frame with the id 0 and the field `error`, after which the connection ends.
A frame with the id 0 and the field `violation` makes the gateway end the agent's session. The connection also ends with the
session.

| verb | fields of the request | response |
|---|---|---|
| ping | | boot |
| exec | run, boot, timeout, wait (s), cap (bytes per stream), command_bytes; body: command as JSON, stdin | state of the run |
| wait | run, wait (s) | state of the run |
| read | run, stream, offset, wait (s), limit | state of the run, offset, more; body: output from `offset`, at most 256 KiB |
| write | run, offset, last, wait (s); body: stdin from `offset` | state of the run, written (bytes of stdin received) |
| signal | run, signal (number) | state of the run |
| resize | run, rows, columns | state of the run |
| ack | run | |
| kill | run, forget | state of the run, once all processes of it and of its parts, `run/part`, are gone |
| list | runs (ids; all if absent) | body: exit codes of the known runs as JSON, null while running |
| stats | | cpu_micros, memory_bytes, processes: current usage of the sandbox, as far as its cgroup is visible |

A command is `{"argv": …, "env": …, "cwd": …}`, with `"terminal": [rows, columns]` for one with a terminal of its own, or
`{"words": …}`, the command line of a file operation (image/files.py) or `["connect", PORT]`, a connection to a TCP port of the
sandbox's loopback interface with stdin and stdout as its two directions (image/agent/ports.py). Further fields of exec: `keep`,
the output that is kept: `head`, the first `cap` bytes per stream, until `ack`; `stream`, all that the client has not read yet,
while the command waits for the client; `tail`, the last bytes of both streams together, without an end by `ack`. `open`: stdin
follows by `write`. `idle`: seconds without a request for the run, after which the run ends. `digest` (also of wait): a
directory; the response to an ended run has its digest, that of sandboxes/state/changes.py, if the directory is small. The
result of a run killed with `forget` is not retained; any other is, since its response may be lost.
A state is `running`, `ended`, `busy` (nothing was started), `acknowledged` or `unknown`. `stdout` and `stderr` of a running or
ended run are pairs of the offset after the last kept byte and the bytes dropped after it. `oom` of an ended run: a process was
killed for lack of memory, as far as the agent can tell. The control plane requests output
by offset, so a slow reader delays no other request and no window is needed. Nothing that the agent sends is trusted: any
violation ends the connection."""

import json
import re
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

VERSION = 2
OLDEST_VERSION = 2  # spoken. From the next version on it is the one before VERSION, whose agents live on after an upgrade
PROTOCOL = "leasehold-agent"
HEADER = struct.Struct(">III")
MAX_HEAD_BYTES = 4 << 10
MAX_BODY_BYTES = 256 << 10
MAX_REQUEST_HEAD_BYTES = 8 << 10  # as in image/agent/connection.py
MAX_REQUEST_BODY_BYTES = 4 << 20  # as in image/agent/connection.py: command and stdin
MAX_BOOT_CHARACTERS = 64
MAX_VERSION = 1 << 16
MAX_AGE_SECONDS = 1 << 31
_DIGEST_PATTERN = re.compile(r"([0-9a-f]{64})?")
STATES = ("running", "ended", "busy", "acknowledged", "unknown")


class ProtocolError(Exception):
    """The agent violated the protocol. Its connection is closed."""


class UnsupportedVersion(ProtocolError):
    """The agent is that of an older or newer version of Leasehold. `version` is that of its protocol."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"its agent is of another version of Leasehold (protocol {version}, not {OLDEST_VERSION} to {VERSION}), "
            "and is replaced when the sandbox sleeps and wakes"
        )
        self.version = version


class TerminalSize(NamedTuple):
    """Size of a terminal, each from 1 to 1000 (image/agent/processes.py)."""

    rows: int
    columns: int


class RawFrame(NamedTuple):
    """One message, with its head as JSON."""

    request_id: int
    head: bytes
    body: bytes

    def encode(self, request_id: int) -> bytes:
        """Encode the message with another request id."""
        return HEADER.pack(request_id, len(self.head), len(self.body)) + self.head + self.body

    def parse(self) -> "Frame":
        """Parse the head. Raise ProtocolError."""
        return Frame(self.request_id, _parse_head(self.head), self.body)


class Frame(NamedTuple):
    """One message."""

    request_id: int
    head: dict[str, Any]
    body: bytes


class RunState(NamedTuple):
    """State of a run as reported by the agent, checked for types and ranges only."""

    state: str
    exit_code: int | None = None
    timed_out: bool = False
    retained: tuple[int, int] = (0, 0)  # bytes of stdout and stderr
    dropped: tuple[int, int] = (0, 0)  # bytes of stdout and stderr after the retained ones
    inline: bool = False  # the body of the response has stdout and stderr in full
    offset: int = 0  # of the output in the body of a response to `read`
    more: bool = False  # further output can be read at once
    written: int = 0  # bytes of stdin received
    digest: str = ""  # of the directory named in the request
    oom: bool = False  # a process of the run was killed for lack of memory
    age: float | None = None  # seconds since the end. None: running, or an agent that does not state it


def encode_frame(request_id: int, head: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Encode one request. Raise ValueError above the limits of the agent."""
    content = json.dumps(head, separators=(",", ":")).encode()
    if len(content) > MAX_REQUEST_HEAD_BYTES or len(body) > MAX_REQUEST_BODY_BYTES:
        raise ValueError(f"The request has {len(content)} + {len(body)} bytes.")
    return HEADER.pack(request_id, len(content), len(body)) + content + body


class FrameReader:
    """Parser of a byte stream into frames. Holds at most one incomplete frame and the last chunk."""

    def __init__(self, *, max_head_bytes: int = MAX_HEAD_BYTES, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._buffer, self._max_head_bytes, self._max_body_bytes = bytearray(), max_head_bytes, max_body_bytes

    def feed(self, chunk: bytes) -> list[RawFrame]:
        """Return the frames completed by `chunk`. Raise ProtocolError for a frame above the limits."""
        self._buffer += chunk
        frames, offset = [], 0
        while len(self._buffer) - offset >= HEADER.size:
            request_id, head_size, body_size = HEADER.unpack_from(self._buffer, offset)
            if head_size > self._max_head_bytes or body_size > self._max_body_bytes:
                raise ProtocolError(f"frame of {head_size} + {body_size} bytes")
            body_start = offset + HEADER.size + head_size
            if len(self._buffer) < body_start + body_size:
                break
            head_start, offset = offset + HEADER.size, body_start + body_size
            with memoryview(self._buffer) as view:
                frames.append(RawFrame(request_id, bytes(view[head_start:body_start]), bytes(view[body_start:offset])))
        del self._buffer[:offset]
        return frames


def parse_hello(frame: Frame) -> str:
    """Return the agent's boot id from its first frame. Raise ProtocolError, UnsupportedVersion."""
    head = frame.head
    boot = head.get("boot")
    version = head.get("version")
    if frame.request_id != 0 or head.get("protocol") != PROTOCOL or not isinstance(version, int):
        raise ProtocolError("no greeting")
    if abs(version) > MAX_VERSION:
        raise ProtocolError("invalid version")
    if not is_spoken(version):
        raise UnsupportedVersion(version)
    if not isinstance(boot, str) or not 16 <= len(boot) <= MAX_BOOT_CHARACTERS:
        raise ProtocolError("invalid boot id")
    return boot


def is_spoken(version: int) -> bool:
    """Return whether agents with this version of the protocol are spoken with."""
    return OLDEST_VERSION <= version <= VERSION


def parse_state(run_id: str, frame: Frame) -> RunState:
    """Return the state of a run from a response. Raise ProtocolError if it is about another run, or invalid."""
    head = frame.head
    if head.get("run") != run_id:
        raise ProtocolError("response about another run")
    state = head.get("state")
    if state not in STATES:
        raise ProtocolError("invalid state")
    if state not in ("running", "ended"):
        return RunState(state)
    code, timed_out, inline = head.get("exit_code"), head.get("timed_out"), head.get("inline", False)
    oom = head.get("oom", False)
    more, offset, written = head.get("more", False), head.get("offset", 0), head.get("written", 0)
    if not type(timed_out) is type(inline) is type(more) is type(oom) is bool:
        raise ProtocolError("invalid flags")
    _parse_sizes([offset, written])
    if (code is None) != (state == "running") or not (code is None or (type(code) is int and 0 <= code <= 255)):
        raise ProtocolError("invalid exit code")
    (stdout, stdout_dropped), (stderr, stderr_dropped) = _parse_sizes(head.get("stdout")), _parse_sizes(head.get("stderr"))
    if inline and (state != "ended" or len(frame.body) != stdout + stderr):
        raise ProtocolError("invalid output")
    digest = head.get("digest", "")
    if not isinstance(digest, str) or not _DIGEST_PATTERN.fullmatch(digest):
        raise ProtocolError("invalid digest")
    age = head.get("age")
    if age is not None and not (state == "ended" and type(age) in (int, float) and 0 <= age <= MAX_AGE_SECONDS):
        raise ProtocolError("invalid age")
    retained, dropped = (stdout, stderr), (stdout_dropped, stderr_dropped)
    return RunState(state, code, timed_out, retained, dropped, inline, offset, more, written, digest, oom, age)


def _parse_sizes(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and 0 <= size < 1 << 53 for size in value):
        raise ProtocolError("invalid sizes")
    return value[0], value[1]


def _parse_head(content: bytes) -> dict[str, Any]:
    try:
        head = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("head is no JSON") from error
    if not isinstance(head, dict):
        raise ProtocolError("head is no object")
    return head
