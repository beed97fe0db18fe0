"""Emulator of a forge: GitHub's REST API for pull requests, and Git over HTTP, on one bare repository.

Branches and merges are real. With `is_gitea` the list of pull requests ignores the filter by head, and a second pull request of
a branch is answered 409, as Gitea does."""

import base64
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.repositories import git, merge

TOKEN = "forge-token-0123456789"
PROJECT = "owner/calc"


class Forge(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, bare: Path, *, is_gitea: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bare, self.is_gitea = bare, is_gitea
        self.pulls: list[dict[str, Any]] = []
        self.faults: list[int] = []  # status of the next answers; 0: the connection is cut

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def api_url(self) -> str:
        return f"{self.url}/api/v3"

    @property
    def clone_url(self) -> str:
        return f"{self.url}/{PROJECT}.git"

    def merge(self, number: int) -> None:
        row = self.pulls[number - 1]
        merge(self.bare, row["head"]["ref"])
        row |= {"state": "closed", "merged": True, "merged_at": "2026-01-01T00:00:00Z"}
        row["merge_commit_sha"] = git(self.bare, "rev-parse", row["base"]["ref"])

    def create(self, body: dict[str, Any]) -> tuple[int, Any]:
        head, base = body["head"], body["base"]
        if any(row["head"]["ref"] == head and row["state"] == "open" for row in self.pulls):
            return (409 if self.is_gitea else 422), {"message": f"A pull request already exists for owner:{head}."}
        if git(self.bare, "rev-list", "--count", f"{base}..{head}") == "0":
            return 422, {"message": f"No commits between {base} and {head}"}
        number = len(self.pulls) + 1
        self.pulls.append({
            "number": number, "state": "open", "merged_at": None, "html_url": f"{self.url}/{PROJECT}/pull/{number}",
            "title": body["title"], "body": body["body"], "base": {"ref": base},
            "head": {"ref": head, "repo": {"full_name": PROJECT}},
        })  # fmt: skip
        return 201, self.pulls[-1]

    def list_pulls(self, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        rows = [row for row in reversed(self.pulls) if query["state"] == ["all"] or row["state"] == "open"]
        if not self.is_gitea:
            rows = [row for row in rows if f"owner:{row['head']['ref']}" in query["head"]]
        page, size = int(query["page"][0]), int(query["per_page"][0])
        return rows[(page - 1) * size : page * size]


class _Handler(BaseHTTPRequestHandler):
    server: Forge

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        if not path.path.startswith("/api/v3/"):
            return self._serve_git()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"message": "Bad credentials"})
        if path.path.removeprefix("/api/v3").startswith(f"/repos/{PROJECT}/pulls/"):
            return self._answer(200, self.server.pulls[int(path.path.rsplit("/", 1)[1]) - 1])
        return self._answer(200, self.server.list_pulls(parse_qs(path.query)))

    def do_POST(self) -> None:
        if not self.path.startswith("/api/v3/"):
            return self._serve_git()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return self._answer(*self.server.create(body))

    def _answer(self, status: int, document: Any) -> None:
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == 0:
            self.close_connection = True
            return self.connection.close()
        content = json.dumps({"message": "Injected"} if fault else document).encode()
        self.send_response(fault or status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        return None

    def _serve_git(self) -> None:
        """Serve Git's smart HTTP by its own CGI program."""
        path = urlsplit(self.path)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Basic {_encode_basic()}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="forge"')
            self.send_header("Content-Length", "0")
            return self.end_headers()
        env = {
            "PATH": "/usr/bin:/bin", "GIT_PROJECT_ROOT": str(self.server.bare), "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path.path.removeprefix(f"/{PROJECT}.git"), "QUERY_STRING": path.query, "REMOTE_USER": "owner",
            "REQUEST_METHOD": self.command, "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(content)), "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null",
        }  # fmt: skip
        done = subprocess.run(["git", "http-backend"], env=env, input=content, capture_output=True, check=True)
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(headers.pop("Status", "200").split()[0]))
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _encode_basic() -> str:
    return base64.b64encode(f"x-access-token:{TOKEN}".encode()).decode()


@contextmanager
def serve_forge(bare: Path, *, is_gitea: bool = False) -> Iterator[Forge]:
    server = Forge(bare, is_gitea=is_gitea)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
