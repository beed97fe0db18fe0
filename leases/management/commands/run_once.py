"""manage.py run_once: a command in a sandbox of its own, from nothing to a result."""

import re
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError
from django.utils import timezone

from leases import one_shot
from leases.errors import Invalid
from leases.management.base import duration, one_line
from leases.models import DID, DID_ACCEPTS
from leases.one_shot import How, Result, Wish, run_once
from sandboxes.providers.base import ProviderError
from sandboxes.state import directories
from sandboxes.state.spool import spool
from sandboxes.storage.base import StoreError

NOT_RUN, INTERNAL, OOM_KILLED, TIMED_OUT, CONTAINER_FAILED = 121, 122, 123, 124, 125
CODES = {
    How.OK: 0,
    How.TIMEOUT: TIMED_OUT,
    How.OOM_KILLED: OOM_KILLED,
    How.CONTAINER_FAILED: CONTAINER_FAILED,
    How.INTERNAL: INTERNAL,
}


class Command(BaseCommand):
    help = f"""Run one command in a sandbox of its own, which is gone afterwards: its output, and its exit code, or

  {TIMED_OUT}  it was killed after the timeout, as timeout(1) has it
  {OOM_KILLED}  it was killed for memory
  {CONTAINER_FAILED}  its sandbox could not be started, did not answer, or was lost
  {INTERNAL}  the control plane failed, or the workspace could not be brought back
  {NOT_RUN}  nothing was run: something is wrong with the request, or there is no place

All of these are said on stderr, too: a command may end with the same codes by itself."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.formatter_class = RawDescriptionHelpFormatter
        return parser

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--agent", required=True, metavar="DID")
        parser.add_argument(
            "--workspace", type=Path, metavar="DIR",
            help="what /workspace has at first; what the command changed, made or removed there is done in DIR afterwards, "
            "names of .home apart",
        )  # fmt: skip
        parser.add_argument("--timeout", metavar="S", help='seconds, or "5m"; default: LEASEHOLD_EXEC_TIMEOUT')
        parser.add_argument("--memory", type=int, metavar="MIB", help="default: what the pool gives")
        parser.add_argument("--stdin", metavar="FILE", help="what the command reads; - is this command's own")
        parser.add_argument("--type", default=one_shot.TYPE, help=f"the environment type; default: {one_shot.TYPE}")
        parser.add_argument("--pool", default="", help="default: that of the environment type")
        parser.add_argument("argv", nargs="+", help="after --, the program and its arguments; no shell")

    def handle(self, *args: Any, verbosity: int, **given: Any) -> None:
        try:
            with one_line(verbosity), _ending_politely(), ExitStack() as stack:
                wish = _wish(stack, **given)
                result = run_once(wish, now=timezone.now(), actor="command line")
                self._print(result, wish)
                code = self._code(result, given["workspace"], wish)
        except CommandError as failed:  # without a database nobody knows how far it came
            failed.returncode = INTERNAL if isinstance(failed.__cause__, DatabaseError) else NOT_RUN
            raise
        sys.exit(code)

    def _code(self, result: Result, workspace: Path | None, wish: Wish) -> int:
        """The exit code, once the workspace is as the command left it."""
        missed = workspace is not None and not (result.brought_back and self._bring_back(workspace, wish))
        if result.outcome == How.FAILED and not missed:
            assert result.exit_code is not None  # which is why it failed
            return result.exit_code
        return CODES[How.INTERNAL if missed and result.outcome in (How.OK, How.FAILED) else result.outcome or How.INTERNAL]

    def _print(self, result: Result, wish: Wish) -> None:
        sys.stdout.buffer.write(result.stdout)  # bytes: self.stdout would make text of them
        sys.stdout.flush()
        sys.stderr.buffer.write(result.stderr)
        sys.stderr.flush()
        if result.truncated:
            self._say(f"output after {settings.EXEC_OUTPUT_CAP} bytes was dropped")
        if result.outcome == How.TIMEOUT:
            self._say(f"killed after {wish.timeout.total_seconds():g} s")
        elif result.outcome == How.OOM_KILLED:
            self._say("out of memory")
        elif result.outcome in (How.CONTAINER_FAILED, How.INTERNAL):
            self._say(f"{result.outcome}: {result.note}")
        elif result.note:
            self._say(result.note)
        if not result.cleaned_up:
            self._say("its sandbox is not confirmed gone yet; the sweeps go on until it is")

    def _bring_back(self, workspace: Path, wish: Wish) -> bool:
        assert wish.workspace  # as _wish has it
        assert wish.back
        try:
            directories.bring_back(workspace, wish.workspace, wish.back)
        except (ProviderError, StoreError, OSError) as failed:
            self._say(f"the workspace could not be brought back: {failed}")
            return False
        return True

    def _say(self, what: str) -> None:
        self.stderr.write(f"run_once: {what}")


@contextmanager
def _ending_politely() -> Iterator[None]:
    """SIGTERM is an exit like any other in this block: what was begun is cleaned up before."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wish(stack: ExitStack, *, agent: str, workspace: Path | None, stdin: str | None, **given: Any) -> Wish:
    if not re.fullmatch(DID, agent, re.ASCII) or len(agent) > 255:
        raise Invalid("agent", f"--agent: {agent[:80]!r} is not {DID_ACCEPTS}.")
    wish = Wish(
        agent, given["argv"], _timeout(given["timeout"]),
        memory_mib=given["memory"], environment_type=given["type"], pool=given["pool"],
    )  # fmt: skip
    try:
        if stdin:
            wish = replace(wish, stdin=sys.stdin.buffer.read() if stdin == "-" else Path(stdin).read_bytes())
        if workspace:
            wish = replace(wish, workspace=stack.enter_context(spool()), back=stack.enter_context(spool()))
            assert wish.workspace
            directories.pack(workspace, wish.workspace)
    except (StoreError, OSError) as failed:
        raise CommandError(str(failed)) from failed
    return wish


def _timeout(text: str | None) -> timedelta:
    longest: timedelta = duration("--timeout", text) if text else settings.EXEC_TIMEOUT
    if longest > settings.EXEC_TIMEOUT_MOST:
        raise CommandError(f"--timeout: at most {settings.EXEC_TIMEOUT_MOST.total_seconds():g} seconds.")
    return longest
