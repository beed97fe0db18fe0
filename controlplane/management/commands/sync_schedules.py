"""manage.py sync_schedules: the queue's schedules are those of controlplane/schedules.py."""

from typing import Any

from django.core.management.base import BaseCommand
from django.utils import timezone

from controlplane import schedules
from leases.management.base import report_errors


class Command(BaseCommand):
    help = "Make the queue's schedules equal to the table in controlplane/schedules.py. Safe to repeat."

    def handle(self, *args: Any, **options: Any) -> None:
        with report_errors(options["verbosity"]):
            counts = schedules.sync_schedules(now=timezone.now())
            done = ", ".join(f"{times} {what}" for what, times in counts.items() if times)
            self.stdout.write(f"schedules: {len(schedules.SCHEDULE)} in place, {done or 'nothing to change'}")
