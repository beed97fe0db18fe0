"""manage.py acquire: acquire a lease, as the HTTP API does."""

import json as encoding
import re
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from leases import leasing
from leases.errors import InvalidRequest
from leases.management.base import parse_duration, report_errors
from leases.models import DID_DESCRIPTION, DID_PATTERN, ENVIRONMENT_ID_DESCRIPTION, ENVIRONMENT_ID_PATTERN
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Acquire the lease of an agent in an environment. A lease that is already held is printed unchanged."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--agent", required=True, metavar="DID")
        parser.add_argument("--environment", required=True, metavar="ID")
        parser.add_argument("--type", required=True, help="environment type, such as catan")
        parser.add_argument("--ttl", help='the lease ends after this time without use: seconds, or "5m"')
        parser.add_argument("--json", action="store_true", help="one line of JSON: id, is_new, expires_at")

    def handle(self, *args: Any, agent: str, environment: str, ttl: str | None, json: bool, **options: Any) -> None:
        with report_errors(options["verbosity"]):
            if not re.fullmatch(DID_PATTERN, agent, re.ASCII) or len(agent) > 255:
                raise InvalidRequest("agent", f"--agent: {agent[:80]!r} is not {DID_DESCRIPTION}.")
            if not re.fullmatch(ENVIRONMENT_ID_PATTERN, environment, re.ASCII):
                raise InvalidRequest("environment", f"--environment: {environment[:80]!r} is not {ENVIRONMENT_ID_DESCRIPTION}.")
            duration = parse_duration("--ttl", ttl) if ttl else None
            request = leasing.LeaseRequest(agent, environment, options["type"], ttl=duration)
            lease, is_new = leasing.acquire(request, now=database_time.now(), actor=COMMAND_LINE)
            until = lease.expires_at.isoformat(timespec="seconds")
            if json:
                self.stdout.write(encoding.dumps({"id": str(lease.pk), "is_new": is_new, "expires_at": until}))
            else:
                outcome = "granted" if is_new else "already held"
                self.stdout.write(f"{lease.pk} {outcome}: {lease.sandbox_id} until {until}")
