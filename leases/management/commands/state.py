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

from leases.errors import Invalid
from leases.management.base import one_line
from leases.models import DID_ACCEPTS, is_did
from sandboxes.admin import formatting
from sandboxes.models import Sandbox
from sandboxes.models.state import AgentData, Keeping, Snapshot
from sandboxes.state import data_editing, data_export, data_tree, pull
from sandboxes.state.data_editing import NotThere
from sandboxes.state.data_modes import to_mount, to_sync
from sandboxes.state.data_tree import DIRECTORY, Line
from sandboxes.state.spool import spool
from sandboxes.storage.base import CHUNK, StoreError

STREAM = "-"  # in the place of a file: stdin or stdout
TYPES = {"file": stat.S_IFREG, "link": stat.S_IFLNK, DIRECTORY: stat.S_IFDIR}


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
        get.add_argument("file", metavar="FILE", nargs="?", default=STREAM)
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
        keep.add_argument("keeping", choices=Keeping.values)
        copies = acts.add_parser("snapshots", help="the stored copies of a sandbox's own files, the newest first")
        copies.add_argument("holder", metavar="LEASE|SANDBOX", help="an id, or AGENT::ENVIRONMENT")

    def handle(self, *args: Any, act: str, verbosity: int, **given: Any) -> None:
        with one_line(verbosity):
            try:
                getattr(self, f"_{act}")(**{name: value for name, value in given.items() if name in NAMES})
            except (StoreError, OSError) as failed:
                raise CommandError(str(failed)) from failed

    def _ls(self, agent: str, path: str, long: bool) -> None:
        mine, where = data_editing.kept(agent), path.strip("/")
        lines = data_tree.listing(mine, where)
        itself = data_tree.live(mine).filter(path=where).first()
        if where and not lines and itself is None:
            raise NotThere(f"There is no {where!r} in its data.")
        for line in lines or data_tree.alone(itself):
            self.stdout.write(_in_full(line) if long else f"{formatting.size(line.size_bytes):>10}  {_name(line)}")

    def _get(self, agent: str, path: str, file: str) -> None:
        row = data_tree.live(data_editing.kept(agent)).select_related("stored_in", "data").filter(path=path.strip("/")).first()
        if row is None or row.kind != "file":
            raise NotThere(f"There is no file {path!r} in its data." if row is None else f"{path!r} is a {row.kind}.")
        with ExitStack() as stack:
            content = pull.fetch([row], stack, now=timezone.now())[row.path]
            if file == STREAM:
                copyfileobj(content, sys.stdout.buffer, CHUNK)  # bytes: self.stdout would make text of them
                sys.stdout.flush()
                return
            with open(file, "wb") as out:
                copyfileobj(content, out, CHUNK)
        self.stdout.write(f"{row.size_bytes} bytes in {file}")

    def _put(self, agent: str, file: str, path: str) -> None:
        now, mode = timezone.now(), 0o644 if file == STREAM else Path(file).stat().st_mode
        with ExitStack() as stack:
            source = sys.stdin.buffer if file == STREAM else stack.enter_context(open(file, "rb"))
            stored = data_editing.put(_did(agent), path.strip("/"), source, mode=mode, now=now)
        self._said(agent, f"{formatting.path(path)} stored" if stored else f"{formatting.path(path)} is that already")

    def _rm(self, agent: str, path: str, recursive: bool) -> None:
        removed = data_editing.remove(agent, path.strip("/"), recursive=recursive, now=timezone.now())
        self._said(agent, f"{removed} removed")

    def _export(self, agent: str, target: str) -> None:
        mine, now = data_editing.kept(agent), timezone.now()
        if target != STREAM and not target.endswith(".tar"):
            number = data_export.to_directory(mine, Path(target), now=now)
        else:
            with ExitStack() as stack:
                whole = stack.enter_context(spool())
                number = data_export.to_tar(mine, whole, now=now)
                out = sys.stdout.buffer if target == STREAM else stack.enter_context(open(target, "xb"))
                copyfileobj(whole, out, CHUNK)
            sys.stdout.flush()
        if target != STREAM:
            self.stdout.write(f"{formatting.counted(number, 'path', 'paths')} in {target}: revision {mine.revision}")

    def _import(self, agent: str, source: str) -> None:
        now = timezone.now()
        if source != STREAM and Path(source).is_dir():
            stored = data_editing.load_directory(_did(agent), Path(source), now=now)
        else:
            with spool() as copy:  # of stdin: a tar may be packed in a way that takes going back in it
                if source == STREAM:
                    copyfileobj(sys.stdin.buffer, copy, CHUNK)
                    copy.seek(0)
                    stored = data_editing.load_tar(_did(agent), copy, now=now)
                else:
                    with open(source, "rb") as tar:
                        stored = data_editing.load_tar(_did(agent), tar, now=now)
        self._said(agent, f"{formatting.counted(stored, 'path', 'paths')} new or changed")

    def _keep(self, agent: str, keeping: str) -> None:
        mine = AgentData.objects.filter(agent_did=agent).first()
        if mine is None:
            raise NotThere(f"Nothing is kept of {agent}.")
        if mine.keeping == keeping:
            self.stdout.write(f"{agent} is kept by {keeping} already")
            return
        turn = to_mount if keeping == Keeping.MOUNT else to_sync
        number = turn(mine, now=timezone.now())
        self.stdout.write(f"{agent} is kept by {keeping}: {formatting.counted(number, 'path', 'paths')}")

    def _snapshots(self, holder: str) -> None:
        for each in _copies(holder):
            where = "forgotten" if each.forgotten_at else "local,store" if each.local else "store"
            said = f"{each.pk} {each.at:%Y-%m-%dT%H:%M:%SZ} {each.size_bytes:>12} {each.kind:<8} {where:<11} "
            self.stdout.write((said + formatting.path(each.name)).rstrip())

    def _said(self, agent: str, what: str) -> None:
        self.stdout.write(f"{what}: revision {data_editing.kept(agent).revision}")


NAMES = {"agent", "path", "long", "file", "recursive", "target", "source", "holder", "keeping"}


def _did(text: str) -> str:
    """An agent of whom something may be kept from now on."""
    try:
        is_did(text)
    except ValidationError:
        raise Invalid("agent", f"{text[:80]!r} is not {DID_ACCEPTS}.") from None
    return text


def _name(line: Line) -> str:
    return formatting.path(line.name) + ("/" if line.kind == DIRECTORY else "")


def _in_full(line: Line) -> str:
    """As ls -l has it, with the lease in the place of the owner."""
    mode = stat.filemode(TYPES[line.kind] | line.row.mode) if line.row else "d?????????"
    target = f" -> {formatting.path(line.row.target)}" if line.row and line.kind == "link" else ""
    return f"{mode} {line.holder or '-'!s:<36} {line.size_bytes:>12} {line.changed_at:%Y-%m-%dT%H:%M:%SZ} {_name(line)}{target}"


def _copies(holder: str) -> QuerySet[Snapshot]:
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
