"""manage.py check: Django's command, and the migrations of the database."""

from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands import check
from django.db import DatabaseError

from sandboxes.db import migrations
from sandboxes.management.base import first_line


class Command(check.Command):
    def handle(self, *app_labels: Any, **options: Any) -> None:
        super().handle(*app_labels, **options)
        if app_labels or options["tags"] or options["list_tags"]:
            return
        try:
            status = migrations.read_status()
        except DatabaseError as error:
            self.stderr.write(f"The migrations of the database are not checked: {first_line(error)}")
            return
        if status.conflict:
            raise CommandError(status.explain_error())
        if line := status.explain_error() or status.explain_newer():
            self.stderr.write(line)
