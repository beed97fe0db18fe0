"""The health check of persistent connections: no statement for a sound connection, a new connection for a broken one."""

import psycopg
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from leases.models import Lease

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
