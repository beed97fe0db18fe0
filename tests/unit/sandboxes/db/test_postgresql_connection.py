"""The health check of persistent connections, and errors that pass: a read-only server, transactions that it has ended."""

import select

import psycopg
import pytest
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from leases.models import Lease
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has no connection to lose"),
]


def begin_request() -> None:
    """Let the next statement be the first one of a request, as on a persistent connection with health checks."""
    connection.health_check_enabled, connection.health_check_done = True, False


def read_backend() -> int:
    begin_request()
    Lease.objects.count()
    return connection.connection.info.backend_pid


def test_a_sound_connection_is_not_tested_by_a_statement() -> None:
    backend = read_backend()
    begin_request()
    with CaptureQueriesContext(connection) as captured:
        Lease.objects.count()
    assert (len(captured), connection.connection.info.backend_pid) == (1, backend)
    assert connection.health_check_done


@pytest.mark.parametrize("how", ["terminated", "closed"])
def test_a_broken_connection_is_replaced_before_the_first_statement_of_a_request(how: str) -> None:
    backend = read_backend()
    if how == "closed":
        connection.connection.close()
    else:
        parameters = connection.get_connection_params()
        names = {name: parameters[name] for name in ("dbname", "user", "host", "port", "password") if name in parameters}
        with psycopg.connect(**names, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", [backend])
    assert read_backend() != backend


def test_a_write_to_a_read_only_server_is_an_operational_error() -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION READ ONLY")
        with pytest.raises(OperationalError, match="read-only"):
            cursor.execute("UPDATE leases_lease SET status = status")
        transaction.set_rollback(True)


def test_a_transaction_that_the_server_ended_is_an_operational_error() -> None:
    transaction.set_autocommit(False)
    try:
        with connection.cursor() as cursor:
            cursor.execute("SET idle_in_transaction_session_timeout = 1")
            wait_until(lambda: is_readable(connection.connection.fileno()), "the server has ended the transaction")
            with pytest.raises(OperationalError):
                cursor.execute("SELECT 1")
    finally:
        connection.close()


def is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])
