"""HTTP API client for one sandbox: files, commands and agent runs.

    from leases.adapters.sandbox_service import SandboxService

    lease = {"agent_did": "did:web:me.example", "environment_type": "coding"}
    with SandboxService.join(url, key, "task-1", **lease) as sandbox:
        sandbox.write_file("/workspace/task.md", b"...")
        query = sandbox.run_agent("Do the task in task.md.", {"permissionMode": "acceptEdits", "maxTurns": 30})
        for message in query.stream():
            print(message["type"])
        print(query.result()["state"])

Every POST has an Idempotency-Key and is repeated under the same key while the server is unavailable. An interrupted stream is
continued after its last event."""

import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self
from urllib.parse import quote

import requests

CONNECT_TIMEOUT_SECONDS = 10.0
RESPONSE_TIMEOUT_SECONDS = 300.0  # a start, a wake, the transfer of state, in addition to the time limit of a command
STREAM_TIMEOUT_SECONDS = 60.0  # the server sends a comment at least every 15 seconds
RETRY_PERIOD_SECONDS = 120.0
DEFAULT_RETRY_SECONDS = 1.0
Message = dict[str, Any]
Observer = Callable[[Message], Message | None]  # may replace a message, or drop it by returning None


class SandboxServiceError(Exception):
    """Failure of one operation. `retryable`: the same call may succeed later. `cause`: code of the problem document.

    `provider` is that of the sandbox whose operation failed, or else "leasehold": the control plane itself."""

    def __init__(
        self, operation: str, message: str, *, retryable: bool = False, cause: str = "", provider: str = "leasehold"
    ) -> None:
        super().__init__(f"{operation}: {message}")
        self.operation, self.provider, self.message = operation, provider, message
        self.retryable, self.cause = retryable, cause


@dataclass(frozen=True)
class ExecResult:
    """Result of a command. Output is text in UTF-8; invalid bytes are replaced."""

    stdout: str
    stderr: str
    exit_code: int


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    id: str
    name: str
    data: dict[str, Any]


class ApiClient:
    """HTTP API with one key. Raises SandboxServiceError."""

    def __init__(self, url: str, key: str, *, pause: Callable[[float], object] = time.sleep) -> None:
        self._base, self._pause = f"{url.rstrip('/')}/api/v1", pause
        self._http = requests.Session()
        self._http.headers["Authorization"] = f"Bearer {key}"

    def call(self, operation: str, method: str, path: str, **options: Any) -> requests.Response:
        """Send a request, and repeat it while the server is unavailable. Return a successful response."""
        headers = {"Idempotency-Key": uuid.uuid4().hex} if method == "POST" else {}
        timeout = (CONNECT_TIMEOUT_SECONDS, options.pop("seconds", 0.0) + RESPONSE_TIMEOUT_SECONDS)
        deadline = time.monotonic() + RETRY_PERIOD_SECONDS
        while True:
            try:
                response = self._http.request(method, self._base + path, headers=headers, timeout=timeout, **options)
            except requests.RequestException as error:
                failed, pause = SandboxServiceError(operation, str(error), retryable=True), DEFAULT_RETRY_SECONDS
            else:
                if response.ok:
                    return response
                failed, pause = _parse_problem(operation, response), _parse_pause(response)
                if response.status_code != 503 and failed.cause != "idempotency_in_progress":
                    raise failed
            if time.monotonic() + pause > deadline:
                raise failed
            self._pause(pause)

    def stream(self, path: str) -> Iterator[Event]:
        """Yield the events of a stream up to `end`, also across interruptions."""
        last_id, deadline = "", time.monotonic() + RETRY_PERIOD_SECONDS
        while True:
            try:
                for event in self._read_stream(path, last_id):
                    last_id, deadline = event.id, time.monotonic() + RETRY_PERIOD_SECONDS
                    yield event
                    if event.name == "end":
                        return
            except requests.RequestException as error:
                if time.monotonic() > deadline:
                    raise SandboxServiceError("stream", str(error), retryable=True) from error
            self._pause(DEFAULT_RETRY_SECONDS)

    def _read_stream(self, path: str, last_id: str) -> Iterator[Event]:
        headers = {"Last-Event-ID": last_id} if last_id else {}
        timeout = (CONNECT_TIMEOUT_SECONDS, STREAM_TIMEOUT_SECONDS)
        with self._http.get(self._base + path, headers=headers, timeout=timeout, stream=True) as response:
            if response.status_code == 503:
                raise requests.ConnectionError("the server is unavailable")
            if not response.ok:
                raise _parse_problem("stream", response)
            yield from _parse_events(response.iter_lines())

    def close(self) -> None:
        self._http.close()


class SandboxService:
    """Sandbox of one lease. The end of a `with` block destroys it."""

    def __init__(self, client: ApiClient, lease_id: str) -> None:
        self.lease_id, self._client = lease_id, client

    @property
    def provider(self) -> str:
        """Name of the sandbox's provider, such as "docker"."""
        return str(self._read_sandbox("provider")["provider"])

    @property
    def isolated(self) -> bool:
        """True if commands can reach neither the host nor other sandboxes."""
        return bool(self._read_sandbox("isolated")["isolated"])

    def _read_sandbox(self, operation: str) -> dict[str, Any]:
        sandbox: dict[str, Any] | None = self._call(operation, "GET", "").json()["sandbox"]
        if sandbox is None:
            raise SandboxServiceError(operation, "The lease has no sandbox.", retryable=True)
        return sandbox

    @classmethod
    def join(cls, url: str, key: str, environment_id: str, **fields: Any) -> Self:
        """Join an environment, which starts the sandbox. `fields` are those of the request, such as `agent_did`."""
        client = ApiClient(url, key)
        lease = client.call("join", "POST", f"/environments/{quote(environment_id, safe='')}/join", json=fields).json()
        return cls(client, str(lease["id"]))

    def exec(self, command: str, args: Sequence[str] | None = None, *, timeout: int = 60) -> ExecResult:
        """Execute a shell command, or with `args`, even an empty list, a program without a shell. `timeout` in seconds."""
        argv = ["sh", "-c", command] if args is None else [command, *args]
        body = {"argv": argv, "timeout_seconds": timeout}
        result = self._call("exec", "POST", "/exec", json=body, seconds=timeout).json()
        return ExecResult(result["stdout"], result["stderr"], result["exit_code"])

    def write_file(self, path: str, content: bytes | str) -> None:
        """Write a file below /workspace or /data."""
        self._call("writeFile", "PUT", f"/files{quote(path)}", data=content.encode() if isinstance(content, str) else content)

    def read_file(self, path: str) -> bytes:
        return self._call("readFile", "GET", f"/files{quote(path)}").content

    def run_agent(
        self, prompt: str, options: Mapping[str, Any] | None = None, *, observers: Iterable[Observer] = ()
    ) -> "QueryHandle":
        """Start an agent CLI. `options` have the names of the HTTP API or of agent SDKs: model, maxTurns, permissionMode, …

        `observers` see every message of the handle's streams, and may redact it. Options that are functions or connections of
        this process are refused by the server, by name."""
        if not isinstance(prompt, str):
            raise SandboxServiceError("runAgent", "The prompt must be a string: a sandboxed agent reads no further input.")
        body = {"prompt": prompt} | {_to_snake_case(name): value for name, value in (options or {}).items()}
        try:
            row = self._call("runAgent", "POST", "/agent-runs", json=body).json()
        except TypeError as error:  # a function among the options
            raise SandboxServiceError("runAgent", f"An option cannot be sent to a sandbox: {error}") from error
        return QueryHandle(self._client, f"/leases/{self.lease_id}/agent-runs/{row['run_id']}", tuple(observers))

    def destroy(self) -> None:
        """Release the lease. The sandbox is destroyed. Idempotent."""
        self._call("destroy", "POST", "/release")

    def _call(self, operation: str, method: str, path: str, **options: Any) -> requests.Response:
        return self._client.call(operation, method, f"/leases/{self.lease_id}{path}", **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.destroy()
        finally:
            self._client.close()


class QueryHandle:
    """A running agent. The sandboxed agent has no input after its prompt, and its settings are those of its start."""

    def __init__(self, client: ApiClient, path: str, observers: tuple[Observer, ...]) -> None:
        self._client, self._path, self._observers = client, path, observers

    def stream(self) -> Iterator[Message]:
        """Yield the messages of the agent, from the first one, as long as they are available."""
        for event in self.events():
            if event.name == "message":
                message: Message | None = event.data["message"]
                for observe in self._observers:
                    message = observe(message) if message is not None else None
                if message is not None:
                    yield message

    def events(self) -> Iterator[Event]:
        """Yield all events: also malformed lines, stderr, gaps, and the end."""
        return self._client.stream(f"{self._path}/stream")

    def share(self) -> Iterator[Message]:
        """Return one more stream of the same messages."""
        return self.stream()

    def broadcast(self, count: int) -> list[Iterator[Message]]:
        return [self.stream() for _ in range(count)]

    def result(self) -> dict[str, Any]:
        """Wait for the end, and return the agent run."""
        for event in self.events():
            if event.name == "end":
                return event.data
        raise SandboxServiceError("result", "The stream has no end.", retryable=True)

    def interrupt(self) -> None:
        """Kill the agent. Idempotent."""
        self._client.call("interrupt", "POST", f"{self._path}/interrupt")

    def send(self, message: object) -> NoReturn:
        self._refuse_input("send")

    def send_all(self, messages: object) -> NoReturn:
        self._refuse_input("sendAll")

    def send_forked(self, message: object) -> NoReturn:
        self._refuse_input("sendForked")

    def set_mcp_servers(self, servers: object) -> NoReturn:
        self._refuse_input("setMcpServers")

    def account_info(self) -> NoReturn:
        raise SandboxServiceError("accountInfo", "Not available for an agent in a sandbox.")

    def close_input(self) -> None:
        """Do nothing: the input ended with the prompt."""

    def set_permission_mode(self, mode: str) -> None:
        """Do nothing: the mode is that of the start."""

    def set_model(self, model: str | None = None) -> None:
        """Do nothing: the model is that of the start."""

    def set_max_thinking_tokens(self, count: int | None) -> None:
        """Do nothing: the limit is that of the start."""

    def rewind_files(self, message_id: str = "") -> dict[str, Any]:
        return {"can_rewind": False}

    def supported_commands(self) -> list[Any]:
        return []

    def supported_models(self) -> list[Any]:
        return []

    def mcp_server_status(self) -> list[Any]:
        return []

    def _refuse_input(self, operation: str) -> NoReturn:
        raise SandboxServiceError(operation, "Not supported: an agent in a sandbox has no input after its prompt.")


def _parse_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """Parse server-sent events. An event of which the end is missing is dropped."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.decode().partition(": ")
            fields[name] = value
            continue
        if "data" in fields:
            yield Event(fields["id"], fields["event"], json.loads(fields["data"]))
        fields = {}


def _parse_problem(operation: str, response: requests.Response) -> SandboxServiceError:
    try:
        problem = response.json()
        message, cause, retryable = str(problem["detail"]), str(problem["code"]), bool(problem["retryable"])
        provider = str(problem.get("provider") or "leasehold")
    except (ValueError, KeyError, TypeError):
        message, cause, provider = f"The server answered with status {response.status_code}.", "unavailable", "leasehold"
        retryable = response.status_code in (429, 503) or "Retry-After" in response.headers
    return SandboxServiceError(operation, message, retryable=retryable, cause=cause, provider=provider)


def _parse_pause(response: requests.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else DEFAULT_RETRY_SECONDS


def _to_snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])([A-Z])", r"_\1", name).lower()
