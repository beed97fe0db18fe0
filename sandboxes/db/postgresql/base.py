"""Django's PostgreSQL backend with connections that threads share, and a health check that usually takes no round trip.

Errors of the server's state that psycopg calls internal are raised as OperationalError: the statement may succeed later."""

import select
from functools import cache
from types import TracebackType
from typing import Any

import psycopg
from django.conf import settings
from django.db.backends.postgresql import base
from django.db.utils import DatabaseErrorWrapper, OperationalError
from django.utils.functional import cached_property

from sandboxes.db.postgresql.pool import ConnectionPool
from sandboxes.db.postgresql.schema import DatabaseSchemaEditor

# SQLSTATEs of psycopg.InternalError: https://www.postgresql.org/docs/current/errcodes-appendix.html
READ_ONLY_TRANSACTION = "25006"  # a standby in recovery, or a server that an operator or its vendor has made read-only
IDLE_TRANSACTION_ENDED, TRANSACTION_TIMED_OUT = "25P03", "25P04"
PASSING_STATES = frozenset({READ_ONLY_TRANSACTION, IDLE_TRANSACTION_ENDED, TRANSACTION_TIMED_OUT})


@cache
def _get_pool(target: tuple[object, ...]) -> ConnectionPool:
    return ConnectionPool(
        max_connections=settings.DATABASE_CONNECTIONS,
        idle_seconds=settings.DATABASE_IDLE.total_seconds(),
        wait_seconds=settings.DATABASE_WAIT.total_seconds(),
    )


def get_pool(conn_params: dict[str, Any]) -> ConnectionPool:
    """Return the pool of this process for one database and user."""
    return _get_pool(tuple(conn_params.get(name) for name in ("host", "port", "dbname", "user")))


class PassingErrors(DatabaseErrorWrapper):
    """Translation of psycopg's exceptions to Django's."""

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(exc_value, psycopg.InternalError) and exc_value.sqlstate in PASSING_STATES:
            self.wrapper.errors_occurred = True  # type: ignore[attr-defined]  # missing in django-stubs
            raise OperationalError(*exc_value.args).with_traceback(traceback) from exc_value
        super().__exit__(exc_type, exc_value, traceback)


class DatabaseWrapper(base.DatabaseWrapper):
    """Database connection whose health check executes a statement only if there is a sign of a broken connection.

    With CONN_HEALTH_CHECKS Django checks a persistent connection before the first statement of each request."""

    SchemaEditorClass = DatabaseSchemaEditor

    keeps_idle = False  # of this process: otherwise a connection is closed when it is returned
    _lender: ConnectionPool  # of the present connection

    def get_new_connection(self, conn_params: dict[str, Any]) -> Any:
        self._lender = get_pool(conn_params)
        return self._lender.take(lambda: super(DatabaseWrapper, self).get_new_connection(conn_params))

    def _close(self) -> None:
        if self.connection is not None:
            with self.wrap_database_errors:
                self._lender.put(
                    self.connection, is_reusable=self.keeps_idle and not (self.errors_occurred or self.in_atomic_block)
                )

    @cached_property
    def wrap_database_errors(self) -> DatabaseErrorWrapper:
        return PassingErrors(self)

    def is_usable(self) -> bool:
        """Return whether the connection works.

        PostgreSQL sends data to an idle connection only as a notice, as the error with which it ends the connection, or as the
        end of the stream. Without data to read, and without an error in the last request, the connection is taken as working.
        A server that vanished without closing the connection is not noticed; a test statement would wait for it as well."""
        driver: Any = self.connection
        if driver is None or driver.closed:
            return False
        poll = select.poll()  # select.select() fails for file descriptors above 1023
        poll.register(driver.fileno(), select.POLLIN)
        if self.errors_occurred or poll.poll(0):
            return bool(super().is_usable())
        return True
