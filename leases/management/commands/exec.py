"""manage.py exec: run a command in a lease's sandbox, which is started or woken first."""

import sys
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from leases import execution, shells
from leases.management.base import parse_duration, parse_lease_id, report_errors
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.management.base import require_utf8
from sandboxes.runs.operations import Command as Run

EXIT_TIMED_OUT = 124  # as timeout(1)


class Command(BaseCommand):
    help = "Run a command in a lease's sandbox. Prints its output and exits with its code, or 124 after a timeout."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("lease", metavar="LEASE_ID")
        parser.add_argument("--timeout", help='seconds, or "5m"; default: LEASEHOLD_EXEC_TIMEOUT')
        parser.add_argument("--shell", metavar="NAME", help="shell of the lease whose variables and working directory apply")
        parser.add_argument("argv", nargs="+", help="after --: program and arguments, run without a shell")

    def handle(self, *args: Any, lease: str, timeout: str | None, shell: str | None, argv: list[str], **options: Any) -> None:
        with report_errors(options["verbosity"]):
            pk = parse_lease_id(lease)
            duration = parse_duration("--timeout", timeout) if timeout else settings.EXEC_TIMEOUT
            if duration > settings.EXEC_TIMEOUT_MOST:
                raise CommandError(f"--timeout: at most {settings.EXEC_TIMEOUT_MOST.total_seconds():g} seconds.")
            for word in argv:
                require_utf8("argv", word)
            context = shells.build_context(pk, shell, cwd=None, env={})
            run = Run(argv=argv, timeout=duration, env=context.env, cwd=context.cwd)
            _, result = execution.exec_command(pk, run, now=database_time.now(), actor=COMMAND_LINE)
            sys.stdout.buffer.write(result.stdout)  # self.stdout would decode the bytes
            sys.stdout.flush()
            sys.stderr.buffer.write(result.stderr)
            sys.stderr.flush()
            if result.truncated:
                self.stderr.write(f"exec: output beyond {settings.EXEC_OUTPUT_CAP} bytes was dropped")
            if result.timed_out:
                self.stderr.write(f"exec: killed after {duration.total_seconds():g} s")
            elif result.oom:
                self.stderr.write("exec: out of memory")
            sys.exit(EXIT_TIMED_OUT if result.timed_out else result.exit_code)
