"""Reconciliation sweep of the call log with nginx's access log, the upstream's records and the model rates."""

from datetime import datetime
from pathlib import Path

import structlog
from django.conf import settings

from sandboxes.egress import model_pricing
from sandboxes.egress.logs import access_log, upstream_records
from sandboxes.sweep_log import SweepResult

log = structlog.get_logger(__name__)
FAILURE_COUNTERS = {"malformed", "unread lost", "unknown", "unmetered", "out of range"}  # reported as failures of the sweep


def collect_call_logs(*, now: datetime) -> SweepResult:
    """Ingest new log lines and records, then price calls by rate. Safe to run concurrently.

    A missing access log is no failure, because not every host runs nginx. A missing LEASEHOLD_LLM_RECORDS file is one."""
    result = SweepResult()
    sources = [("requests", access_log.collect_access_log, access_log_path())]
    if settings.LLM_RECORDS:
        sources.append(("calls", upstream_records.collect_records, Path(settings.LLM_RECORDS)))
        if not Path(settings.LLM_RECORDS).exists():
            result.failures.append(f"LEASEHOLD_LLM_RECORDS: there is no file {settings.LLM_RECORDS}")
    for label, collect, path in sources:
        try:
            counts = collect(path, now)
        except OSError as error:
            log.error("log not read", log=str(path), error=str(error))
            result.failures.append(f"{path}: {error}")
            continue
        for name, count in counts.items():
            result.note(f"{label} {name}", count)
        for name in FAILURE_COUNTERS & counts.keys():
            result.failures.append(f"{path}: {counts[name]} {name}")
    result.note("calls priced by rate", model_pricing.price_calls(now))
    return result


def access_log_path() -> Path:
    return Path(settings.EGRESS_DIR) / "logs" / "access.log"
