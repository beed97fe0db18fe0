"""Traces in the format of OpenTelemetry, sent by OTLP over HTTP. Nothing is recorded unless LEASEHOLD_OTLP_ENDPOINT is set.

The trace id of a run is its run id, and the id of its root span is the second half of that. A trace is therefore found from a
row, a log line or a problem document, and spans of several processes share a trace without a context that would have to be
passed on. A span is built when the row that describes it is closed. A killed process loses the spans of its last seconds, and
no row.

The trace of the client, from the header `traceparent` (W3C Trace Context), is linked to the root span."""

import atexit
import os
import re
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from django.conf import settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanProcessor

TRACEPARENT_PATTERN = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
SPAN_ID_MASK = (1 << 64) - 1
FLUSH_MILLISECONDS = 3000
caller_trace: ContextVar[str] = ContextVar("caller_trace", default="")  # `traceparent` of the request in progress
_lock = threading.Lock()
_processor: "SpanProcessor | None" = None


def record_run_span(
    name: str, run_id: UUID, start: datetime, end: datetime, attributes: Mapping[str, Any], *, error: str = ""
) -> None:
    """Record the root span of a run's trace. `error` marks the span as failed."""
    if settings.OTLP_ENDPOINT:
        _record(name, run_id, run_id.int & SPAN_ID_MASK, None, start, end, attributes, error=error, link=caller_trace.get())


def record_child_span(
    name: str, run_id: UUID, start: datetime, end: datetime, attributes: Mapping[str, Any], *, error: str = ""
) -> None:
    """Record a span below the root span of a run's trace."""
    if settings.OTLP_ENDPOINT:
        span_id = uuid4().int & SPAN_ID_MASK
        _record(name, run_id, span_id, run_id.int & SPAN_ID_MASK, start, end, attributes, error=error)


def flush() -> None:
    """Send the recorded spans, for at most a few seconds. Call this function before the process ends."""
    if _processor is not None:
        _processor.force_flush(FLUSH_MILLISECONDS)


def _record(
    name: str, run_id: UUID, span_id: int, parent_id: int | None, start: datetime, end: datetime,
    attributes: Mapping[str, Any], *, error: str = "", link: str = "",
) -> None:  # fmt: skip
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def build_context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))

    match = TRACEPARENT_PATTERN.fullmatch(link)
    links = [Link(build_context(int(match[1], 16), int(match[2], 16), is_remote=True))] if match else []
    span = ReadableSpan(
        name,
        context=build_context(run_id.int, span_id),
        parent=build_context(run_id.int, parent_id) if parent_id is not None else None,
        resource=_get_resource(),
        attributes={key: value for key, value in attributes.items() if value not in (None, "")},
        links=links,
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.OK),
        start_time=_to_nanoseconds(start),
        end_time=_to_nanoseconds(max(start, end)),
    )
    _get_processor().on_end(span)


def _to_nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1e6) * 1000


def _get_resource() -> Any:
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": "leasehold", "service.instance.id": settings.INSTANCE or str(os.getpid())})


def _get_processor() -> "SpanProcessor":
    """Return the processor of this process. A thread of its own sends. Spans are dropped if the receiver is too slow."""
    global _processor
    with _lock:
        if _processor is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            exporter = OTLPSpanExporter(endpoint=f"{settings.OTLP_ENDPOINT.rstrip('/')}/v1/traces")
            _processor = BatchSpanProcessor(exporter)
            atexit.register(_processor.shutdown)
        return _processor
