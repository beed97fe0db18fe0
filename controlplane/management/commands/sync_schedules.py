"""manage.py sync_schedules: write the schedule of controlplane/schedules.py to the queue."""

from typing import Any

from django.core.management.base import BaseCommand

from controlplane import schedules
from leases.management.base import report_errors
from sandboxes.db import database_time


class Command(BaseCommand):
    help = "Make the queue's schedules equal to the table in controlplane/schedules.py. Idempotent."

    def handle(self, *args: Any, **options: Any) -> None:
        with report_errors(options["verbosity"]):
            counts = schedules.sync_schedules(now=database_time.now())
            changes = ", ".join(f"{count} {change}" for change, count in counts.items() if count)
            self.stdout.write(f"schedules: {len(schedules.SCHEDULE)} in place, {changes or 'nothing to change'}")
