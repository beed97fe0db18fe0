"""Detection of a pooler in transaction mode, behind which prepared statements of different clients are mixed up.

Each of two idle clients holds a server process of its own, unless a pooler gives one server process to both, or another one to
the same client."""

import select
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import psycopg
from django.db import connection

ROUNDS = 3  # PgBouncer may choose among its server connections in turns
ANSWER_SECONDS = 2.0  # behind a pooler in session mode, a client without a server connection waits
QUERY = b"SELECT pg_backend_pid()"


def is_pooled_by_transaction() -> bool:
    """Return whether a pooler in transaction mode is found before the database, by two new connections.

    False if it is not known: the database does not respond, or not in time."""
    try:
        return _has_shared_process()
    except psycopg.Error:
        return False


def _has_shared_process() -> bool:
    parameters = connection.get_connection_params()
    with ExitStack() as stack:
        first, second = (stack.enter_context(closing(psycopg.connect(**parameters, autocommit=True))) for _ in range(2))
        own: set[int] = set()
        for client, is_first in _list_turns(first, second):
            pid = _ask_pid(client)
            if pid is None:
                return False
            if is_first:
                own.add(pid)
            if len(own) > 1 or (not is_first and pid in own):
                return True
    return False


def _list_turns(
    first: "psycopg.Connection[object]", second: "psycopg.Connection[object]"
) -> Iterator[tuple["psycopg.Connection[object]", bool]]:
    """Yield the connection to use next, and whether it is the first one."""
    for _ in range(ROUNDS):
        yield from ((first, True), (first, True), (second, False))


def _ask_pid(client: "psycopg.Connection[object]") -> int | None:
    """Return the server process that executes a statement of a client, None without an answer within ANSWER_SECONDS."""
    libpq, deadline = client.pgconn, time.monotonic() + ANSWER_SECONDS
    libpq.send_query(QUERY)
    poll = select.poll()
    poll.register(libpq.socket, select.POLLIN)
    while libpq.is_busy():
        if not poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
            return None
        libpq.consume_input()
    result = libpq.get_result()
    value = result.get_value(0, 0) if result is not None and result.status == psycopg.pq.ExecStatus.TUPLES_OK else None
    while libpq.get_result() is not None:
        pass
    return int(value) if value is not None else None
