"""Working copy of the task: shell commands and files. Standard library only."""

import subprocess
from pathlib import Path
from typing import Any

MAX_OUTPUT_CHARS = 8000  # the last ones that a command printed
MAX_FILE_CHARS = 20_000
COMMAND_TIMEOUT_SECONDS = 25.0  # a turn has 60 s


def get_path(state: dict[str, Any]) -> Path:
    return Path(state["repository"]["path"])


def run(state: dict[str, Any], command: str, timeout: float = COMMAND_TIMEOUT_SECONDS) -> dict[str, Any]:
    """Run a shell command in the working copy. Return its exit code and the end of its output."""
    try:
        done = subprocess.run(
            ["/bin/bash", "-c", command], cwd=get_path(state), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=max(min(timeout, COMMAND_TIMEOUT_SECONDS), 0.1),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"exit_code": None, "output": "The command took too long and was killed."}
    return {"exit_code": done.returncode, "output": done.stdout.decode(errors="replace")[-MAX_OUTPUT_CHARS:]}


def read_file(state: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a text file of the working copy."""
    text = _resolve(state, path).read_text(errors="replace")
    return {"content": text[:MAX_FILE_CHARS], "truncated": len(text) > MAX_FILE_CHARS}


def write_file(state: dict[str, Any], path: str, content: str) -> dict[str, Any]:
    """Write a text file of the working copy."""
    file = _resolve(state, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return {"written": len(content)}


def _resolve(state: dict[str, Any], path: str) -> Path:
    root = get_path(state).resolve()
    file = (root / path).resolve()
    if not file.is_relative_to(root):
        raise ValueError("the path is outside of the working copy")
    return file


def _describe(description: str, **properties: str) -> dict[str, Any]:
    fields = {name: {"type": "string", "description": text} for name, text in properties.items()}
    return {"description": description, "parameters": {"type": "object", "properties": fields, "required": list(fields)}}


TOOLS: dict[str, dict[str, Any]] = {
    "run": {"call": run, "schema": _describe("Run a shell command in the working copy.", command="Command line for bash.")},
    "read_file": {"call": read_file, "schema": _describe("Read a text file.", path="Path in the working copy.")},
    "write_file": {
        "call": write_file,
        "schema": _describe("Write a whole text file.", path="Path in the working copy.", content="New content."),
    },
}
