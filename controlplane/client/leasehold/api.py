"""Operations of the HTTP API on the sandbox of one lease."""

from __future__ import annotations

import base64
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Literal, cast
from urllib.parse import quote

from . import schemas
from .errors import ConfigurationError
from .events import Event
from .exchange import Operation, Request, Response, RetryPolicy, build_post, follow, send
from .results import AgentEvent, ExecResult, OutputPart, RunResult, parse_exec_result, parse_exit

SHELL = ("sh", "-c")
EXACT = {"encoding": "base64"}
ROOTS = ("workspace", "data")
Command = str | Sequence[str]


def build_argv(command: Command) -> list[str]:
    """Return the arguments of a command. A string is a script of the shell."""
    return [*SHELL, command] if isinstance(command, str) else [*command]


def drop_none(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None: the server has defaults for the others."""
    return {name: value for name, value in fields.items() if value is not None}


def split_path(path: str) -> tuple[str, str]:
    """Return the root, workspace or data, and the path below the root. A relative path is one below /workspace.

    Raise ValueError for a path outside of both. `.` and `..` are resolved here, since they have another meaning in a URL."""
    full = posixpath.normpath(posixpath.join("/workspace", path))
    for root in ROOTS:
        if full == f"/{root}" or full.startswith(f"/{root}/"):
            return root, full[len(root) + 2 :]
    raise ValueError(f"{path!r} is not below /workspace or /data.")


def find_agent(policy: RetryPolicy) -> Operation[str]:
    """Return the only agent of the API key."""
    page: schemas.PageOfAgent = (yield from send(Request("GET", "/agents", query={"limit": "2"}), policy)).json()
    if len(page["results"]) != 1:
        raise ConfigurationError("The API key has several agents or none. Pass `agent`, or set LEASEHOLD_AGENT.")
    return page["results"][0]["did"]


def join(environment: str, body: schemas.JoinRequest, policy: RetryPolicy) -> Operation[schemas.Lease]:
    """Join an environment, which starts its sandbox."""
    path = f"/environments/{quote(environment, safe='')}/join"
    request = build_post(path, body, seconds=body.get("wait_seconds") or 0)
    lease: schemas.Lease = (yield from send(request, policy)).json()
    return lease


def find_leases(agent: str, environment: str, policy: RetryPolicy) -> Operation[list[schemas.Lease]]:
    """Return the active leases of an agent in an environment."""
    query = {"agent_did": agent, "environment_id": environment, "status": "active"}
    page: schemas.PageOfLease = (yield from send(Request("GET", "/leases", query=query), policy)).json()
    return page["results"]


class LeaseApi:
    """Operations on one lease."""

    def __init__(self, lease_id: str, policy: RetryPolicy) -> None:
        self._path, self._policy = f"/leases/{lease_id}", policy

    def get(self) -> Operation[schemas.Lease]:
        lease: schemas.Lease = (yield from self._send("GET", "")).json()
        return lease

    def renew(self) -> Operation[None]:
        """Extend the lease by its ttl. Without an Idempotency-Key: a repetition is harmless, and no answer is stored."""
        yield from self._send("POST", "/renew")

    def release(self) -> Operation[None]:
        """End the lease. An ended lease stays as it is."""
        yield from self._post("/release")

    def exec(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None,
        cwd: str | None,
        stdin: str | bytes,
        timeout: int | None,
        shell: str | None,
        run_id: str | None,
        check: bool,
    ) -> Operation[ExecResult]:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        body = build_exec_body(command, env, cwd, base64.b64encode(content).decode(), timeout, shell, run_id)
        options = {"query": EXACT, "seconds": timeout or 0, "is_repeatable": False}
        answer: schemas.ExecResult = (yield from self._post("/exec", body, **options)).json()
        result = parse_exec_result(answer)
        return result.check() if check else result

    def stream(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None,
        cwd: str | None,
        stdin: str,
        timeout: int | None,
        shell: str | None,
        run_id: str | None,
    ) -> Operation[RunResult]:
        """Execute a command. Emits each OutputPart."""
        body = build_exec_body(command, env, cwd, stdin, timeout, shell, run_id)
        request = build_post(f"{self._path}/exec/stream", body, seconds=timeout or 0, is_repeatable=False)
        data = yield from follow(request, self._policy, self._find_run_stream, end="exit", convert=parse_output)
        return parse_exit(data)

    def start_agent(self, prompt: str, options: Mapping[str, Any]) -> Operation[str]:
        """Start an agent CLI, and return the id of its run once its command has begun."""
        if options.get("queued"):
            raise ValueError("A queued run has no stream yet: it is a request of its own.")
        answer = yield from self._post("/agent-runs", {"prompt": prompt, **options}, is_repeatable=False)
        row: schemas.AgentRun = answer.json()
        return row["run_id"]

    def follow_agent(self, run_id: str) -> Operation[schemas.AgentRun]:
        """Read the events of an agent run from the first one. Emits each AgentEvent."""
        request = Request("GET", self._find_agent_stream(run_id))
        data = yield from follow(request, self._policy, self._find_agent_stream, end="end", convert=parse_agent_event)
        return cast(schemas.AgentRun, data)

    def interrupt_agent(self, run_id: str) -> Operation[schemas.AgentRun]:
        return cast(schemas.AgentRun, (yield from self._post(f"/agent-runs/{run_id}/interrupt")).json())

    def read_file(self, path: str) -> Operation[bytes]:
        return (yield from self._send("GET", *_locate_file(path))).body

    def write_file(self, path: str, content: str | bytes) -> Operation[None]:
        data = content.encode() if isinstance(content, str) else content
        yield from self._send("PUT", *_locate_file(path), body=data, headers={"Content-Type": "application/octet-stream"})

    def remove_file(self, path: str) -> Operation[None]:
        url, query = _locate_file(path)
        yield from send(Request("DELETE", self._path + url, query=query), self._policy, accept_missing=True)

    def list_files(self, path: str, *, deep: bool) -> Operation[list[schemas.FileEntry]]:
        root, relative = split_path(path)
        query = {"root": root, "path": relative, "deep": str(int(deep))}
        listing: schemas.FileListing = (yield from self._send("GET", "/files", query)).json()
        return listing["entries"]

    def make_directory(self, path: str) -> Operation[None]:
        root, relative = split_path(path)
        yield from self._post("/mkdir", {"root": root, "path": relative})

    def put_archive(self, root: str, archive: BinaryIO) -> Operation[None]:
        yield from self._send("PUT", "/archive", {"root": root}, body=archive, headers={"Content-Type": "application/x-tar"})

    def get_archive(self, root: str, path: str, sink: BinaryIO) -> Operation[None]:
        query = {"root": root, "path": path, "compression": "none"}
        yield from self._send("GET", "/archive", query, sink=sink)

    def start_process(self, command: Command, options: Mapping[str, Any]) -> Operation[schemas.StartedProcess]:
        body = {"argv": build_argv(command), **options}
        seconds = options.get("wait_seconds", 30)
        answer = yield from self._post("/processes", body, seconds=seconds, is_repeatable=False)
        return cast(schemas.StartedProcess, answer.json())

    def list_processes(self) -> Operation[list[schemas.Process]]:
        page: schemas.PageOfProcess = (yield from self._send("GET", "/processes", {"limit": "200"})).json()
        return page["results"]

    def get_process(self, process_id: str) -> Operation[schemas.Process]:
        return cast(schemas.Process, (yield from self._send("GET", f"/processes/{process_id}")).json())

    def read_process_log(self, process_id: str, *, start: int) -> Operation[schemas.ProcessLog]:
        answer = yield from self._send("GET", f"/processes/{process_id}/logs", {"start": str(start)})
        return cast(schemas.ProcessLog, answer.json())

    def signal_process(self, process_id: str, signal: str) -> Operation[schemas.Process]:
        answer = yield from self._post(f"/processes/{process_id}/signal", {"signal": signal}, is_repeatable=False)
        return cast(schemas.Process, answer.json())

    def kill_process(self, process_id: str) -> Operation[schemas.Process]:
        return cast(schemas.Process, (yield from self._send("DELETE", f"/processes/{process_id}")).json())

    def _send(self, method: str, path: str, query: Mapping[str, str] | None = None, **options: Any) -> Operation[Response]:
        return (yield from send(Request(method, self._path + path, query=query or {}, **options), self._policy))

    def _post(self, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> Operation[Response]:
        return (yield from send(build_post(self._path + path, body, **options), self._policy))

    def _find_run_stream(self, run_id: str) -> str:
        return f"{self._path}/runs/{run_id}/stream"

    def _find_agent_stream(self, run_id: str) -> str:
        return f"{self._path}/agent-runs/{run_id}/stream"


def build_exec_body(
    command: Command,
    env: Mapping[str, str] | None,
    cwd: str | None,
    stdin: str,
    timeout: int | None,
    shell: str | None,
    run_id: str | None,
) -> schemas.ExecRequest:
    body: schemas.ExecRequest = {"argv": build_argv(command), "stdin": stdin, "timeout_seconds": timeout, "shell": shell}
    if env is not None:
        body["env"] = dict(env)
    if cwd is not None:
        body["cwd"] = cwd
    if run_id is not None:
        body["run_id"] = run_id
    return body


def parse_output(event: Event) -> Iterator[OutputPart]:
    if event.name in ("stdout", "stderr"):
        yield OutputPart(cast(Literal["stdout", "stderr"], event.name), event.data["data"], event.data["offset"])
    elif event.name == "gap":
        yield OutputPart(event.data["stream"], "", lost_bytes=event.data["lost_bytes"])


def parse_agent_event(event: Event) -> Iterator[AgentEvent]:
    if event.name != "start":
        yield AgentEvent(event.name, event.data)


def _locate_file(path: str) -> tuple[str, dict[str, str]]:
    root, relative = split_path(path)
    return f"/files/{quote(relative)}", {"root": root}
