"""Rows of streamed Runs, read by one thread: a stream occupies no database connection while it waits."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from uuid import UUID

from django.db import close_old_connections, connections

from sandboxes.models import Run
from sandboxes.streams.registry import OPEN_STREAMS

T = TypeVar("T")
_thread = ThreadPoolExecutor(1, thread_name_prefix="stream-rows")


def fetch_run(run_id: UUID, *, with_output: bool) -> Run:
    """Read a Run, without its stored output unless requested. Raise DatabaseError, Run.DoesNotExist."""
    return _thread.submit(_fetch_run, run_id, with_output).result()


def call(query: Callable[[UUID], T], pk: UUID) -> T:
    """Return the result of a query in that thread. Raise DatabaseError."""
    return _thread.submit(_call, query, pk).result()


def close_if_idle() -> None:
    """Close the connection to the database if no stream is open."""
    if OPEN_STREAMS.count() == 0:
        _thread.submit(connections.close_all).result()


def _call(query: Callable[[UUID], T], pk: UUID) -> T:
    close_old_connections()
    return query(pk)


def _fetch_run(run_id: UUID, with_output: bool) -> Run:
    close_old_connections()
    runs = Run.objects.select_related("sandbox__host")
    return (runs if with_output else runs.defer("stdout", "stderr")).get(pk=run_id)
