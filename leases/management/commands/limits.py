"""manage.py limits: print or set the limits of the resources that a request may state."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from leases.errors import InvalidRequest
from leases.management.base import report_errors
from leases.management.limit_options import add_limit_options, parse_limits
from leases.models import AgentKey, EnvironmentType
from leases.resource_limits import describe_limits, set_limits
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.models import Pool
from sandboxes.models.resource_limits import ResourceLimits

LEVELS: dict[str, tuple[type[ResourceLimits], str]] = {
    "key": (AgentKey, "prefix"), "type": (EnvironmentType, "name"), "pool": (Pool, "name"),
}  # fmt: skip


class Command(BaseCommand):
    help = "Print or set the limits of the resources that a request may state. Without options they are printed."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("level", choices=[*LEVELS], metavar="LEVEL", help="key, type (environment type) or pool")
        parser.add_argument("name", metavar="NAME", help="prefix of the key, name of the type or of the pool")
        add_limit_options(parser)

    def handle(self, *args: Any, level: str, name: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            row = _find_row(level, name)
            set_limits(row, parse_limits(options), actor=COMMAND_LINE, now=database_time.now())
        self.stdout.write(f"{level} {name}: {'; '.join(describe_limits(row)) or 'no limits'}")


def _find_row(level: str, name: str) -> ResourceLimits:
    model, column = LEVELS[level]
    row = model._default_manager.filter(**{column: name}).first()
    if row is None:
        raise InvalidRequest("name", f"There is no {model._meta.verbose_name} {name[:80]!r}.")
    return row
