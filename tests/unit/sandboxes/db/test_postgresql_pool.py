"""Connections of a process to PostgreSQL: bounded, lent while they are used, and closed when they are not."""

import json
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import psycopg
import pytest
from django.db import connections
from psycopg.pq import TransactionStatus

from controlplane import checks
from controlplane.errors import build_error_response
from sandboxes.background import OnDemandThread
from sandboxes.db.connection_errors import NoFreeConnection
from sandboxes.db.postgresql import base
from sandboxes.db.postgresql.pool import KEPT_CONNECTIONS, SURPLUS_SECONDS, ConnectionPool
from tests.support.servers.services import require_environment

pytestmark = [
    pytest.mark.postgres("connections of the driver"),
    pytest.mark.skipif(connections["default"].vendor != "postgresql", reason="connections of PostgreSQL"),
]


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def connect() -> Any:
    [url] = require_environment("postgres", "TEST_POSTGRES_URL")
    opened: list[Any] = []

    def open_connection() -> Any:
        opened.append(psycopg.connect(url, autocommit=True))
        return opened[-1]

    yield open_connection
    for connection in opened:
        connection.close()


def make_pool(clock: Clock, *, bound: int = 0, wait: float = 0.0) -> ConnectionPool:
    pool = ConnectionPool(max_connections=bound, idle_seconds=10.0, wait_seconds=wait, clock=clock)
    pool._closing = cast(OnDemandThread, SimpleNamespace(start=bool, release=bool))  # the test closes what is due
    return pool


def test_the_connection_returned_last_is_lent_next(clock: Clock, connect: Any) -> None:
    pool = make_pool(clock)
    first, second = pool.take(connect), pool.take(connect)
    pool.put(second, is_reusable=True)
    pool.put(first, is_reusable=True)
    assert [pool.take(connect), pool.take(connect)] == [first, second]


def test_a_connection_is_closed_after_the_idle_time(clock: Clock, connect: Any) -> None:
    pool = make_pool(clock)
    connections = [pool.take(connect), pool.take(connect)]
    pool.put(connections[0], is_reusable=True)
    clock.seconds = 4.0
    pool.put(connections[1], is_reusable=True)
    clock.seconds = 10.0
    assert (pool.close_unused(), [each.closed for each in connections]) == (SURPLUS_SECONDS, [True, False])
    clock.seconds = 13.5
    assert (pool.close_unused(), connections[1].closed) == (0.5, False)
    clock.seconds = 14.0
    assert (pool.close_unused(), connections[1].closed) == (None, True)


def test_most_connections_of_a_burst_are_closed_before_the_idle_time(clock: Clock, connect: Any) -> None:
    pool = make_pool(clock)
    connections = [pool.take(connect) for _ in range(6)]
    for connection in connections:
        pool.put(connection, is_reusable=True)
    clock.seconds = SURPLUS_SECONDS
    assert pool.close_unused() == SURPLUS_SECONDS
    assert [each.closed for each in connections] == [True] * (6 - KEPT_CONNECTIONS) + [False] * KEPT_CONNECTIONS


def test_connections_in_use_at_short_intervals_are_kept(clock: Clock, connect: Any) -> None:
    pool = make_pool(clock)
    connections = [pool.take(connect) for _ in range(4)]
    for _ in range(4):
        for connection in connections:
            pool.put(connection, is_reusable=True)
        clock.seconds += SURPLUS_SECONDS / 2
        pool.close_unused()
        assert {id(pool.take(connect)) for _ in connections} == {*map(id, connections)}


@pytest.mark.parametrize("damage", ["ended by the server", "in a transaction", "error"])
def test_a_connection_that_may_not_work_is_not_lent_again(clock: Clock, connect: Any, damage: str) -> None:
    pool = make_pool(clock)
    connection = pool.take(connect)
    if damage == "in a transaction":
        connection.execute("BEGIN")
        assert connection.info.transaction_status == TransactionStatus.INTRANS
    pool.put(connection, is_reusable=damage != "error")
    if damage == "ended by the server":
        connect().execute("SELECT pg_terminate_backend(%s, 5000)", [connection.info.backend_pid])
    assert pool.take(connect) is not connection
    assert connection.closed


def test_a_call_beyond_the_bound_waits_for_a_returned_connection(clock: Clock, connect: Any) -> None:
    pool = make_pool(clock, bound=1, wait=60.0)
    connection = pool.take(connect)
    taken: list[Any] = []
    waiting = threading.Thread(target=lambda: taken.append(pool.take(connect)))
    waiting.start()
    pool.put(connection, is_reusable=True)
    waiting.join(30)
    assert taken == [connection]


def test_a_call_beyond_the_bound_is_refused_after_the_wait(clock: Clock, connect: Any) -> None:
    pool = make_pool(clock, bound=1)
    connection = pool.take(connect)
    with pytest.raises(NoFreeConnection):
        pool.take(connect)
    pool.put(connection, is_reusable=False)
    assert pool.take(connect) is not connection


def test_a_connection_whose_thread_ended_without_returning_it_is_not_counted(clock: Clock, connect: Any) -> None:
    [url] = require_environment("postgres", "TEST_POSTGRES_URL")
    pool = make_pool(clock, bound=1)
    pool.take(lambda: psycopg.connect(url)).close()
    assert pool.take(connect)


def test_a_full_server_is_asked_again_until_the_wait_is_over(clock: Clock, connect: Any) -> None:
    pool, tries = make_pool(clock, wait=5.0), []

    def open_connection() -> Any:
        tries.append(clock.seconds)
        clock.seconds += 2.0
        if len(tries) < until:
            raise psycopg.OperationalError("FATAL:  sorry, too many clients already")
        return connect()

    until = 2
    assert pool.take(open_connection)
    tries.clear()
    until = 10
    with pytest.raises(NoFreeConnection):
        pool.take(open_connection)
    assert len(tries) == 3


def test_another_error_of_the_server_is_raised_at_once(clock: Clock) -> None:
    def refuse() -> Any:
        raise psycopg.OperationalError("connection refused")

    pool = make_pool(clock, bound=1, wait=5.0)
    for _ in range(2):
        with pytest.raises(psycopg.OperationalError, match="refused"):
            pool.take(refuse)


@pytest.fixture
def limited_url() -> Iterator[str]:
    """URL of the server for a role with one connection."""
    [url] = require_environment("postgres", "TEST_POSTGRES_URL")
    role = f"limited_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 1")
        yield urlsplit(url)._replace(netloc=f"{role}@{urlsplit(url).hostname}:{urlsplit(url).port}").geturl()
        connection.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s", [role])
        connection.execute(f"DROP ROLE {role}")


def test_a_server_without_a_free_connection_is_waited_for(limited_url: str) -> None:
    def connect() -> Any:
        return psycopg.connect(limited_url, autocommit=True)

    used, taken = connect(), list[Any]()
    pool = ConnectionPool(max_connections=0, idle_seconds=0.0, wait_seconds=60.0)
    waiting = threading.Thread(target=lambda: taken.append(pool.take(connect)))
    waiting.start()
    used.close()
    waiting.join(60)
    assert not taken[0].closed
    pool.wait_seconds = 0.0
    with pytest.raises(NoFreeConnection):
        pool.take(connect)


@pytest.mark.django_db(transaction=True)
def test_threads_share_the_connections_of_their_process(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.DATABASE_CONNECTIONS, settings.DATABASE_IDLE = 1, timedelta(seconds=3)
    settings.DATABASE_WAIT = timedelta(0)
    monkeypatch.setattr(base.DatabaseWrapper, "keeps_idle", True)
    base._get_pool.cache_clear()
    connections.close_all()

    def find_process(_: int) -> int:
        try:
            with connections["default"].cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                return int(cursor.fetchone()[0])
        finally:
            connections["default"].close()

    pool = base.get_pool(connections["default"].get_connection_params())
    try:
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            pids = {first.submit(find_process, 0).result(), second.submit(find_process, 0).result()}
        assert (len(pids), pool.idle_seconds, pool.wait_seconds) == (1, 3.0, 0.0)
        connections["default"].ensure_connection()
        with ThreadPoolExecutor(1) as thread, pytest.raises(NoFreeConnection) as refused:
            thread.submit(find_process, 0).result()
        response = build_error_response(refused.value, "/", "GET")
        assert (response.status_code, json.loads(response.content)["code"]) == (503, "no_database_connection")
        assert response.headers["Retry-After"] == "2"
    finally:
        connections.close_all()
        pool.clear()
        base._get_pool.cache_clear()


@pytest.mark.django_db
@pytest.mark.parametrize(("bound", "messages"), [(1, []), (1000, ["leasehold.W012"])])
def test_check_compares_the_bounds_with_the_connections_of_the_server(settings: Any, bound: int, messages: list[str]) -> None:
    settings.PROFILE, settings.DATABASE_CONNECTIONS, settings.WEB_THREADS, settings.WEB_WORKERS = "standard", bound, 800, 2
    assert [message.id for message in checks.check_database_connections(None)] == messages
