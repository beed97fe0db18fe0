"""One in-memory SQLite database for all virtual processes, with a yield point at every statement and commit.

No actor is interrupted within a transaction, so all threads share one connection and no lock is ever waited for. Locks and
isolation levels are tested on PostgreSQL in tests/races."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic
from django.db.utils import OperationalError

from tests.support.database import get_sqlite_template

if TYPE_CHECKING:
    from tests.simulation.world import World

_enter, _exit = Atomic.__enter__, Atomic.__exit__


@cache
def load_template() -> sqlite3.Connection:
    """Return a migrated database in memory."""
    template = sqlite3.connect(":memory:", check_same_thread=False)
    with closing(sqlite3.connect(get_sqlite_template())) as stored:
        stored.backup(template)
    return template


class Database:
    """Shared connection of one history."""

    def __init__(self, world: "World") -> None:
        template = load_template()
        self.world = world
        self.connection: BaseDatabaseWrapper = connections["default"]
        self.connection.inc_thread_sharing()
        self.connection.ensure_connection()
        template.backup(self.connection.connection)

    def install(self) -> None:
        """Make this the database of all threads."""
        self.connection.execute_wrappers.append(self._execute)
        world, connection = self.world, self.connection

        def enter(atomic: Atomic) -> None:
            if not connection.in_atomic_block:
                world.before_statement("begin")
            _enter(atomic)

        def leave(atomic: Atomic, exc_type: Any, exc_value: Any, traceback: Any) -> None:
            outermost = connection.in_atomic_block and not connection.savepoint_ids
            if not outermost or exc_type is not None or connection.needs_rollback:
                _exit(atomic, exc_type, exc_value, traceback)
                return
            self._commit(atomic)

        Atomic.__enter__, Atomic.__exit__ = enter, leave  # type: ignore[method-assign]

    def uninstall(self) -> None:
        Atomic.__enter__, Atomic.__exit__ = _enter, _exit  # type: ignore[method-assign]
        self.connection.execute_wrappers.remove(self._execute)
        self.connection.dec_thread_sharing()

    def use_in_thread(self) -> None:
        connections["default"] = self.connection

    def _commit(self, atomic: Atomic) -> None:
        """Commit, or fail before or after the effect, or die before or after the effect."""
        outcome = self.world.decide_commit()
        if outcome in ("fail before", "die before"):
            error = OperationalError("The connection was lost before the commit.")
            _exit(atomic, OperationalError, error, None)
            self.world.after_commit(outcome)
            raise error
        if outcome == "fail after":
            self.connection.run_on_commit = []
        _exit(atomic, None, None, None)
        self.world.after_commit(outcome)
        if outcome == "fail after":
            raise OperationalError("The connection was lost during the commit.")

    def _execute(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        if self.connection.in_atomic_block or sql == "BEGIN" or sql.startswith("BEGIN "):
            self.world.within_transaction(sql)
            return execute(sql, params, many, context)
        self.world.before_statement(sql)
        return execute(sql, params, many, context)

    def fetch(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Read rows without a yield point, for checks."""
        cursor = self.connection.connection.cursor()
        try:
            return [*cursor.execute(sql, [param.hex if hasattr(param, "hex") else param for param in params]).fetchall()]
        finally:
            cursor.close()


__all__ = ["Database", "OperationalError", "load_template", "transaction"]
