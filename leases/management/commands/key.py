"""manage.py key: list and show API keys, without their secrets."""

import json
from argparse import ArgumentParser
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from leases import api_keys
from leases.management.base import parse_did, report_errors
from leases.models import AgentKey
from leases.resource_limits import describe_limits
from sandboxes.db import database_time
from sandboxes.db.clock import format_optional_timestamp, format_timestamp


class Command(BaseCommand):
    help = "List and show API keys. Further verbs are commands of their own: create_key, rotate_key, revoke_key, limits."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        listing = actions.add_parser("list", help="list keys, newest first")
        listing.add_argument("--agent", metavar="DID", help="keys that list this agent")
        listing.add_argument("--active", action="store_true", help="only keys that are neither revoked nor expired")
        show = actions.add_parser("show", help="print agents, scopes, limits, last use and expiry of a key")
        show.add_argument("prefix", metavar="PREFIX", help="prefix of the key, as the console shows it")
        for parser_ in (listing, show):
            parser_.add_argument("--json", action="store_true", help="one line of JSON")

    def handle(self, *args: Any, action: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{action}")(options)

    def _list(self, options: dict[str, Any]) -> None:
        agent = parse_did(options["agent"]) if options["agent"] is not None else None
        now = database_time.now()
        documents = [
            build_key_document(row, now=now)
            for row in AgentKey.objects.select_related("project")
            if agent is None or agent in row.dids  # in Python, because SQLite has no containment of JSON arrays
        ]
        if options["active"]:
            documents = [document for document in documents if document["state"] == "active"]
        if options["json"]:
            self.stdout.write(json.dumps({"results": documents}))
            return
        for document in documents:
            self.stdout.write(_format_line(document))

    def _show(self, options: dict[str, Any]) -> None:
        row = api_keys.find_by_prefix(options["prefix"])
        if row is None:
            raise CommandError(f"There is no API key {options['prefix'][:12]!r}.")
        document = build_key_document(row, now=database_time.now())
        lines = [json.dumps(document)] if options["json"] else [f"{name}: {_format(each)}" for name, each in document.items()]
        self.stdout.write("\n".join(lines))


def build_key_document(row: AgentKey, *, now: datetime) -> dict[str, Any]:
    """Return the fields of a key that are not secret."""
    return {
        "prefix": row.prefix,
        "name": row.name,
        "state": "revoked" if row.revoked_at else "expired" if api_keys.is_expired(row, now) else "active",
        "operator": row.operator,
        "agents": row.dids,
        "project": row.project.name,
        "scopes": row.scopes,
        "environment_types": row.allowed_environment_types,
        "pools": row.allowed_pools,
        "limits": describe_limits(row),
        "created_at": format_timestamp(row.created_at),
        "rotated_at": format_optional_timestamp(row.rotated_at),
        "last_used_at": format_optional_timestamp(row.last_used_at),
        "expires_at": format_optional_timestamp(row.expires_at),
        "revoked_at": format_optional_timestamp(row.revoked_at),
    }


def _format_line(document: dict[str, Any]) -> str:
    """Format a key: prefix, state, agents, scopes, last use, expiry and name."""
    agents = "all agents" if document["operator"] else ",".join(document["agents"])
    used, expires = document["last_used_at"] or "never", document["expires_at"] or "never"
    state, scopes = document["state"], ",".join(document["scopes"])
    return f"{document['prefix']} {state} {agents} {scopes} used {used} expires {expires} {document['name']}".rstrip()


def _format(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return "yes" if value is True else "no" if value is False else value or "-"
