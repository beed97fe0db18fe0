"""Sandbox backend for deepagents and LangChain, over the HTTP API. Needs the extra `deepagents`.

    from leases.adapters.deepagents import LeaseholdSandbox, add_conversation_history

    lease = {"agent_did": "did:web:me.example", "environment_id": "task-1", "environment_type": "coding"}
    with LeaseholdSandbox.join(url, key, **lease) as sandbox:
        agent = create_deep_agent(model=model, backend=add_conversation_history(sandbox))

Files are read and written as the user of the sandbox's commands, at any path. Every command is sent with an Idempotency-Key, so
that a repeated request never executes it twice."""

import base64
import time
import uuid
from collections.abc import Mapping
from typing import Any, Self

import httpx
from deepagents.backends.composite import CompositeBackend
from deepagents.backends.protocol import (
    BackendProtocol,
    EditResult,
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
    GlobResult,
    GrepResult,
    LsResult,
    ReadResult,
    WriteResult,
)
from deepagents.backends.sandbox import BaseSandbox

CONNECT_TIMEOUT_SECONDS = 10.0
RESPONSE_TIMEOUT_SECONDS = 120.0  # in addition to the timeout of a command: a start, a wake, the transfer of state
RETRY_PERIOD_SECONDS = 120.0  # from the first attempt to the last one
DEFAULT_RETRY_SECONDS = 1.0
DEFAULT_EXEC_SECONDS = 60  # of the server, unless LEASEHOLD_EXEC_TIMEOUT is set there
MAX_EXEC_SECONDS = 3600  # of the server, unless LEASEHOLD_EXEC_TIMEOUT_MOST is set there
MAX_DOWNLOAD_BYTES = 64 << 20  # of one file, which is held in memory; as in the HTTP API
CHUNK_BYTES = 512 << 10  # of a transferred file; less than LEASEHOLD_EXEC_OUTPUT_CAP
TIMED_OUT_EXIT_CODE = 124  # as timeout(1)
FAILED_EXIT_CODE = 1  # of a command that the server refused
HISTORY_ROUTE, HISTORY_DIRECTORY = "/conversation_history/", "/data/conversation_history"
# Exit codes of the scripts, and the errors that deepagents defines for them.
FILE_ERRORS = {3: "file_not_found", 4: "is_directory", 5: "permission_denied", 6: "invalid_path"}
_HANDLER = """
except FileNotFoundError: sys.exit(3)
except IsADirectoryError: sys.exit(4)
except PermissionError: sys.exit(5)
except (NotADirectoryError, ValueError): sys.exit(6)
except OSError as error: sys.exit(error.strerror)
"""
READ_SCRIPT = f"""
import sys
path, offset, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
try:
    with open(path, "rb") as file:
        file.seek(offset)
        sys.stdout.buffer.write(file.read(length))
{_HANDLER.strip()}
"""
WRITE_SCRIPT = f"""
import os, sys
path, offset = sys.argv[1], int(sys.argv[2])
try:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(sys.stdin.buffer.read())
{_HANDLER.strip()}
"""


class RequestRefused(Exception):
    """The server answered with a problem document, or did not answer. `code` is its code, "unavailable" without an answer."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ApiClient:
    """HTTP API with one key. A request is repeated, under the same Idempotency-Key, while the server is unavailable."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=f"{url.rstrip('/')}/api/v1", headers={"Authorization": f"Bearer {key}"})

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = 0.0) -> dict[str, Any]:
        """Send a POST whose operation takes up to `seconds`, and return the body of the answer. Raise RequestRefused."""
        return self._request("POST", path, seconds, json=body or {}, headers={"Idempotency-Key": uuid.uuid4().hex})

    def get(self, path: str) -> dict[str, Any]:
        """Send a GET, and return the body of the answer. Raise RequestRefused."""
        return self._request("GET", path, 0.0)

    def _request(self, method: str, path: str, seconds: float, **options: Any) -> dict[str, Any]:
        deadline = time.monotonic() + RETRY_PERIOD_SECONDS + seconds
        timeout = httpx.Timeout(RESPONSE_TIMEOUT_SECONDS + seconds, connect=CONNECT_TIMEOUT_SECONDS)
        while True:
            try:
                response = self._http.request(method, path, timeout=timeout, **options)
            except httpx.TransportError as error:
                refused, pause = RequestRefused("unavailable", f"The server does not respond: {error}"), DEFAULT_RETRY_SECONDS
            else:
                if response.is_success:
                    return dict(response.json())
                refused, pause = _parse_problem(response), float(response.headers.get("Retry-After", DEFAULT_RETRY_SECONDS))
                if response.status_code != 503 and refused.code != "idempotency_in_progress":
                    raise refused
            if time.monotonic() + pause > deadline:
                raise refused
            time.sleep(pause)

    def close(self) -> None:
        self._http.close()


def _parse_problem(response: httpx.Response) -> RequestRefused:
    try:
        problem = response.json()
        return RequestRefused(str(problem["code"]), str(problem["detail"]))
    except (ValueError, KeyError, TypeError):
        return RequestRefused("unavailable", f"The server answered with status {response.status_code}.")


class LeaseholdSandbox(BaseSandbox):
    """Sandbox of one lease. `id` is the lease's id. The end of a `with` block releases the lease."""

    def __init__(self, client: ApiClient, lease_id: str, *, timeout: int = DEFAULT_EXEC_SECONDS) -> None:
        """Use an existing lease. `timeout`: seconds of a command that states none."""
        self._client, self._lease_id, self._timeout = client, lease_id, timeout

    @classmethod
    def join(cls, url: str, key: str, *, environment_id: str, timeout: int = DEFAULT_EXEC_SECONDS, **fields: Any) -> Self:
        """Join an environment, which starts the sandbox. `fields` are those of the request, such as `agent_did`.

        Returns the agent's lease in the environment if there is one. Raise RequestRefused."""
        client = ApiClient(url, key)
        return cls(client, str(client.post(f"/environments/{environment_id}/join", fields)["id"]), timeout=timeout)

    @property
    def id(self) -> str:
        return self._lease_id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Execute a command in bash. A refusal, as after the end of the lease, is a readable output with exit code 1."""
        seconds = self._timeout if timeout is None else timeout or MAX_EXEC_SECONDS
        try:
            result = self._exec(["bash", "-c", command], seconds=seconds)
        except RequestRefused as refused:
            return ExecuteResponse(output=f"{refused} ({refused.code})", exit_code=FAILED_EXIT_CODE)
        output, exit_code = result["stdout"] + result["stderr"], result["exit_code"]
        if result["timed_out"]:
            output, exit_code = f"{output}\n[killed after {seconds} seconds]", TIMED_OUT_EXIT_CODE
        elif result["oom"]:
            output += "\n[out of memory]"
        return ExecuteResponse(output=output, exit_code=exit_code, truncated=result["truncated"])

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [FileUploadResponse(path=path, error=self._upload(path, content)) for path, content in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [self._download(path) for path in paths]

    def release(self) -> None:
        """End the lease. Its last state is kept for LEASEHOLD_KEEP_STATE of the server. Raise RequestRefused."""
        self._client.post(f"/leases/{self._lease_id}/release")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.release()
        finally:
            self._client.close()

    def _exec(self, argv: list[str], *, seconds: int, stdin: bytes | None = None, encoding: str = "") -> dict[str, Any]:
        body: dict[str, Any] = {"argv": argv, "timeout_seconds": seconds}
        if stdin is not None:
            body["stdin"] = base64.b64encode(stdin).decode()
        return self._client.post(f"/leases/{self._lease_id}/exec{encoding}", body, seconds=seconds)

    def _run_script(self, script: str, *arguments: str, stdin: bytes = b"") -> tuple[bytes, str | None]:
        """Execute a script on a file. Return its output and the error, or None."""
        try:
            argv = ["python3", "-c", script, *arguments]
            result = self._exec(argv, seconds=self._timeout, stdin=stdin, encoding="?encoding=base64")
        except RequestRefused as refused:
            return b"", "invalid_path" if refused.code == "invalid" else str(refused)
        if exit_code := result["exit_code"]:
            message = base64.b64decode(result["stderr"]).decode(errors="replace").strip()
            return b"", FILE_ERRORS.get(exit_code, message or f"exit code {exit_code}")
        return base64.b64decode(result["stdout"]), None

    def _upload(self, path: str, content: bytes) -> str | None:
        if not path.startswith("/"):
            return "invalid_path"
        for offset in range(0, max(len(content), 1), CHUNK_BYTES):
            chunk = content[offset : offset + CHUNK_BYTES]
            _, error = self._run_script(WRITE_SCRIPT, path, str(offset), stdin=chunk)
            if error:
                return error
        return None

    def _download(self, path: str) -> FileDownloadResponse:
        if not path.startswith("/"):
            return FileDownloadResponse(path=path, error="invalid_path")
        content = bytearray()
        while True:
            chunk, error = self._run_script(READ_SCRIPT, path, str(len(content)), str(CHUNK_BYTES))
            if error:
                return FileDownloadResponse(path=path, error=error)
            content += chunk
            if len(content) > MAX_DOWNLOAD_BYTES:
                return FileDownloadResponse(path=path, error=f"The file has more than {MAX_DOWNLOAD_BYTES >> 20} MiB.")
            if len(chunk) < CHUNK_BYTES:
                return FileDownloadResponse(path=path, content=bytes(content))


def add_conversation_history(sandbox: LeaseholdSandbox) -> CompositeBackend:
    """Return a backend whose /conversation_history/ is a directory of the agent's /data.

    Conversations that middleware offloads there outlive the lease. The root of a sandbox is not writable."""
    return CompositeBackend(default=sandbox, routes={HISTORY_ROUTE: SubdirectoryBackend(sandbox, HISTORY_DIRECTORY)})


class SubdirectoryBackend(BackendProtocol):
    """Directory of a sandbox as the root of a backend."""

    def __init__(self, sandbox: BaseSandbox, root: str) -> None:
        self._sandbox, self._root = sandbox, root.rstrip("/")

    def ls(self, path: str) -> LsResult:
        self._make_root()
        result = self._sandbox.ls(self._enter(path))
        return LsResult(entries=self._leave_all(result.entries), error=result.error)

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        return self._sandbox.read(self._enter(file_path), offset, limit)

    def write(self, file_path: str, content: str) -> WriteResult:
        result = self._sandbox.write(self._enter(file_path), content)
        return WriteResult(path=file_path) if result.error is None else result

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        result = self._sandbox.edit(self._enter(file_path), old_string, new_string, replace_all)
        return EditResult(path=file_path, occurrences=result.occurrences) if result.error is None else result

    def grep(self, pattern: str, path: str | None = None, glob: str | None = None) -> GrepResult:
        self._make_root()
        result = self._sandbox.grep(pattern, self._enter(path or "/"), glob)
        return GrepResult(matches=self._leave_all(result.matches), error=result.error)

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        self._make_root()
        result = self._sandbox.glob(pattern.lstrip("/"), self._enter(path or "/"))
        below = (path or "/").rstrip("/")
        entries = result.matches and [{**entry, "path": self._leave(entry["path"], below)} for entry in result.matches]
        return GlobResult(matches=entries, error=result.error)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        responses = self._sandbox.upload_files([(self._enter(path), content) for path, content in files])
        return [FileUploadResponse(path=path, error=each.error) for (path, _), each in zip(files, responses, strict=True)]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        responses = self._sandbox.download_files([self._enter(path) for path in paths])
        return [
            FileDownloadResponse(path=path, content=each.content, error=each.error)
            for path, each in zip(paths, responses, strict=True)
        ]

    def _make_root(self) -> None:
        self._sandbox.execute(f"mkdir -p {self._root}")

    def _enter(self, path: str) -> str:
        return f"{self._root}/{path.lstrip('/')}".rstrip("/")

    def _leave(self, path: str, below: str = "") -> str:
        """Return a path of the sandbox as one of this backend. A relative path is one below the directory `below`."""
        return path.removeprefix(self._root) if path.startswith("/") else f"{below}/{path}"

    def _leave_all(self, entries: Any) -> Any:
        return entries and [{**entry, "path": self._leave(entry["path"])} for entry in entries]
