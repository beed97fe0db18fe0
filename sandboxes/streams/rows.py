"""Rows of streamed Runs, read by few threads: a stream occupies no database connection while it waits."""

from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

from django.db import close_old_connections, connections

from sandboxes.models import Run
from sandboxes.streams.registry import OPEN_STREAMS

MAX_DATABASE_THREADS = 2  # of this process
_threads = ThreadPoolExecutor(MAX_DATABASE_THREADS, thread_name_prefix="stream-rows")


def fetch_run(run_id: UUID, *, with_output: bool) -> Run:
    """Read a Run, without its stored output unless requested. Raise DatabaseError, Run.DoesNotExist."""
    return _threads.submit(_fetch_run, run_id, with_output).result()


def _fetch_run(run_id: UUID, with_output: bool) -> Run:
    close_old_connections()
    try:
        runs = Run.objects.select_related("sandbox__host")
        return (runs if with_output else runs.defer("stdout", "stderr")).get(pk=run_id)
    finally:
        if OPEN_STREAMS.count() <= 1:
            connections.close_all()
