"""LiteLLM callback that appends one JSON line per call, successful or failed, to the file named by LEASEHOLD_RECORDS.

This file runs inside LiteLLM's Python process and has no other dependency. Copy it next to LiteLLM's config.yaml and add:

    litellm_settings:
      callbacks: ["litellm_callback.records"]

LiteLLM calls hooks with keyword arguments and ignores their exceptions: a parameter of another name would lose all records."""

import json
import math
import os
import sys
import traceback
from datetime import datetime
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

METADATA_FIELDS = ("call", "lease", "run", "attempt", "agent", "environment", "billing_account")


class RecordLogger(CustomLogger):
    """LiteLLM logger that writes records for Leasehold."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        os.close(open_for_append(path))  # an unusable path ends LiteLLM at its start, not at the first call

    async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        self.write(kwargs, "success", start_time, end_time)

    async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        self.write(kwargs, "failure", start_time, end_time)

    def write(self, kwargs: dict[str, Any], status: str, start_time: Any, end_time: Any) -> None:
        """Append the record of one call. An error is written to stderr with the call id, then raised."""
        call = kwargs.get("litellm_call_id")
        try:
            record = build_record(kwargs, status, start_time, end_time)
            append_line(self.path, json.dumps(record, allow_nan=False).encode())
        except Exception:
            print(f"LEASEHOLD: the record of call {call} is LOST\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            raise


def build_record(kwargs: dict[str, Any], status: str, start_time: Any, end_time: Any) -> dict[str, Any]:
    """Build the record of one call. An unknown price or count is null, never 0."""
    call_log = kwargs["standard_logging_object"]
    usage = (call_log.get("metadata") or {}).get("usage_object") or {}
    details = usage.get("prompt_tokens_details") or {}
    is_counted = bool(call_log["total_tokens"])
    return {
        "call": call_log.get("litellm_call_id") or kwargs["litellm_call_id"],
        "response": call_log.get("id") or "",  # of the upstream; of a failed attempt the id of the call
        "end_user": call_log.get("end_user") or "",
        "for": extract_metadata(call_log),
        "model": call_log.get("model") or kwargs.get("model") or "",
        "stream": bool(call_log.get("stream")),
        "status": status,
        "error": (call_log.get("error_information") or {}).get("error_class") or "",
        "input": call_log["prompt_tokens"] if is_counted else None,
        "cached": details.get("cached_tokens") if is_counted else None,
        "output": call_log["completion_tokens"] if is_counted else None,
        "cost": extract_cost(kwargs, call_log, status),
        "started": to_timestamp(start_time),
        "ended": to_timestamp(end_time),
    }


def extract_metadata(call_log: dict[str, Any]) -> dict[str, Any]:
    """Extract the identity sent by the egress proxy, so that the record names the caller even if the call's row is lost."""
    metadata = (call_log.get("metadata") or {}).get("spend_logs_metadata")
    return (
        {name: metadata[name] for name in METADATA_FIELDS if isinstance(metadata.get(name), str | int)}
        if isinstance(metadata, dict)
        else {}
    )


def extract_cost(kwargs: dict[str, Any], call_log: dict[str, Any], status: str) -> float | None:
    """Return the cost in USD, or None if the price is unknown. LiteLLM reports 0 for a model without a price.

    A cost of 0 is trusted for a failed call, a cached answer, an answer without tokens, and a model whose deployment states its
    price."""
    cost = kwargs.get("response_cost") if status == "success" else call_log.get("response_cost") or 0.0
    if cost is None or not math.isfinite(cost):
        return None
    deployment = (kwargs.get("litellm_params") or {}).get("model_info") or {}
    is_free = call_log.get("cache_hit") or deployment.get("input_cost_per_token") is not None
    return float(cost) if cost or is_free or status == "failure" or not call_log["total_tokens"] else None


def to_timestamp(at: Any) -> float:
    return at.timestamp() if isinstance(at, datetime) else float(at)


def append_line(path: str, line: bytes) -> None:
    """Append one line by a single write, because several workers append to the file. The file may be renamed at any time.

    The leading newline ends an incomplete line that an interrupted writer left."""
    file = open_for_append(path)
    try:
        if os.write(file, b"\n" + line + b"\n") != len(line) + 2:
            raise OSError(f"{path}: incomplete write of {line!r}")
    finally:
        os.close(file)


def open_for_append(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)


if not os.environ.get("LEASEHOLD_RECORDS"):
    raise RuntimeError("LEASEHOLD_RECORDS is not set. Set it to the file to which records are appended.")
records = RecordLogger(os.environ["LEASEHOLD_RECORDS"])
