"""LiteLLM's records of our calls: one JSON line a call, whatever became of it, appended to the file LEASEHOLD_RECORDS names.

This file runs inside LiteLLM's own Python and needs nothing else. Put a copy beside LiteLLM's config.yaml and name it there:

    litellm_settings:
      callbacks: ["litellm_callback.records"]

LiteLLM calls hooks by keyword, and goes on when one raises: their parameters have to be named as they are here."""

import json
import math
import os
import sys
import traceback
from datetime import datetime
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

METADATA_FIELDS = ("call", "lease", "run", "attempt", "agent", "environment")


class RecordLogger(CustomLogger):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        os.close(open_for_append(path))  # that it cannot be is found when LiteLLM starts, and not with the first call

    async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        self.write(kwargs, "success", start_time, end_time)

    async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        self.write(kwargs, "failure", start_time, end_time)

    def write(self, kwargs: dict[str, Any], status: str, start_time: Any, end_time: Any) -> None:
        """Append the record of one call. What goes wrong is said on stderr with the call's id, and raised."""
        call = kwargs.get("litellm_call_id")
        try:
            found = build_record(kwargs, status, start_time, end_time)
            append_line(self.path, json.dumps(found, allow_nan=False).encode())
        except Exception:
            print(f"LEASEHOLD: the record of call {call} is LOST\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            raise


def build_record(kwargs: dict[str, Any], status: str, start_time: Any, end_time: Any) -> dict[str, Any]:
    """What LiteLLM knows about one call. A price or a count that it does not know is null, and never 0."""
    known = kwargs["standard_logging_object"]
    usage = (known.get("metadata") or {}).get("usage_object") or {}
    details = usage.get("prompt_tokens_details") or {}
    counted = bool(known["total_tokens"])
    return {
        "call": known.get("litellm_call_id") or kwargs["litellm_call_id"],
        "end_user": known.get("end_user") or "",
        "for": extract_metadata(known),
        "model": known.get("model") or kwargs.get("model") or "",
        "stream": bool(known.get("stream")),
        "status": status,
        "error": (known.get("error_information") or {}).get("error_class") or "",
        "input": known["prompt_tokens"] if counted else None,
        "cached": details.get("cached_tokens") if counted else None,
        "output": known["completion_tokens"] if counted else None,
        "cost": extract_cost(kwargs, known, status),
        "started": to_timestamp(start_time),
        "ended": to_timestamp(end_time),
    }


def extract_metadata(known: dict[str, Any]) -> dict[str, Any]:
    """What our side said of a call when it sent it: so a record whose row is lost still says whose it was."""
    said = (known.get("metadata") or {}).get("spend_logs_metadata")
    return (
        {name: said[name] for name in METADATA_FIELDS if isinstance(said.get(name), str | int)}
        if isinstance(said, dict)
        else {}
    )


def extract_cost(kwargs: dict[str, Any], known: dict[str, Any], status: str) -> float | None:
    """USD; None where LiteLLM has no price for the model, which it states as 0. That it is free its deployment has to say."""
    cost = kwargs.get("response_cost") if status == "success" else known.get("response_cost") or 0.0
    if cost is None or not math.isfinite(cost):
        return None
    deployment = (kwargs.get("litellm_params") or {}).get("model_info") or {}
    free = known.get("cache_hit") or deployment.get("input_cost_per_token") is not None
    return float(cost) if cost or free or status == "failure" or not known["total_tokens"] else None


def to_timestamp(at: Any) -> float:
    return at.timestamp() if isinstance(at, datetime) else float(at)


def append_line(path: str, line: bytes) -> None:
    """Append one line by one write: several workers share the file, which may be renamed at any time. The newline before it
    ends what a writer that was stopped in the middle has left there."""
    file = open_for_append(path)
    try:
        if os.write(file, b"\n" + line + b"\n") != len(line) + 2:
            raise OSError(f"{path}: only a part could be written of {line!r}")
    finally:
        os.close(file)


def open_for_append(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)


if not os.environ.get("LEASEHOLD_RECORDS"):
    raise RuntimeError("LEASEHOLD_RECORDS is not set: it names the file to which records are appended.")
records = RecordLogger(os.environ["LEASEHOLD_RECORDS"])
