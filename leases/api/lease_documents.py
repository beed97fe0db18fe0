"""JSON documents of leases for lists, built by the database.

`leases.serialize_lease` renders the same document for a single lease. A page of 200 leases with their sandboxes takes a seventh
of the CPU time that 400 model instances take (tests/bench/lease_pages.py)."""

import json
from datetime import datetime

from django.db.models import Q, TextField
from django.db.models.expressions import RawSQL

from leases.errors import InvalidRequest
from leases.failed_by import END_REASONS
from leases.models import LeaseStatus
from sandboxes.db import dialect
from sandboxes.providers.base import Network

ELAPSED_CONDITION = f"leases_lease.status = '{LeaseStatus.ACTIVE.value}' AND leases_lease.expires_at <= %s"

CLASSIFY_END_REASON_SQL = "CASE leases_lease.end_reason {} END".format(
    " ".join(f"WHEN '{reason}' THEN '{origin.value}'" for reason, origin in END_REASONS.items() if origin)
)


def build_lease_document(now: datetime) -> RawSQL:
    """Return an annotation for queries of leases: the lease and its sandbox as JSON text.

    A lease whose clock has elapsed is rendered as expired, even if no sweep has recorded its end.

    Plan: the database computes the expression only for the rows of the page. The subquery finds the sandbox by the partial
    unique index sandbox_one_live_per_holder: one index lookup per row, for a table of any size."""
    document = dialect.build_object(_describe_lease())
    return RawSQL(dialect.json_as_text(document), [dialect.adapt_value(now)] * document.count("%s"), output_field=TextField())  # noqa: S611 - no user input


def build_status_filter(status: str, *, now: datetime) -> Q:
    """Build a filter of leases by status, as their documents state it. Raise InvalidRequest for an unknown status."""
    elapsed = Q(expires_at__lte=now, status=LeaseStatus.ACTIVE)  # ended, not yet recorded by a sweep
    if status == LeaseStatus.ACTIVE:
        return Q(status=LeaseStatus.ACTIVE) & ~elapsed
    if status == LeaseStatus.EXPIRED:
        return Q(status=LeaseStatus.EXPIRED) | elapsed
    if status == LeaseStatus.DESTROYED:
        return Q(status=LeaseStatus.DESTROYED)
    raise InvalidRequest("status", f"Must be one of {', '.join(LeaseStatus.values)}.")


def find_document_position(text: str) -> tuple[datetime, str]:
    """Return the position of a lease in the list, `leased_at` and id. The driver would convert both columns of every row."""
    document = json.loads(text)
    return datetime.fromisoformat(document["leased_at"]), document["id"]


def _describe_lease() -> dict[str, str]:
    timestamp, seconds = dialect.format_timestamp, dialect.format_seconds
    return {
        "id": dialect.format_uuid("leases_lease.id"),
        "sandbox_id": "leases_lease.agent_did || '::' || leases_lease.environment_id",
        "agent_did": "leases_lease.agent_did",
        "environment_id": "leases_lease.environment_id",
        "environment_type": "leases_lease.environment_type_id",
        "status": f"CASE WHEN {ELAPSED_CONDITION} THEN '{LeaseStatus.EXPIRED.value}' ELSE leases_lease.status END",
        "is_new": dialect.read_boolean("FALSE"),
        "leased_at": timestamp("leases_lease.leased_at"),
        "last_activity": timestamp("leases_lease.last_activity_at"),
        "ttl_seconds": seconds("leases_lease.ttl"),
        "expires_at": timestamp("leases_lease.expires_at"),
        "max_expires_at": timestamp("leases_lease.max_expires_at"),
        "sleep_after": seconds("leases_lease.sleep_after"),
        "auto_stop_seconds": seconds("leases_lease.auto_stop"),
        "auto_delete_seconds": seconds("leases_lease.auto_delete"),
        "expiry_conditions": dialect.read_json("leases_lease.expiry_conditions"),
        "ended_at": timestamp(f"CASE WHEN {ELAPSED_CONDITION} THEN leases_lease.expires_at ELSE leases_lease.ended_at END"),
        "end_reason": f"CASE WHEN NOT ({ELAPSED_CONDITION}) THEN leases_lease.end_reason "
        "WHEN leases_lease.expires_at >= leases_lease.max_expires_at THEN 'max_ttl' ELSE 'ttl' END",
        "failed_by": f"CASE WHEN {ELAPSED_CONDITION} THEN NULL ELSE {CLASSIFY_END_REASON_SQL} END",
        "resources": dialect.build_object(
            {
                "requested": dialect.build_object(_describe_requested_resources()),
                "effective": _select_from_sandbox(_describe_sandbox_resources()),
            }
        ),
        "sandbox": _select_from_sandbox(_describe_sandbox()),
    }


def _select_from_sandbox(description: dict[str, str]) -> str:
    """Return an expression of a JSON object of the current sandbox, null without one."""
    return (
        f"(SELECT {dialect.build_object(description)} FROM sandboxes_sandbox AS held "  # noqa: S608 - no user input
        "WHERE held.holder = leases_lease.id AND held.state NOT IN ('destroying', 'destroyed'))"
    )


def _describe_requested_resources() -> dict[str, str]:
    numbers, texts = ("memory_mib", "millicpus", "disk_mib"), ("size", "gpu_type", "image")
    described = {name: f"leases_lease.{name}" for name in numbers}
    described |= {name: f"NULLIF(leases_lease.{name}, '')" for name in texts}
    return described | {"gpu": "NULLIF(leases_lease.gpus, 0)"}


def _describe_sandbox_resources() -> dict[str, str]:
    described = {name: f"held.{name}" for name in ("memory_mib", "millicpus", "disk_mib", "image")}
    return described | {"gpu": "held.gpus", "gpu_type": "NULLIF(held.gpu_type, '')"}


def _describe_sandbox() -> dict[str, str]:
    return {
        "id": dialect.format_uuid("held.id"),
        "state": "held.state",
        "provider": "held.provider",
        "isolated": dialect.read_boolean("held.isolated"),
        "runtime": "NULLIF(held.runtime, '')",
        "network": "held.network",
        "sealed": dialect.read_boolean(f"held.network = '{Network.SEALED}'"),
    }
