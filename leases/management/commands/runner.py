"""manage.py runner: executes queued runs in a process of its own."""

import signal
import threading
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from leases.queue.runner import Runner
from sandboxes.management.base import refuse_unmigrated


class Command(BaseCommand):
    help = "Execute queued runs until SIGTERM. Runs in progress are finished; a second signal ends them with the process."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--threads", type=int, default=settings.RUNNER_THREADS or 4, help="runs executed at once; default: %(default)s"
        )

    def handle(self, *args: Any, threads: int, **options: Any) -> None:
        refuse_unmigrated()
        runner, stopping = Runner(threads), threading.Event()

        def stop(number: int, frame: Any) -> None:
            signal.signal(number, signal.SIG_DFL)
            stopping.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        runner.start()
        self.stdout.write(f"runner {runner.name}: ready")
        stopping.wait()
        runner.stop()
        runner.join()
