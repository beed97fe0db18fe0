"""manage.py lease: list, show and renew leases and limit their model calls, as the HTTP API does."""

import json
from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.db.models import QuerySet

from billing.management.options import format_table
from leases import call_limits, leasing
from leases.api.call_limits import serialize_call_limits
from leases.api.lease_documents import build_lease_document, build_status_filter
from leases.api.leases import render_lease_detail
from leases.api.llm_calls import render_grouped_calls
from leases.call_totals import GROUP_COLUMNS
from leases.management.base import parse_did, parse_environment_id, parse_lease_id, report_errors
from leases.management.limit_options import NO_LIMIT
from leases.models import EnvironmentType, Lease, LeaseStatus
from leases.placement import find_type
from sandboxes.audit import COMMAND_LINE
from sandboxes.call_limits import COLUMNS
from sandboxes.db import database_time

LIMIT_FIELDS = {field.name: field for field in EnvironmentType._meta.concrete_fields}


class Command(BaseCommand):
    help = "List, show, renew and limit leases. Further verbs are commands of their own: acquire, join, exec, restart, release."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        listing = actions.add_parser("list", help="list leases, newest first")
        listing.add_argument("--agent", metavar="DID", help="leases of this agent")
        listing.add_argument("--environment", metavar="ID", help="leases in this environment")
        listing.add_argument("--type", metavar="NAME", help="leases of this environment type")
        listing.add_argument("--status", choices=LeaseStatus.values, help="leases with this status")
        listing.add_argument("--limit", type=int, default=50, help="maximum number of rows; default: %(default)s")
        show = actions.add_parser("show", help="print a lease with its sandbox, awake time and model calls")
        calls = actions.add_parser("calls", help="print calls, tokens and cost of a lease's model calls by run, turn or model")
        calls.add_argument("--by", choices=[*GROUP_COLUMNS], default="run", help="group calls by this (default: %(default)s)")
        calls.add_argument("--limit", type=int, default=100, help="maximum number of groups; default: %(default)s")
        renew = actions.add_parser("renew", help="extend a lease to its ttl from now, at most to its hard limit")
        limit = actions.add_parser("limit", help="print the limits on a lease's model calls, or set those that are stated")
        limit.add_argument("--usd", metavar="USD", help=f"for all its model calls, past ones included; {NO_LIMIT!r}: no limit")
        limit.add_argument("--tokens", metavar="NUMBER", help=f"input and output of all its calls; {NO_LIMIT!r}: no limit")
        for parser_ in (listing, show, calls, renew, limit):
            parser_.add_argument("--json", action="store_true", help="one line of JSON, as the HTTP API answers")
        for parser_ in (show, calls, renew, limit):
            parser_.add_argument("lease", metavar="LEASE_ID")

    def handle(self, *args: Any, action: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{action}")(options)

    def _list(self, options: dict[str, Any]) -> None:
        now, leases = database_time.now(), _select(options)
        if options["status"]:
            leases = leases.filter(build_status_filter(options["status"], now=now))
        rows = leases.annotate(document=build_lease_document(now))[: max(options["limit"], 0)]
        documents: list[dict[str, Any]] = [json.loads(text) for text in rows.values_list("document", flat=True)]
        if options["json"]:
            self.stdout.write(json.dumps({"results": documents}))
            return
        for document in documents:
            self.stdout.write(_format_line(document))

    def _show(self, options: dict[str, Any]) -> None:
        lease = Lease.objects.get(pk=parse_lease_id(options["lease"]))
        document = render_lease_detail(lease, now=database_time.now())
        lines = [json.dumps(document)] if options["json"] else [f"{name}: {_format(each)}" for name, each in document.items()]
        self.stdout.write("\n".join(lines))

    def _calls(self, options: dict[str, Any]) -> None:
        lease = Lease.objects.get(pk=parse_lease_id(options["lease"]))
        document = render_grouped_calls(lease.pk, options["by"], limit=max(options["limit"], 1))
        if options["json"]:
            self.stdout.write(json.dumps(document))
            return
        columns = [name for name in document["total"] if name not in ("failed", "refused")]
        groups = [*document["results"], {"key": "total", **document["total"]}]
        rows = [[each["key"] or "(none)", *(str(each[name]) for name in columns)] for each in groups]
        self.stdout.write(format_table([options["by"], *(name.replace("_", " ") for name in columns)], rows))

    def _renew(self, options: dict[str, Any]) -> None:
        lease = Lease.objects.get(pk=parse_lease_id(options["lease"]))
        until = leasing.renew(lease, now=database_time.now()).isoformat(timespec="seconds")
        self.stdout.write(json.dumps({"expires_at": until}) if options["json"] else f"{lease.pk} renewed until {until}")

    def _limit(self, options: dict[str, Any]) -> None:
        pk, now = parse_lease_id(options["lease"]), database_time.now()
        changes = {
            name: _parse_limit(f"--{name}", column, options[name])
            for name, column in COLUMNS.items()
            if options[name] is not None
        }
        if changes:
            call_limits.change_call_limits(pk, changes, now=now, actor=COMMAND_LINE)
        document = serialize_call_limits(Lease.objects.get(pk=pk))
        usd, tokens = (NO_LIMIT if value is None else value for value in document.values())
        self.stdout.write(json.dumps(document) if options["json"] else f"{pk} USD {usd}, tokens {tokens}")


def _parse_limit(option: str, column: str, text: str) -> Any:
    if text == NO_LIMIT:
        return None
    try:
        return LIMIT_FIELDS[column].clean(text, None)
    except ValidationError as error:
        raise CommandError(f"{option}: {error.messages[0]} Or {NO_LIMIT!r}.") from None


def _select(options: dict[str, Any]) -> QuerySet[Lease]:
    leases: QuerySet[Lease] = Lease.objects.all()
    if options["agent"] is not None:
        leases = leases.filter(agent_did=parse_did(options["agent"]))
    if options["environment"] is not None:
        leases = leases.filter(environment_id=parse_environment_id(options["environment"]))
    if options["type"] is not None:
        leases = leases.filter(environment_type=find_type(options["type"]))
    return leases


def _format_line(document: dict[str, Any]) -> str:
    """Format a lease: id, name, type, status, end or its reason, and state of the sandbox."""
    until = f"until {document['expires_at']}" if document["status"] == LeaseStatus.ACTIVE else document["end_reason"]
    state = f"sandbox {document['sandbox']['state']}" if document["sandbox"] else "no sandbox"
    return f"{document['id']} {document['sandbox_id']} {document['environment_type']} {document['status']} {until}, {state}"


def _format(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
