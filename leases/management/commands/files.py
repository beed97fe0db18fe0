"""manage.py files: list, read, write and remove files of a lease's sandbox, as the HTTP API does."""

import json
import sys
from argparse import ArgumentParser
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError

from leases import execution, leasing
from leases.api.files.base import build_command
from leases.api.files.content import MAX_FILE_BYTES, list_entries, serialize_listing
from leases.management.base import add_lease_action, parse_lease_id, report_errors
from sandboxes import formatting
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.management.base import require_utf8
from sandboxes.providers.arguments import check_directory_path, split_sandbox_path
from sandboxes.providers.base import DATA, WORKSPACE

STDIO = "-"  # instead of a file name: stdin or stdout


class Command(BaseCommand):
    help = (
        "List, read, write and remove files of a lease. A path is absolute, or relative to /workspace. Reading wakes no "
        "sandbox. `manage.py state` reads and changes /data without a lease."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        limit = f"of at most {MAX_FILE_BYTES >> 20} MiB"
        listing = add_lease_action(actions, "ls", help="list a directory")
        get = add_lease_action(actions, "get", help=f"print one file {limit}, or write it to FILE", json_lines=False)
        put = add_lease_action(actions, "put", help=f"store FILE (- is stdin), {limit}, as PATH", json_lines=False)
        remove = add_lease_action(actions, "rm", help="remove one file or link", json_lines=False)
        listing.add_argument("path", metavar="PATH", nargs="?", default=WORKSPACE)
        listing.add_argument("--deep", action="store_true", help="also the content of its directories")
        put.add_argument("file", metavar="FILE")
        for subparser in (get, put, remove):
            subparser.add_argument("path", metavar="PATH")
        get.add_argument("file", metavar="FILE", nargs="?", default=STDIO)

    def handle(self, *args: Any, action: str, verbosity: int, lease: str, **options: Any) -> None:
        with report_errors(verbosity):
            try:
                getattr(self, f"_{action}")(parse_lease_id(lease), options)
            except OSError as failed:
                raise CommandError(str(failed)) from failed

    def _ls(self, pk: UUID, options: dict[str, Any]) -> None:
        root, under = _split_directory(options["path"])
        entries, _ = execution.read_files(
            pk, root, build_command("list", f"{root}/{under}", root=root),
            lambda tree: list_entries(tree, under=under, deep=options["deep"]), now=database_time.now(), actor=COMMAND_LINE,
        )  # fmt: skip
        document = serialize_listing(root.removeprefix("/"), under, entries)
        if options["json"]:
            self.stdout.write(json.dumps(document))
            return
        for entry in document["entries"]:
            target = f" -> {formatting.format_path(entry['target'])}" if entry["kind"] == "link" else ""
            name = formatting.format_path(entry["name"]) + ("/" if entry["kind"] == "directory" else "")
            self.stdout.write(f"{entry['mode']} {entry['size']:>12} {entry['mtime']} {name}{target}")

    def _get(self, pk: UUID, options: dict[str, Any]) -> None:
        root, path = _split_path(options["path"])
        (content, size), _ = execution.read_files(
            pk, root, build_command("read", f"{root}/{path}", root=root),
            lambda tree: tree.read_range(path, start=0, length=MAX_FILE_BYTES), now=database_time.now(), actor=COMMAND_LINE,
        )  # fmt: skip
        if size > len(content):
            raise CommandError(f"The file has {size} bytes. At most {MAX_FILE_BYTES} are transferred; use manage.py exec.")
        if options["file"] == STDIO:
            sys.stdout.buffer.write(content)  # self.stdout would decode the bytes
            sys.stdout.flush()
            return
        Path(options["file"]).write_bytes(content)
        self.stdout.write(f"{len(content)} bytes in {options['file']}")

    def _put(self, pk: UUID, options: dict[str, Any]) -> None:
        path = "/".join(_split_path(options["path"]))
        leasing.require_active(pk, now=database_time.now())  # before the file is read
        with ExitStack() as stack:
            source = sys.stdin.buffer if options["file"] == STDIO else stack.enter_context(open(options["file"], "rb"))
            content = source.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise CommandError(f"A file has at most {MAX_FILE_BYTES} bytes.")
        execution.change_files(
            pk, build_command("write", path, root=_get_root(path)),
            lambda provider, sandbox: provider.write_file(sandbox.ref, path, content), now=database_time.now(),
            actor=COMMAND_LINE,
        )  # fmt: skip
        self.stdout.write(f"{formatting.format_path(path)} stored: {len(content)} bytes")

    def _rm(self, pk: UUID, options: dict[str, Any]) -> None:
        path = "/".join(_split_path(options["path"]))
        execution.change_files(
            pk, build_command("remove", path, root=_get_root(path)),
            lambda provider, sandbox: provider.remove_file(sandbox.ref, path), now=database_time.now(), actor=COMMAND_LINE,
        )  # fmt: skip
        self.stdout.write(f"{formatting.format_path(path)} removed")


def _split_path(path: str) -> tuple[str, str]:
    """Split the path of a file into its root and the path below. Raise BadPath, or CommandError if it is not UTF-8."""
    require_utf8("PATH", path)
    root, parts = split_sandbox_path(path if path.startswith("/") else f"{WORKSPACE}/{path}")
    return root, "/".join(parts)


def _split_directory(path: str) -> tuple[str, str]:
    """Like _split_path, for a directory, which may be a root. Raise BadPath."""
    path = path.rstrip("/") or "/"
    if path in (WORKSPACE, DATA):
        return path, ""
    root, under = _split_path(path)
    return root, check_directory_path(root, under)


def _get_root(path: str) -> str:
    return DATA if path.startswith(f"{DATA}/") else WORKSPACE
