"""Faults of ordinary operation during the load: clocks that jump, a database that refuses or is locked, orderly restarts."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import psycopg

from tests.load.clock import ShiftedClock
from tests.load.postgres import Postgres
from tests.support.servers.engines import PrivateEngine
from tests.support.servers.receiver import WebhookReceiver, never_respond, run_receiver

CLOCK_SHIFTS = (timedelta(hours=1), timedelta(hours=-1), timedelta(days=1), timedelta(days=-1))
DURATION_SECONDS = (2.0, 20.0)
LOCKED_TABLES = ("leases_lease", "sandboxes_sandbox", "sandboxes_run", "leases_idempotentrequest")


class Weather:
    """Faults that pass by themselves. Each verb returns when its fault has passed, with a description."""

    def __init__(self, postgres: Postgres, engine: PrivateEngine, clock: ShiftedClock) -> None:
        self.postgres, self.engine, self.clock = postgres, engine, clock
        self.victims: dict[str, Callable[[random.Random], str]] = {
            "clock": self._shift_clock,
            "daemon": self._restart_daemon,
            "locks": self._lock_table,
            "read-only": self._refuse_writes,
            "restart": self._restart_database,
        }

    def _shift_clock(self, random: random.Random) -> str:
        """Set the clock of all processes of the control plane forward or back, and later right."""
        shift, seconds = random.choice(CLOCK_SHIFTS), random.uniform(*DURATION_SECONDS)
        self.clock.set(shift)
        time.sleep(seconds)
        self.clock.set(timedelta(0))
        return f"off by {shift.total_seconds():+.0f} s for {seconds:.1f} s"

    def _restart_daemon(self, random: random.Random) -> str:
        """Stop the Docker daemon in order, as an upgrade of its package does, and start it again."""
        seconds = random.uniform(0.0, 3.0)
        self.engine.shut_down()
        time.sleep(seconds)
        self.engine.start()
        return f"stopped in order, down for {seconds:.1f} s"

    def _restart_database(self, random: random.Random) -> str:
        seconds = random.uniform(0.0, 3.0)
        self.postgres.stop("fast")
        time.sleep(seconds)
        self.postgres.start()
        return f"stopped in order, down for {seconds:.1f} s"

    def _lock_table(self, random: random.Random) -> str:
        """Lock a table against all use."""
        table, seconds = random.choice(LOCKED_TABLES), random.uniform(*DURATION_SECONDS)
        with psycopg.connect(self.postgres.url) as connection:
            connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            time.sleep(seconds)
        return f"{table} for {seconds:.1f} s"

    def _refuse_writes(self, random: random.Random) -> str:
        """Let the database refuse writes, as one does whose disk is full or that is a standby."""
        seconds = random.uniform(*DURATION_SECONDS)
        with self._setting("default_transaction_read_only", "on") as connection:
            time.sleep(0.2)  # the server's processes read their settings between statements
            with suppress(psycopg.errors.ReadOnlySqlTransaction):
                connection.execute("CREATE TABLE refused ()")
                raise AssertionError("the database accepts writes")
            time.sleep(seconds)
        return f"for {seconds:.1f} s"

    @contextmanager
    def _setting(self, name: str, value: str) -> Iterator[psycopg.Connection]:
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET {name} = {value}")
            connection.execute("SELECT pg_reload_conf()")
            try:
                yield connection
            finally:
                connection.execute(f"ALTER SYSTEM RESET {name}")
                connection.execute("SELECT pg_reload_conf()")


@contextmanager
def run_receivers() -> Iterator[tuple[WebhookReceiver, WebhookReceiver]]:
    """Run a receiver of webhooks that accepts and never answers, and one that works."""
    with run_receiver() as silent, run_receiver() as healthy:
        silent.answer = never_respond
        yield silent, healthy
