"""manage.py qcluster: run the queue worker of this host."""

import os
import sys
from typing import Any

from django.core.management.base import CommandError
from django_q.conf import Conf
from django_q.management.commands import qcluster

from sandboxes.hosts import registry
from sandboxes.providers.base import ProviderError

QUEUE_VARIABLE = "Q_CLUSTER_NAME"  # read by django-q2 when the process starts


class Command(qcluster.Command):
    help = "Run the queue worker of this host: its sweeps, and the tasks of its sandboxes."

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the worker. Starts this program again if the queue's name is not set: django-q2 reads it at import only."""
        if not options.get("cluster_name") and Conf.CLUSTER_NAME == Conf.PREFIX:
            try:
                queue = registry.get_queue_name()
            except ProviderError as error:
                raise CommandError(f"The queue of this host is not known until its engine responds: {error}") from error
            os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {QUEUE_VARIABLE: queue})  # noqa: S606
        super().handle(*args, **options)
