"""manage.py migrate: Django's command, beside processes that serve, and with one line for errors that a repetition solves."""

import time
from datetime import datetime
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.core.management.commands import migrate
from django.db import Error as DatabaseError
from django.db import connections
from django.db.migrations.exceptions import InconsistentMigrationHistory
from django.db.migrations.recorder import MigrationRecorder

from leases.management.base import parse_duration
from sandboxes.db import database_time, dialect, migrations
from sandboxes.hosts import registry
from sandboxes.management.base import first_line
from sandboxes.models import Host

RETRY_INTERVAL_SECONDS = 3.0  # longer than the lock timeout: requests that waited behind it are served meanwhile
AGAIN = "Run it again; nothing is lost."
PARTIAL = (
    "app_label",
    "check_unapplied",
    "plan",
    "prune",
    "fake",
    "fake_initial",
)  # options with which Django's own command runs


class Command(migrate.Command):
    help = "Apply the migrations of this version. Other processes may serve meanwhile. A repetition continues at the next one."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--wait", default="5m", help="time to wait for locks of other transactions; default: %(default)s")

    def handle(self, *args: Any, wait: str, **options: Any) -> None:
        self.connection = connections[options["database"]]
        self.current: tuple[str, str] | None = None
        deadline = time.monotonic() + parse_duration("--wait", wait).total_seconds()
        try:
            if not any(options[name] for name in PARTIAL):
                self._prepare(verbosity=options["verbosity"])
            while not self._apply(deadline, *args, **options):
                self.connection.close()
                time.sleep(RETRY_INTERVAL_SECONDS)
        except InconsistentMigrationHistory as error:
            raise CommandError(migrations.HISTORY_DIFFERS.format(first_line(error))) from error

    def migration_progress_callback(self, action: str, migration: Any = None, fake: bool = False) -> None:
        if action in ("apply_start", "unapply_start"):
            self.current = (migration.app_label, migration.name)
        super().migration_progress_callback(action, migration, fake)

    def _prepare(self, *, verbosity: int) -> None:
        """Refuse a database that this version cannot migrate. Name the hosts whose processes serve it."""
        try:
            status = migrations.read_status()
            if status.conflict or status.explain_newer():
                raise CommandError(status.explain_newer() or status.explain_error())
            serving = find_serving_hosts(now=database_time.now()) if status.unapplied else []
        except DatabaseError as error:
            if dialect.is_unavailable(error):
                raise CommandError(f"The database does not respond: {first_line(error)}") from error
            raise
        if serving and verbosity:
            self.stderr.write(
                f"Processes serve this database: {', '.join(serving)}. They go on with their version, and requests may wait "
                "for seconds. Replace these processes after the migrations."
            )

    def _apply(self, deadline: float, *args: Any, **options: Any) -> bool:
        """Run Django's command. Return False if it has to be repeated, for a lock or because of another `manage.py migrate`."""
        try:
            super().handle(*args, **options)
        except DatabaseError as error:
            name = ".".join(self.current) if self.current else "migrate"
            if dialect.is_unavailable(error):
                raise CommandError(f"{name}: the connection to the database was lost: {first_line(error)}. {AGAIN}") from error
            if dialect.is_lock_conflict(error):
                if time.monotonic() >= deadline:
                    message = f"{name}: another transaction holds a lock for longer than --wait: {first_line(error)}. {AGAIN}"
                    raise CommandError(message) from error
                self._note(f"{name} waits for a lock of another transaction.", options["verbosity"])
                return False
            if not self._is_applied_meanwhile():
                raise
            self._note(f"{name} was applied by another manage.py migrate.", options["verbosity"])
            return False
        return True

    def _is_applied_meanwhile(self) -> bool:
        return bool(self.current) and self.current in MigrationRecorder(self.connection).applied_migrations()

    def _note(self, line: str, verbosity: int) -> None:
        if verbosity:
            self.stderr.write(f"\n{line}")


def find_serving_hosts(*, now: datetime) -> list[str]:
    """Return the hosts with a recent heartbeat of their worker, each with its version."""
    table = Host._meta.db_table
    connection = dialect.get_connection()
    if table not in connection.introspection.table_names():
        return []
    with connection.cursor() as cursor:
        columns = {column.name for column in connection.introspection.get_table_description(cursor, table)}
    if not {"name", "version", "heartbeat_at", "lost_at"} <= columns:
        return []  # an earlier version than the columns
    hosts = registry.find_live_hosts(now=now).values_list("name", "version")
    return [f"{name} (version {version})" if version else name for name, version in hosts]
