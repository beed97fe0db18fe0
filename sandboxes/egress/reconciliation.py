"""The sweep that joins calls with what others know about them: nginx's log, the upstream's records, rates."""

from datetime import datetime
from pathlib import Path

import structlog
from django.conf import settings

from sandboxes.egress import access_log as logs
from sandboxes.egress import model_pricing, upstream_records
from sandboxes.sweep_log import SweepResult

log = structlog.get_logger(__name__)


def collect_call_logs(*, now: datetime) -> SweepResult:
    """Read what was logged and recorded since the last time, and price what then has no price. Safe beside itself.

    Of the two files nginx's may be missing, where nothing runs behind it; records that were promised may not."""
    swept = SweepResult()
    sources = [("requests", logs.collect_access_log, access_log_path())]
    if settings.LLM_RECORDS:
        sources.append(("calls", upstream_records.collect_records, Path(settings.LLM_RECORDS)))
        if not Path(settings.LLM_RECORDS).exists():
            swept.failures.append(f"LEASEHOLD_LLM_RECORDS: there is no file {settings.LLM_RECORDS}")
    for what, read, path in sources:
        try:
            counts = read(path, now)
        except OSError as failed:
            log.error("log not read", log=str(path), error=str(failed))
            swept.failures.append(f"{path}: {failed}")
            continue
        for name, times in counts.items():
            swept.note(f"{what} {name}", times)
        for wrong in FAILURE_COUNTERS & counts.keys():
            swept.failures.append(f"{path}: {counts[wrong]} {wrong}")
    swept.note("calls priced by rate", model_pricing.price_calls(now))
    return swept


FAILURE_COUNTERS = {"garbage", "rests lost", "unknown", "unmetered"}  # what an operator has to look at


def access_log_path() -> Path:
    return Path(settings.EGRESS_DIR) / "logs" / "access.log"
