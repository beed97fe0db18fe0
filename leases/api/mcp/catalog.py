"""Tools at /mcp."""

from typing import Any

from leases.api.base.authentication import Caller
from leases.api.base.fields import ENCODINGS
from leases.api.mcp.api_tool import ApiTool, Arguments
from leases.api.mcp.file_tools import (
    DEFAULT_READ_BYTES,
    MAX_READ_BYTES,
    MAX_WRITE_BYTES,
    FileReadTool,
    build_file_read,
    build_file_write,
    read_file_content,
    read_file_written,
    split_absolute_path,
)
from leases.errors import InvalidRequest
from sandboxes.mcp.tools import Schema

SHELL = ("sh", "-c")  # of `command`


def _choose_agent(arguments: Arguments, caller: Caller) -> Arguments:
    """Fill in the agent of a key that has a single one."""
    if arguments.get("agent_did") is None:
        if len(caller.key.dids) != 1:
            raise InvalidRequest("agent_did", "This argument is required: the API key is not that of a single agent.")
        arguments["agent_did"] = caller.key.dids[0]
    return arguments


def _choose_program(arguments: Arguments, caller: Caller) -> Arguments:
    """Replace `command` by the argument vector of a shell."""
    if ("argv" in arguments) == ("command" in arguments):
        raise InvalidRequest("command", "Give either command or argv.")
    if "command" in arguments:
        arguments["argv"] = [*SHELL, arguments.pop("command")]
    return arguments


def _string(description: str, **options: Any) -> Schema:
    return {"type": "string", "description": description} | options


def _integer(description: str, **options: Any) -> Schema:
    return {"type": "integer", "description": description} | options


LEASE_ID = _string("Id of the lease.", format="uuid")
ROOT = _string("Base directory of the path: /workspace or /data. Default: workspace.", enum=["workspace", "data"])
PATH = _string("Path relative to the base directory, or an absolute path below /workspace or /data.")
ENCODING = _string("utf-8 replaces invalid bytes; base64 is exact. Default: utf-8.", enum=list(ENCODINGS))
PAGE = {
    "cursor": _string("next_cursor of the previous page."),
    "limit": _integer("Results of a page, 1 to 200. Default: 50.", minimum=1, maximum=200),
}
KEY = {
    "idempotency_key": _string(
        "1 to 255 visible ASCII characters. A repeated call with the same key and arguments gets the first result.",
        minLength=1, maxLength=255,
    )
}  # fmt: skip
NEW_LEASE = {
    "ttl_seconds": _integer("The lease ends this long after its last use. Default: from the environment type.", minimum=1),
    "pool": _string("Pool of the sandbox. Default: from the environment type."),
}

TOOLS = (
    ApiTool(
        "lease_acquire", "Acquire a lease",
        "Lease a sandbox: a Linux container with a directory /workspace. Returns the lease with its id and its end, after the "
        "sandbox has started. If the agent already holds a lease in the environment, that lease is returned.",
        {
            "environment_id": _string("Name of the environment, such as the task."),
            "environment_type": _string("Type of the environment, such as coding. The error for an unknown type lists all."),
            "agent_did": _string("DID of the agent. Default: the agent of the API key, if it has exactly one."),
            "wait_seconds": _integer("If the pool is full, wait this long for a place.", minimum=0),
        } | NEW_LEASE | KEY,
        ["environment_id", "environment_type"], idempotent=True, method="POST", path="environments/{environment_id}/join",
        adapt=_choose_agent,
    ),
    ApiTool(
        "lease_list", "List leases", "List the leases of the agents of the API key, newest first.",
        {
            "status": _string("Only leases with this status.", enum=["active", "expired", "destroyed"]),
            "agent_did": _string("Only leases of this agent."),
            "environment_id": _string("Only leases in this environment."),
        } | PAGE,
        reads_only=True, path="leases", query=("status", "agent_did", "environment_id", "cursor", "limit"),
    ),
    ApiTool(
        "lease_status", "Get a lease",
        "Return a lease: status, end, sandbox, reason of the last stop, awake time, model calls.",
        {"lease_id": LEASE_ID}, ["lease_id"], reads_only=True, path="leases/{lease_id}",
    ),
    ApiTool(
        "lease_renew", "Renew a lease", "Extend a lease to its ttl from now, at most to its max_expires_at.",
        {"lease_id": LEASE_ID} | KEY, ["lease_id"], idempotent=True, method="POST", path="leases/{lease_id}/renew",
    ),
    ApiTool(
        "lease_release", "Release a lease",
        "End a lease and destroy its sandbox. The last state of /workspace is stored and can be forked for some days.",
        {"lease_id": LEASE_ID} | KEY, ["lease_id"], destructive=True, idempotent=True, method="POST",
        path="leases/{lease_id}/release",
    ),
    ApiTool(
        "exec", "Execute a command",
        "Execute a command in the sandbox and return exit_code, stdout and stderr once it has ended. A command that fails or "
        "times out is a result, not an error. Variables and working directory do not carry over to the next command.",
        {
            "lease_id": LEASE_ID,
            "command": _string("Command line for sh. Give either command or argv."),
            "argv": {
                "type": "array", "items": {"type": "string"}, "minItems": 1,
                "description": "Program and arguments, executed without a shell.",
            },
            "cwd": _string("Working directory, an absolute path. Default: /workspace."),
            "env": {
                "type": "object", "additionalProperties": {"type": "string"}, "description": "Environment variables.",
            },
            "stdin": _string("Standard input."),
            "timeout_seconds": _integer("Time limit of the command. Default: 60, unless the server sets another.", minimum=1),
            "shell": _string("Shell whose variables and working directory apply."),
            "encoding": ENCODING | {"description": "Encoding of stdin and the output. utf-8 replaces invalid bytes."},
        } | KEY,
        ["lease_id"], destructive=True, method="POST", path="leases/{lease_id}/exec", query=("encoding",),
        adapt=_choose_program,
    ),
    ApiTool(
        "run_list", "List runs", "List the commands and file operations of a lease, newest first, with their outcomes.",
        {"lease_id": LEASE_ID} | PAGE, ["lease_id"], reads_only=True, path="leases/{lease_id}/runs", query=("cursor", "limit"),
    ),
    ApiTool(
        "run_get", "Get a run",
        "Return one run with the stored beginning of its output: for a command whose result was lost with a connection.",
        {"lease_id": LEASE_ID, "run_id": _string("Id of the run.", format="uuid"), "encoding": ENCODING},
        ["lease_id", "run_id"], reads_only=True, path="leases/{lease_id}/runs/{run_id}", query=("encoding",),
    ),
    FileReadTool(
        "read_file", "Read a file",
        "Return the content of a file, or a part of it: next_offset is the offset to continue from, null at the end of the "
        "file. A sleeping sandbox is not woken.",
        {
            "lease_id": LEASE_ID, "path": PATH, "root": ROOT, "encoding": ENCODING,
            "offset": _integer("First byte. Default: 0.", minimum=0, maximum=10**15),
            "length": _integer(
                f"Maximum number of bytes. Default: {DEFAULT_READ_BYTES}.", minimum=1, maximum=MAX_READ_BYTES
            ),
        },
        ["lease_id", "path"], reads_only=True, path="leases/{lease_id}/files/{path}", query=("root",),
        adapt=split_absolute_path, build=build_file_read, read=read_file_content,
    ),
    ApiTool(
        "write_file", "Write a file",
        f"Create or replace a file of at most {MAX_WRITE_BYTES >> 20} MiB. Missing parent directories are created.",
        {
            "lease_id": LEASE_ID, "path": PATH, "content": _string("Content."),
            "root": ROOT, "encoding": ENCODING | {"description": "Encoding of content. Default: utf-8."},
        },
        ["lease_id", "path", "content"], destructive=True, idempotent=True, method="PUT", path="leases/{lease_id}/files/{path}",
        query=("root",), adapt=split_absolute_path, build=build_file_write, read=read_file_written,
    ),
    ApiTool(
        "list_files", "List files", "List a directory: name, kind, size, mode and time of each entry.",
        {
            "lease_id": LEASE_ID, "path": _string("Directory, stated like the path of a file. Default: the base directory."),
            "root": ROOT, "deep": {"type": "boolean", "description": "Also list all subdirectories. Default: false."},
        },
        ["lease_id"], reads_only=True, path="leases/{lease_id}/files", query=("path", "root", "deep"),
        adapt=split_absolute_path,
    ),
    ApiTool(
        "snapshot_create", "Take a snapshot", "Store the present state of /workspace. Only the newest snapshots are kept.",
        {"lease_id": LEASE_ID, "name": _string("Name of the snapshot.", maxLength=100)} | KEY, ["lease_id"], method="POST",
        path="leases/{lease_id}/snapshots",
    ),
    ApiTool(
        "snapshot_list", "List snapshots", "List the snapshots of a lease, newest first.",
        {"lease_id": LEASE_ID} | PAGE, ["lease_id"], reads_only=True, path="leases/{lease_id}/snapshots",
        query=("cursor", "limit"),
    ),
    ApiTool(
        "snapshot_restore", "Restore a snapshot",
        "Replace /workspace by a snapshot, effective from the next use. The state before is stored as a snapshot.",
        {"lease_id": LEASE_ID, "snapshot_id": _string("Id of the snapshot.", format="uuid")} | KEY, ["lease_id", "snapshot_id"],
        destructive=True, method="POST", path="leases/{lease_id}/restore",
    ),
    ApiTool(
        "fork", "Fork a lease",
        "Acquire a lease in another environment whose /workspace begins as a copy: of the present state or of a snapshot. An "
        "ended lease is forked from its last stored state.",
        {
            "lease_id": LEASE_ID | {"description": "Id of the lease to copy from."},
            "environment_id": _string("Name of the environment of the new lease."),
            "snapshot_id": _string("Snapshot to begin from. Default: the present state.", format="uuid"),
            "agent_did": _string("Agent of the new lease. Default: that of the other lease."),
            "environment_type": _string("Default: that of the other lease."),
        } | NEW_LEASE | KEY,
        ["lease_id", "environment_id"], method="POST", path="leases/{lease_id}/fork",
    ),
)  # fmt: skip
