"""Rows of streamed Runs and events, read by one thread: a stream occupies no database connection while it waits."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar
from uuid import UUID

from django.db import close_old_connections, connections

from sandboxes.models import Run
from sandboxes.streams.registry import OPEN_STREAMS

P = ParamSpec("P")
T = TypeVar("T")
_thread = ThreadPoolExecutor(1, thread_name_prefix="stream-rows")


def fetch_run(run_id: UUID, *, with_output: bool) -> Run:
    """Read a Run, without its stored output unless requested. Raise DatabaseError, Run.DoesNotExist.

    Output that was moved to the object store is not read: `run_outputs.load_output` reads it without a query."""
    return _thread.submit(_fetch_run, run_id, with_output).result()


def call(query: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a query in that thread. Raise DatabaseError."""
    return _thread.submit(_call, partial(query, *args, **kwargs)).result()


def close_if_idle() -> None:
    """Close the connection to the database if no stream is open."""
    if OPEN_STREAMS.count() == 0:
        _thread.submit(connections.close_all).result()


def _call(query: Callable[[], T]) -> T:
    close_old_connections()
    return query()


def _fetch_run(run_id: UUID, with_output: bool) -> Run:
    close_old_connections()
    runs = Run.objects.select_related("sandbox__host")
    runs = runs.select_related("stored_output__stored_in") if with_output else runs.defer("stdout", "stderr")
    return runs.get(pk=run_id)
