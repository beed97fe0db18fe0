"""manage.py project: list and create projects, move agents between them."""

from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.core.validators import validate_slug
from django.db.models import Count

from leases.management.base import parse_did, report_errors
from leases.models import Agent
from leases.projects import registry
from leases.projects.models import Project
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.formatting import pluralize

MAX_NAME_LENGTH = 63


class Command(BaseCommand):
    help = "List and create projects, the tenants of this installation, and move agents between them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        actions.add_parser("list", help="list the projects with their numbers of agents")
        create = actions.add_parser("create", help="create a project")
        create.add_argument("name", metavar="NAME")
        move = actions.add_parser("move", help="move agents to a project, with the API keys that list them")
        move.add_argument("name", metavar="NAME")
        move.add_argument("agents", nargs="+", metavar="DID")

    def handle(self, *args: Any, action: str, verbosity: int, **options: Any) -> None:
        with report_errors(verbosity):
            getattr(self, f"_{action}")(options)

    def _list(self, options: dict[str, Any]) -> None:
        agents = dict(Agent.objects.order_by().values_list("project").annotate(Count("pk")))
        for project in Project.objects.all():
            self.stdout.write(f"{project.name} {pluralize(agents.get(project.pk, 0), 'agent', 'agents')}")

    def _create(self, options: dict[str, Any]) -> None:
        name = options["name"]
        try:
            validate_slug(name)
        except ValidationError:
            raise CommandError("A name has letters, digits and - _ only.") from None
        if len(name) > MAX_NAME_LENGTH:
            raise CommandError(f"A name has at most {MAX_NAME_LENGTH} characters.")
        _, is_new = registry.create(name, now=database_time.now(), actor=COMMAND_LINE)
        self.stdout.write(f"{name} {'created' if is_new else 'exists'}")

    def _move(self, options: dict[str, Any]) -> None:
        agents = [parse_did(did) for did in options["agents"]]
        moved = registry.move_agents(options["name"], agents, now=database_time.now(), actor=COMMAND_LINE)
        self.stdout.write(f"{pluralize(moved, 'agent', 'agents')} moved to {options['name']}")
