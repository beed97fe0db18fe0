"""manage.py run_once: run one command in a new sandbox that is destroyed afterwards."""

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
from uuid import UUID

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError

from leases import one_shot, run_ids
from leases.errors import InvalidRequest
from leases.management.base import parse_duration, report_errors
from leases.models import DID_DESCRIPTION, DID_PATTERN
from leases.one_shot import OneShotOutcome, OneShotRequest, OneShotResult, run_once
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.management.base import require_utf8
from sandboxes.providers.errors import ProviderError
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
    help = f"""Run one command in a new sandbox, which is destroyed afterwards. Prints its output and exits with its code, or

  {EXIT_TIMED_OUT}  killed after the timeout, as with timeout(1)
  {EXIT_OOM_KILLED}  killed at its memory limit
  {EXIT_CONTAINER_FAILED}  the sandbox could not be started, did not respond, or was lost
  {EXIT_INTERNAL}  the control plane failed, or the workspace could not be returned
  {EXIT_NOT_RUN}  the command was not run: invalid request, or no capacity

Each of these is also reported on stderr, since a command can exit with the same codes."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.formatter_class = RawDescriptionHelpFormatter
        return parser

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--agent", required=True, metavar="DID")
        parser.add_argument(
            "--workspace", type=Path, metavar="DIR",
            help="initial content of /workspace; changes that the command makes there, except in .home, are applied to DIR "
            "afterwards",
        )  # fmt: skip
        parser.add_argument("--timeout", metavar="S", help='seconds, or "5m"; default: LEASEHOLD_EXEC_TIMEOUT')
        parser.add_argument("--memory", type=int, metavar="MIB", help="memory limit; default: limit of the pool")
        parser.add_argument("--stdin", metavar="FILE", help="standard input of the command; - is stdin")
        parser.add_argument(
            "--type",
            default=one_shot.DEFAULT_ENVIRONMENT_TYPE,
            help=f"environment type; default: {one_shot.DEFAULT_ENVIRONMENT_TYPE}",
        )
        parser.add_argument("--pool", default="", help="default: pool of the environment type")
        parser.add_argument(
            "--no-llm-proxy", action="store_false", dest="llm_proxy", help="refuse the model calls of the command"
        )
        parser.add_argument("--run-id", metavar="UUID", help="random UUID of the run; an id of an earlier run is refused")
        parser.add_argument("argv", nargs="+", help="after --: program and arguments, run without a shell")

    def handle(self, *args: Any, verbosity: int, **options: Any) -> None:
        try:
            with report_errors(verbosity), _exit_on_sigterm(), ExitStack() as stack:
                request = _build_one_shot_request(stack, **options)
                result = run_once(request, now=database_time.now(), actor=COMMAND_LINE)
                self._print(result, request)
                code = self._compute_exit_code(result, options["workspace"], request)
        except CommandError as failed:  # after a database error the run may have started
            failed.returncode = EXIT_INTERNAL if isinstance(failed.__cause__, DatabaseError) else EXIT_NOT_RUN
            raise
        sys.exit(code)

    def _compute_exit_code(self, result: OneShotResult, workspace: Path | None, request: OneShotRequest) -> int:
        """Apply the returned workspace and compute the exit code."""
        workspace_failed = workspace is not None and not (result.workspace_returned and self._apply_changes(workspace, request))
        if result.outcome == OneShotOutcome.FAILED and not workspace_failed:
            assert result.exit_code is not None  # a failed command has an exit code
            return result.exit_code
        return EXIT_CODES[
            OneShotOutcome.INTERNAL
            if workspace_failed and result.outcome in (OneShotOutcome.OK, OneShotOutcome.FAILED)
            else result.outcome or OneShotOutcome.INTERNAL
        ]

    def _print(self, result: OneShotResult, request: OneShotRequest) -> None:
        sys.stdout.buffer.write(result.stdout)  # self.stdout would decode the bytes
        sys.stdout.flush()
        sys.stderr.buffer.write(result.stderr)
        sys.stderr.flush()
        if result.truncated:
            self._print_error(f"output beyond {settings.EXEC_OUTPUT_CAP} bytes was dropped")
        if result.outcome == OneShotOutcome.TIMEOUT:
            self._print_error(f"killed after {request.timeout.total_seconds():g} s")
        elif result.outcome == OneShotOutcome.OOM_KILLED:
            self._print_error("out of memory")
        elif result.outcome in (OneShotOutcome.CONTAINER_FAILED, OneShotOutcome.INTERNAL):
            self._print_error(f"{result.outcome}: {result.note}")
        elif result.note:
            self._print_error(result.note)
        if not result.cleaned_up:
            self._print_error("the destruction of the sandbox is not confirmed yet; the sweeps continue it")

    def _apply_changes(self, workspace: Path, request: OneShotRequest) -> bool:
        assert request.workspace  # set by _build_one_shot_request
        assert request.output
        try:
            directories.apply_changes(workspace, request.workspace, request.output)
        except (ProviderError, StoreError, OSError) as failed:
            self._print_error(f"the workspace could not be returned: {failed}")
            return False
        return True

    def _print_error(self, message: str) -> None:
        self.stderr.write(f"run_once: {message}")


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit within the block, so that the run is cleaned up."""
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _build_one_shot_request(
    stack: ExitStack, *, agent: str, workspace: Path | None, stdin: str | None, **options: Any
) -> OneShotRequest:
    if not re.fullmatch(DID_PATTERN, agent, re.ASCII) or len(agent) > 255:
        raise InvalidRequest("agent", f"--agent: {agent[:80]!r} is not {DID_DESCRIPTION}.")
    for word in options["argv"]:
        require_utf8("argv", word)
    request = OneShotRequest(
        agent, options["argv"], _parse_timeout(options["timeout"]),
        memory_mib=options["memory"], environment_type=options["type"], pool=options["pool"], llm_proxy=options["llm_proxy"],
    )  # fmt: skip
    if options["run_id"]:
        request = replace(request, run_id=_parse_run_id(options["run_id"]))
    try:
        if stdin:
            request = replace(request, stdin=sys.stdin.buffer.read() if stdin == "-" else Path(stdin).read_bytes())
        if workspace:
            request = replace(request, workspace=stack.enter_context(open_spool()), output=stack.enter_context(open_spool()))
            assert request.workspace
            directories.pack(workspace, request.workspace)
    except (StoreError, OSError) as failed:
        raise CommandError(str(failed)) from failed
    return request


def _parse_run_id(text: str) -> UUID:
    try:
        run_id = UUID(text)
    except ValueError:
        raise InvalidRequest("run_id", f"--run-id: {text[:80]!r} is not a UUID.") from None
    if not run_ids.is_random(run_id):
        raise InvalidRequest("run_id", "--run-id: must be a random UUID, version 4 or 7.")
    return run_id


def _parse_timeout(text: str | None) -> timedelta:
    timeout: timedelta = parse_duration("--timeout", text) if text else settings.EXEC_TIMEOUT
    if timeout > settings.EXEC_TIMEOUT_MOST:
        raise CommandError(f"--timeout: at most {settings.EXEC_TIMEOUT_MOST.total_seconds():g} seconds.")
    return timeout
