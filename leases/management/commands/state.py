"""manage.py state: inspect and change stored `/data`, and list workspace snapshots, without a sandbox."""

import stat
import sys
from argparse import ArgumentParser
from contextlib import ExitStack
from pathlib import Path
from shutil import copyfileobj
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError
from django.db.models import QuerySet

from leases.management.base import parse_did, report_errors
from sandboxes import formatting
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.models import Sandbox
from sandboxes.models.state import AgentData, DataStorageMode, Snapshot
from sandboxes.state import data_editing, data_export, data_tree, pull
from sandboxes.state.data_editing import DataPathNotFound
from sandboxes.state.data_tree import DIRECTORY, DirectoryEntry
from sandboxes.state.spool import open_spool
from sandboxes.state.storage_mode import convert_to_mount, convert_to_sync
from sandboxes.storage.base import CHUNK_BYTES, StoreError

STDIO = "-"  # instead of a file name: stdin or stdout
FILE_TYPE_BITS = {"file": stat.S_IFREG, "link": stat.S_IFLNK, DIRECTORY: stat.S_IFDIR}


class Command(BaseCommand):
    help = "List, read and change the stored /data of an agent, without a sandbox. Live sandboxes receive the changes."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        list_ = actions.add_parser("ls", help="list a directory, with sizes")
        list_.add_argument("agent", metavar="AGENT")
        list_.add_argument("path", metavar="PATH", nargs="?", default="")
        list_.add_argument("-l", action="store_true", dest="long", help="long format: mode, lease, size, time of change")
        get = actions.add_parser("get", help="print one file, or write it to FILE")
        get.add_argument("agent", metavar="AGENT")
        get.add_argument("path", metavar="PATH")
        get.add_argument("file", metavar="FILE", nargs="?", default=STDIO)
        put = actions.add_parser("put", help="store FILE (- is stdin) as PATH; the last writer wins")
        put.add_argument("agent", metavar="AGENT")
        put.add_argument("file", metavar="FILE")
        put.add_argument("path", metavar="PATH")
        remove = actions.add_parser("rm", help="remove a file, a link or a directory")
        remove.add_argument("agent", metavar="AGENT")
        remove.add_argument("path", metavar="PATH")
        remove.add_argument("-r", action="store_true", dest="recursive", help="remove a directory recursively")
        export = actions.add_parser("export", help="write everything to an empty directory or a *.tar file (- is stdout)")
        export.add_argument("agent", metavar="AGENT")
        export.add_argument("target", metavar="DIRECTORY|TAR")
        import_ = actions.add_parser("import", help="add the content of a directory or a tar (- is stdin) to the stored data")
        import_.add_argument("agent", metavar="AGENT")
        import_.add_argument("source", metavar="DIRECTORY|TAR")
        keep = actions.add_parser("keep", help="set the mode of /data: sync (copied around each use) or mount")
        keep.add_argument("agent", metavar="AGENT")
        keep.add_argument("keeping", choices=DataStorageMode.values)
        snapshots = actions.add_parser("snapshots", help="list workspace snapshots, newest first")
        snapshots.add_argument("holder", metavar="LEASE|SANDBOX", help="an id, or AGENT::ENVIRONMENT")

    def handle(self, *args: Any, action: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            try:
                getattr(self, f"_{action}")(**{name: value for name, value in options.items() if name in OPTION_NAMES})
            except (StoreError, OSError) as failed:
                raise CommandError(str(failed)) from failed

    def _ls(self, agent: str, path: str, long: bool) -> None:
        data, directory = data_editing.get_synced_data(agent), path.strip("/")
        entries = data_tree.list_directory(data, directory)
        single = data_tree.find_live_files(data).filter(path=directory).first()
        if directory and not entries and single is None:
            raise DataPathNotFound(f"No such path in /data: {directory!r}.")
        for entry in entries or data_tree.list_single_file(single):
            self.stdout.write(
                _format_long(entry) if long else f"{formatting.format_bytes(entry.size_bytes):>10}  {_format_name(entry)}"
            )

    def _get(self, agent: str, path: str, file: str) -> None:
        row = (
            data_tree.find_live_files(data_editing.get_synced_data(agent))
            .select_related("stored_in", "data")
            .filter(path=path.strip("/"))
            .first()
        )
        if row is None or row.kind != "file":
            raise DataPathNotFound(f"No such file in /data: {path!r}." if row is None else f"{path!r} is a {row.kind}.")
        with ExitStack() as stack:
            content = pull.fetch_contents([row], stack, now=database_time.now())[row.path]
            if file == STDIO:
                copyfileobj(content, sys.stdout.buffer, CHUNK_BYTES)  # self.stdout would decode the bytes
                sys.stdout.flush()
                return
            with open(file, "wb") as output:
                copyfileobj(content, output, CHUNK_BYTES)
        self.stdout.write(f"{row.size_bytes} bytes in {file}")

    def _put(self, agent: str, file: str, path: str) -> None:
        now, mode = database_time.now(), 0o644 if file == STDIO else Path(file).stat().st_mode
        with ExitStack() as stack:
            source = sys.stdin.buffer if file == STDIO else stack.enter_context(open(file, "rb"))
            stored = data_editing.put_file(parse_did(agent), path.strip("/"), source, mode=mode, now=now, actor=COMMAND_LINE)
        self._print_revision(
            agent, f"{formatting.format_path(path)} stored" if stored else f"{formatting.format_path(path)} unchanged"
        )

    def _rm(self, agent: str, path: str, recursive: bool) -> None:
        removed = data_editing.remove_path(
            agent, path.strip("/"), recursive=recursive, now=database_time.now(), actor=COMMAND_LINE
        )
        self._print_revision(agent, f"{removed} removed")

    def _export(self, agent: str, target: str) -> None:
        data, now = data_editing.get_synced_data(agent), database_time.now()
        if target != STDIO and not target.endswith(".tar"):
            count = data_export.export_directory(data, Path(target), now=now)
        else:
            with ExitStack() as stack:
                spool = stack.enter_context(open_spool())
                count = data_export.export_tar(data, spool, now=now)
                output = sys.stdout.buffer if target == STDIO else stack.enter_context(open(target, "xb"))
                copyfileobj(spool, output, CHUNK_BYTES)
            sys.stdout.flush()
        if target != STDIO:
            self.stdout.write(f"{formatting.pluralize(count, 'path', 'paths')} in {target}: revision {data.revision}")

    def _import(self, agent: str, source: str) -> None:
        now = database_time.now()
        if source != STDIO and Path(source).is_dir():
            stored = data_editing.load_directory(parse_did(agent), Path(source), now=now, actor=COMMAND_LINE)
        else:
            with open_spool() as spool:  # stdin cannot seek, and reading a tar may have to
                if source == STDIO:
                    copyfileobj(sys.stdin.buffer, spool, CHUNK_BYTES)
                    spool.seek(0)
                    stored = data_editing.load_tar(parse_did(agent), spool, now=now, actor=COMMAND_LINE)
                else:
                    with open(source, "rb") as tar:
                        stored = data_editing.load_tar(parse_did(agent), tar, now=now, actor=COMMAND_LINE)
        self._print_revision(agent, f"{formatting.pluralize(stored, 'path', 'paths')} new or changed")

    def _keep(self, agent: str, keeping: str) -> None:
        data = AgentData.objects.filter(agent_did=agent).first()
        if data is None:
            raise DataPathNotFound(f"No data is stored for {agent}.")
        if data.keeping == keeping:
            self.stdout.write(f"{agent} already uses mode {keeping}")
            return
        convert = convert_to_mount if keeping == DataStorageMode.MOUNT else convert_to_sync
        count = convert(data, now=database_time.now(), actor=COMMAND_LINE)
        self.stdout.write(f"{agent} now uses mode {keeping}: {formatting.pluralize(count, 'path', 'paths')}")

    def _snapshots(self, holder: str) -> None:
        for snapshot in _find_snapshots(holder):
            location = "forgotten" if snapshot.forgotten_at else "local,store" if snapshot.local else "store"
            line = (
                f"{snapshot.pk} {snapshot.at:%Y-%m-%dT%H:%M:%SZ} {snapshot.size_bytes:>12} {snapshot.kind:<8} {location:<11} "
            )
            self.stdout.write((line + formatting.format_path(snapshot.name)).rstrip())

    def _print_revision(self, agent: str, outcome: str) -> None:
        self.stdout.write(f"{outcome}: revision {data_editing.get_synced_data(agent).revision}")


OPTION_NAMES = {"agent", "path", "long", "file", "recursive", "target", "source", "holder", "keeping"}


def _format_name(entry: DirectoryEntry) -> str:
    return formatting.format_path(entry.name) + ("/" if entry.kind == DIRECTORY else "")


def _format_long(entry: DirectoryEntry) -> str:
    """Format an entry like `ls -l`, with the lease instead of the owner."""
    mode = stat.filemode(FILE_TYPE_BITS[entry.kind] | entry.row.mode) if entry.row else "d?????????"
    target = f" -> {formatting.format_path(entry.row.target)}" if entry.row and entry.kind == "link" else ""
    columns = f"{mode} {entry.holder or '-'!s:<36} {entry.size_bytes:>12} {entry.changed_at:%Y-%m-%dT%H:%M:%SZ}"
    return f"{columns} {_format_name(entry)}{target}"


def _find_snapshots(holder: str) -> QuerySet[Snapshot]:
    """Snapshots of a lease, named by its own id, its sandbox's id, or AGENT::ENVIRONMENT. Raise CommandError if none match."""
    agent, _, environment = holder.rpartition("::")
    sandboxes = Sandbox.objects.filter(agent_did=agent, environment_id=environment).order_by("-created_at")
    if not agent:
        try:
            pk = UUID(holder)
        except ValueError:
            raise CommandError(f"{holder[:80]!r} is neither an id nor AGENT::ENVIRONMENT.") from None
        snapshots = Snapshot.objects.filter(holder=pk)
        sandboxes = Sandbox.objects.filter(pk=pk)
        if snapshots.exists():
            return snapshots
    sandbox = sandboxes.first()
    if sandbox is None:
        raise CommandError("No such lease or sandbox, or it has no snapshots.")
    return Snapshot.objects.filter(holder=sandbox.holder) if sandbox.holder else Snapshot.objects.none()
