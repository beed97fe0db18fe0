"""manage.py state: what is kept of agents and of their sandboxes, looked at and changed from outside."""

import stat
import sys
from argparse import ArgumentParser
from contextlib import ExitStack
from pathlib import Path
from shutil import copyfileobj
from typing import Any
from uuid import UUID

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.db.models import QuerySet
from django.utils import timezone

from leases.errors import InvalidRequest
from leases.management.base import report_errors
from leases.models import DID_DESCRIPTION, validate_did
from sandboxes.admin import formatting
from sandboxes.models import Sandbox
from sandboxes.models.state import AgentData, DataStorageMode, Snapshot
from sandboxes.state import data_editing, data_export, data_tree, pull
from sandboxes.state.data_editing import DataPathNotFound
from sandboxes.state.data_tree import DIRECTORY, DirectoryEntry
from sandboxes.state.spool import open_spool
from sandboxes.state.storage_mode import convert_to_mount, convert_to_sync
from sandboxes.storage.base import CHUNK_BYTES, StoreError

STDIO = "-"  # in the place of a file: stdin or stdout
FILE_TYPE_BITS = {"file": stat.S_IFREG, "link": stat.S_IFLNK, DIRECTORY: stat.S_IFDIR}


class Command(BaseCommand):
    help = "What an agent keeps in /data, without a sandbox: list it, read it, change it. Live sandboxes get what is new."

    def add_arguments(self, parser: ArgumentParser) -> None:
        acts = parser.add_subparsers(dest="act", required=True, metavar="ACT")
        listing = acts.add_parser("ls", help="the names in a directory, with their sizes")
        listing.add_argument("agent", metavar="AGENT")
        listing.add_argument("path", metavar="PATH", nargs="?", default="")
        listing.add_argument("-l", action="store_true", dest="long", help="also mode, moment of the change and lease")
        get = acts.add_parser("get", help="one file, to stdout or into FILE")
        get.add_argument("agent", metavar="AGENT")
        get.add_argument("path", metavar="PATH")
        get.add_argument("file", metavar="FILE", nargs="?", default=STDIO)
        put = acts.add_parser("put", help="store FILE (- is stdin) as PATH; whoever writes last has written it")
        put.add_argument("agent", metavar="AGENT")
        put.add_argument("file", metavar="FILE")
        put.add_argument("path", metavar="PATH")
        remove = acts.add_parser("rm", help="remove a file, a link or a directory")
        remove.add_argument("agent", metavar="AGENT")
        remove.add_argument("path", metavar="PATH")
        remove.add_argument("-r", action="store_true", dest="recursive", help="a directory with what is in it")
        export = acts.add_parser("export", help="everything, into an empty directory or a file named *.tar (- is stdout)")
        export.add_argument("agent", metavar="AGENT")
        export.add_argument("target", metavar="DIRECTORY|TAR")
        load = acts.add_parser("import", help="store what a directory or a tar (- is stdin) has, beside what is there")
        load.add_argument("agent", metavar="AGENT")
        load.add_argument("source", metavar="DIRECTORY|TAR")
        keep = acts.add_parser("keep", help="how it gets into sandboxes from now on: copied around each use, or mounted")
        keep.add_argument("agent", metavar="AGENT")
        keep.add_argument("keeping", choices=DataStorageMode.values)
        copies = acts.add_parser("snapshots", help="the stored copies of a sandbox's own files, the newest first")
        copies.add_argument("holder", metavar="LEASE|SANDBOX", help="an id, or AGENT::ENVIRONMENT")

    def handle(self, *args: Any, act: str, verbosity: int, **given: Any) -> None:
        with report_errors(verbosity):
            try:
                getattr(self, f"_{act}")(**{name: value for name, value in given.items() if name in OPTION_NAMES})
            except (StoreError, OSError) as failed:
                raise CommandError(str(failed)) from failed

    def _ls(self, agent: str, path: str, long: bool) -> None:
        mine, where = data_editing.get_synced_data(agent), path.strip("/")
        lines = data_tree.list_directory(mine, where)
        itself = data_tree.find_live_files(mine).filter(path=where).first()
        if where and not lines and itself is None:
            raise DataPathNotFound(f"There is no {where!r} in its data.")
        for line in lines or data_tree.list_single_file(itself):
            self.stdout.write(
                _format_long(line) if long else f"{formatting.format_bytes(line.size_bytes):>10}  {_format_name(line)}"
            )

    def _get(self, agent: str, path: str, file: str) -> None:
        row = (
            data_tree.find_live_files(data_editing.get_synced_data(agent))
            .select_related("stored_in", "data")
            .filter(path=path.strip("/"))
            .first()
        )
        if row is None or row.kind != "file":
            raise DataPathNotFound(f"There is no file {path!r} in its data." if row is None else f"{path!r} is a {row.kind}.")
        with ExitStack() as stack:
            content = pull.fetch_contents([row], stack, now=timezone.now())[row.path]
            if file == STDIO:
                copyfileobj(content, sys.stdout.buffer, CHUNK_BYTES)  # bytes: self.stdout would make text of them
                sys.stdout.flush()
                return
            with open(file, "wb") as out:
                copyfileobj(content, out, CHUNK_BYTES)
        self.stdout.write(f"{row.size_bytes} bytes in {file}")

    def _put(self, agent: str, file: str, path: str) -> None:
        now, mode = timezone.now(), 0o644 if file == STDIO else Path(file).stat().st_mode
        with ExitStack() as stack:
            source = sys.stdin.buffer if file == STDIO else stack.enter_context(open(file, "rb"))
            stored = data_editing.put_file(_parse_did(agent), path.strip("/"), source, mode=mode, now=now)
        self._said(
            agent, f"{formatting.format_path(path)} stored" if stored else f"{formatting.format_path(path)} is that already"
        )

    def _rm(self, agent: str, path: str, recursive: bool) -> None:
        removed = data_editing.remove_path(agent, path.strip("/"), recursive=recursive, now=timezone.now())
        self._said(agent, f"{removed} removed")

    def _export(self, agent: str, target: str) -> None:
        mine, now = data_editing.get_synced_data(agent), timezone.now()
        if target != STDIO and not target.endswith(".tar"):
            number = data_export.export_directory(mine, Path(target), now=now)
        else:
            with ExitStack() as stack:
                whole = stack.enter_context(open_spool())
                number = data_export.export_tar(mine, whole, now=now)
                out = sys.stdout.buffer if target == STDIO else stack.enter_context(open(target, "xb"))
                copyfileobj(whole, out, CHUNK_BYTES)
            sys.stdout.flush()
        if target != STDIO:
            self.stdout.write(f"{formatting.pluralize(number, 'path', 'paths')} in {target}: revision {mine.revision}")

    def _import(self, agent: str, source: str) -> None:
        now = timezone.now()
        if source != STDIO and Path(source).is_dir():
            stored = data_editing.load_directory(_parse_did(agent), Path(source), now=now)
        else:
            with open_spool() as copy:  # of stdin: a tar may be packed in a way that takes going back in it
                if source == STDIO:
                    copyfileobj(sys.stdin.buffer, copy, CHUNK_BYTES)
                    copy.seek(0)
                    stored = data_editing.load_tar(_parse_did(agent), copy, now=now)
                else:
                    with open(source, "rb") as tar:
                        stored = data_editing.load_tar(_parse_did(agent), tar, now=now)
        self._said(agent, f"{formatting.pluralize(stored, 'path', 'paths')} new or changed")

    def _keep(self, agent: str, keeping: str) -> None:
        mine = AgentData.objects.filter(agent_did=agent).first()
        if mine is None:
            raise DataPathNotFound(f"Nothing is kept of {agent}.")
        if mine.keeping == keeping:
            self.stdout.write(f"{agent} is kept by {keeping} already")
            return
        turn = convert_to_mount if keeping == DataStorageMode.MOUNT else convert_to_sync
        number = turn(mine, now=timezone.now())
        self.stdout.write(f"{agent} is kept by {keeping}: {formatting.pluralize(number, 'path', 'paths')}")

    def _snapshots(self, holder: str) -> None:
        for each in _find_snapshots(holder):
            where = "forgotten" if each.forgotten_at else "local,store" if each.local else "store"
            said = f"{each.pk} {each.at:%Y-%m-%dT%H:%M:%SZ} {each.size_bytes:>12} {each.kind:<8} {where:<11} "
            self.stdout.write((said + formatting.format_path(each.name)).rstrip())

    def _said(self, agent: str, what: str) -> None:
        self.stdout.write(f"{what}: revision {data_editing.get_synced_data(agent).revision}")


OPTION_NAMES = {"agent", "path", "long", "file", "recursive", "target", "source", "holder", "keeping"}


def _parse_did(text: str) -> str:
    """An agent of whom something may be kept from now on."""
    try:
        validate_did(text)
    except ValidationError:
        raise InvalidRequest("agent", f"{text[:80]!r} is not {DID_DESCRIPTION}.") from None
    return text


def _format_name(line: DirectoryEntry) -> str:
    return formatting.format_path(line.name) + ("/" if line.kind == DIRECTORY else "")


def _format_long(line: DirectoryEntry) -> str:
    """As ls -l has it, with the lease in the place of the owner."""
    mode = stat.filemode(FILE_TYPE_BITS[line.kind] | line.row.mode) if line.row else "d?????????"
    target = f" -> {formatting.format_path(line.row.target)}" if line.row and line.kind == "link" else ""
    columns = f"{mode} {line.holder or '-'!s:<36} {line.size_bytes:>12} {line.changed_at:%Y-%m-%dT%H:%M:%SZ}"
    return f"{columns} {_format_name(line)}{target}"


def _find_snapshots(holder: str) -> QuerySet[Snapshot]:
    """The snapshots of a lease, which is named by its own id or by that of its sandbox."""
    agent, _, environment = holder.rpartition("::")
    sandboxes = Sandbox.objects.filter(agent_did=agent, environment_id=environment).order_by("-created_at")
    if not agent:
        try:
            wanted = UUID(holder)
        except ValueError:
            raise CommandError(f"{holder[:80]!r} is neither an id nor AGENT::ENVIRONMENT.") from None
        copies = Snapshot.objects.filter(holder=wanted)
        sandboxes = Sandbox.objects.filter(pk=wanted)
        if copies.exists():
            return copies
    sandbox = sandboxes.first()
    if sandbox is None:
        raise CommandError("There is no such lease or sandbox, or nothing was stored of it.")
    return Snapshot.objects.filter(holder=sandbox.holder) if sandbox.holder else Snapshot.objects.none()
