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
from leases.errors import InvalidRequest
from leases.management.base import parse_duration, report_errors
from leases.models import DID_DESCRIPTION, DID_PATTERN
from leases.one_shot import OneShotOutcome, OneShotRequest, OneShotResult, run_once
from sandboxes.providers.base import ProviderError
from sandboxes.state import directories
from sandboxes.state.spool import open_spool
from sandboxes.storage.base import StoreError

EXIT_NOT_RUN, EXIT_INTERNAL, EXIT_OOM_KILLED, EXIT_TIMED_OUT, EXIT_CONTAINER_FAILED = 121, 122, 123, 124, 125
EXIT_CODES = {
    OneShotOutcome.OK: 0,
    OneShotOutcome.TIMEOUT: EXIT_TIMED_OUT,
    OneShotOutcome.OOM_KILLED: EXIT_OOM_KILLED,
    OneShotOutcome.CONTAINER_FAILED: EXIT_CONTAINER_FAILED,
    OneShotOutcome.INTERNAL: EXIT_INTERNAL,
}


class Command(BaseCommand):
    help = f"""Run one command in a sandbox of its own, which is gone afterwards: its output, and its exit code, or

  {EXIT_TIMED_OUT}  it was killed after the timeout, as timeout(1) has it
  {EXIT_OOM_KILLED}  it was killed for memory
  {EXIT_CONTAINER_FAILED}  its sandbox could not be started, did not answer, or was lost
  {EXIT_INTERNAL}  the control plane failed, or the workspace could not be brought back
  {EXIT_NOT_RUN}  nothing was run: something is wrong with the request, or there is no place

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
        parser.add_argument(
            "--type",
            default=one_shot.DEFAULT_ENVIRONMENT_TYPE,
            help=f"the environment type; default: {one_shot.DEFAULT_ENVIRONMENT_TYPE}",
        )
        parser.add_argument("--pool", default="", help="default: that of the environment type")
        parser.add_argument("argv", nargs="+", help="after --, the program and its arguments; no shell")

    def handle(self, *args: Any, verbosity: int, **given: Any) -> None:
        try:
            with report_errors(verbosity), _exit_on_sigterm(), ExitStack() as stack:
                wish = _build_one_shot_request(stack, **given)
                result = run_once(wish, now=timezone.now(), actor="command line")
                self._print(result, wish)
                code = self._code(result, given["workspace"], wish)
        except CommandError as failed:  # without a database nobody knows how far it came
            failed.returncode = EXIT_INTERNAL if isinstance(failed.__cause__, DatabaseError) else EXIT_NOT_RUN
            raise
        sys.exit(code)

    def _code(self, result: OneShotResult, workspace: Path | None, wish: OneShotRequest) -> int:
        """The exit code, once the workspace is as the command left it."""
        missed = workspace is not None and not (result.workspace_returned and self._bring_back(workspace, wish))
        if result.outcome == OneShotOutcome.FAILED and not missed:
            assert result.exit_code is not None  # which is why it failed
            return result.exit_code
        return EXIT_CODES[
            OneShotOutcome.INTERNAL
            if missed and result.outcome in (OneShotOutcome.OK, OneShotOutcome.FAILED)
            else result.outcome or OneShotOutcome.INTERNAL
        ]

    def _print(self, result: OneShotResult, wish: OneShotRequest) -> None:
        sys.stdout.buffer.write(result.stdout)  # bytes: self.stdout would make text of them
        sys.stdout.flush()
        sys.stderr.buffer.write(result.stderr)
        sys.stderr.flush()
        if result.truncated:
            self._say(f"output after {settings.EXEC_OUTPUT_CAP} bytes was dropped")
        if result.outcome == OneShotOutcome.TIMEOUT:
            self._say(f"killed after {wish.timeout.total_seconds():g} s")
        elif result.outcome == OneShotOutcome.OOM_KILLED:
            self._say("out of memory")
        elif result.outcome in (OneShotOutcome.CONTAINER_FAILED, OneShotOutcome.INTERNAL):
            self._say(f"{result.outcome}: {result.note}")
        elif result.note:
            self._say(result.note)
        if not result.cleaned_up:
            self._say("its sandbox is not confirmed gone yet; the sweeps go on until it is")

    def _bring_back(self, workspace: Path, wish: OneShotRequest) -> bool:
        assert wish.workspace  # as _wish has it
        assert wish.back
        try:
            directories.apply_changes(workspace, wish.workspace, wish.back)
        except (ProviderError, StoreError, OSError) as failed:
            self._say(f"the workspace could not be brought back: {failed}")
            return False
        return True

    def _say(self, what: str) -> None:
        self.stderr.write(f"run_once: {what}")


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """SIGTERM is an exit like any other in this block: what was begun is cleaned up before."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _build_one_shot_request(
    stack: ExitStack, *, agent: str, workspace: Path | None, stdin: str | None, **given: Any
) -> OneShotRequest:
    if not re.fullmatch(DID_PATTERN, agent, re.ASCII) or len(agent) > 255:
        raise InvalidRequest("agent", f"--agent: {agent[:80]!r} is not {DID_DESCRIPTION}.")
    wish = OneShotRequest(
        agent, given["argv"], _parse_timeout(given["timeout"]),
        memory_mib=given["memory"], environment_type=given["type"], pool=given["pool"],
    )  # fmt: skip
    try:
        if stdin:
            wish = replace(wish, stdin=sys.stdin.buffer.read() if stdin == "-" else Path(stdin).read_bytes())
        if workspace:
            wish = replace(wish, workspace=stack.enter_context(open_spool()), back=stack.enter_context(open_spool()))
            assert wish.workspace
            directories.pack(workspace, wish.workspace)
    except (StoreError, OSError) as failed:
        raise CommandError(str(failed)) from failed
    return wish


def _parse_timeout(text: str | None) -> timedelta:
    longest: timedelta = parse_duration("--timeout", text) if text else settings.EXEC_TIMEOUT
    if longest > settings.EXEC_TIMEOUT_MOST:
        raise CommandError(f"--timeout: at most {settings.EXEC_TIMEOUT_MOST.total_seconds():g} seconds.")
    return longest
