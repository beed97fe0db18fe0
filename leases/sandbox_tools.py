"""Tools of the control plane for programs in a sandbox. Each concerns the lease that holds the sandbox."""

import tempfile
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from io import BytesIO
from typing import Any
from uuid import UUID

from billing import budgets
from billing.budgets import Disclosure
from billing.models.budgets import Budget, Tab
from billing.pricing import format_decimal
from leases import conditions, execution, leasing
from leases.atproto import records
from leases.errors import ArtifactNotFound, InvalidRequest
from leases.identity_patterns import AUDIENCE_DESCRIPTION, AUDIENCE_PATTERN, NSID_DESCRIPTION, NSID_PATTERN
from leases.models import CONDITION_DESCRIPTION, CONDITION_PATTERN, Lease
from leases.patterns import require_match
from leases.tasks import begin_reclaim
from sandboxes.db.clock import clock_from, format_timestamp
from sandboxes.identity.signing import DEFAULT_TOKEN_LIFETIME, MAX_TOKEN_LIFETIME
from sandboxes.mcp.content import ENCODINGS, decode_content, encode_content
from sandboxes.mcp.tools import Schema, Tool
from sandboxes.state.uploads import ContentUploads
from sandboxes.stores.artifacts import Artifact
from sandboxes.stores.lease_stores import LeaseStores, open_stores
from sandboxes.stores.limits import MEDIA_TYPE_PATTERN, NAME_PATTERN, NAME_RULES

ACTOR = "sandbox"  # in the records of tokens, artifacts and ended leases
DEFAULT_READ_BYTES, MAX_READ_BYTES = 256 << 10, 2 << 20  # of one get_artifact
MAX_IN_MEMORY_BYTES = 1 << 20  # of an artifact; larger ones are spooled to a temporary file
MAX_TOKEN_SECONDS = int(MAX_TOKEN_LIFETIME.total_seconds())

ENCODING: Schema = {
    "type": "string", "enum": list(ENCODINGS), "description": "Encoding of content: utf-8 for text, base64 for any bytes.",
}  # fmt: skip
ARTIFACT_NAME: Schema = {"type": "string", "description": f"Name of the artifact: {NAME_RULES}."}

TOOLS = (
    Tool(
        "lease_status", "Get the lease", "Return the lease of this sandbox: environment, end and the conditions that end it.",
        {}, reads_only=True,
    ),
    Tool(
        "budget", "Get the budgets",
        "Return cost and tokens of this lease's model calls with its limits, and the budgets that apply to the lease. USD and "
        "amounts of budgets are decimal numbers in a string; null: not disclosed, or no limit.",
        {}, reads_only=True,
    ),
    Tool(
        "put_artifact", "Store an artifact",
        "Store a file outside of the sandbox, where the client of the lease reads it, also after the end of the lease.",
        {
            "name": ARTIFACT_NAME, "content": {"type": "string", "description": "Content."}, "encoding": ENCODING,
            "media_type": {"type": "string", "description": "Media type. Default: text/plain or application/octet-stream."},
        },
        ["name", "content"], destructive=True, idempotent=True,
    ),
    Tool(
        "get_artifact", "Read an artifact",
        "Return an artifact of this lease, or a part of it: next_offset is the offset to continue from, null at the end.",
        {
            "name": ARTIFACT_NAME, "encoding": ENCODING,
            "offset": {"type": "integer", "minimum": 0, "maximum": 10**12, "description": "First byte. Default: 0."},
            "length": {
                "type": "integer", "minimum": 1, "maximum": MAX_READ_BYTES,
                "description": f"Maximum number of bytes. Default: {DEFAULT_READ_BYTES}.",
            },
        },
        ["name"], reads_only=True,
    ),
    Tool(
        "post_condition", "Post a condition",
        "Post a condition such as task.complete to the environment. It ends this agent's leases in the environment that list "
        "the condition, and with them their sandboxes.",
        {"condition": {"type": "string", "description": f"Name of the condition: {CONDITION_DESCRIPTION}."}},
        ["condition"], destructive=True, idempotent=True,
    ),
    Tool(
        "service_token", "Create a service token",
        "Create a short-lived AT Protocol service token, with which the agent calls one method of another service.",
        {
            "aud": {"type": "string", "description": "DID of the service to call."},
            "lxm": {"type": "string", "description": "NSID of the method that the token permits."},
            "lifetime_seconds": {
                "type": "integer", "minimum": 1, "maximum": MAX_TOKEN_SECONDS,
                "description": f"Lifetime. Default: {int(DEFAULT_TOKEN_LIFETIME.total_seconds())}.",
            },
        },
        ["aud", "lxm"],
    ),
    Tool(
        "create_record", "Create an AT Protocol record",
        "Create a record in this agent's repository. Creating it again with the same key and content has no effect. Status "
        "pending: the repository's server does not answer, and the record is created later.",
        {
            "collection": {"type": "string", "description": "NSID of the collection."},
            "record": {"type": "object", "description": "The record, without floating-point numbers."},
            "key": {"type": "string", "description": "Record key. Default: a new one from the time."},
        },
        ["collection", "record"],
    ),
)  # fmt: skip


def execute(name: str, arguments: Mapping[str, Any], lease_id: UUID, *, now: datetime) -> dict[str, Any]:
    """Execute a tool whose arguments match its schema. Raise LeaseEnded, InvalidRequest and the errors of the operation."""
    lease = leasing.require_active(lease_id, now=now)
    return EXECUTORS[name](lease, arguments, now)


def _get_status(lease: Lease, arguments: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    return {
        "lease_id": str(lease.pk),
        "agent_did": lease.agent_did,
        "environment_id": lease.environment_id,
        "environment_type": lease.environment_type_id,
        "status": lease.status,
        "leased_at": format_timestamp(lease.leased_at),
        "ttl_seconds": int(lease.ttl.total_seconds()),
        "expires_at": format_timestamp(lease.expires_at),
        "max_expires_at": format_timestamp(lease.max_expires_at),
        "expiry_conditions": lease.expiry_conditions,
        "now": format_timestamp(now),
    }


def _get_budgets(lease: Lease, arguments: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    tab = Tab.objects.get(holder=lease.pk)
    applies = budgets.build_tab_filter(tab, now=now)
    basis = budgets.ReservationBasis.load()
    found = Budget.objects.filter(applies, active=True).order_by("pk")
    return {
        "model_calls": {
            "spent_usd": format_decimal(budgets.sum_lease_calls(lease.pk)),
            "limit_usd": format_decimal(lease.llm_limit) if lease.llm_limit is not None else None,
            "spent_tokens": int(budgets.sum_lease_calls(lease.pk, "tokens")),
            "limit_tokens": lease.llm_token_limit,
        },
        "budgets": [_serialize_budget(budget, lease.agent_did, basis, now) for budget in found],
    }


def _serialize_budget(budget: Budget, did: str, basis: budgets.ReservationBasis, now: datetime) -> dict[str, Any]:
    """Return a budget as far as an API key of the agent could read it."""
    disclosure = budgets.get_disclosure(budget.scope, budget.subject, operator=False, dids=[did], key_id="")
    spent, resets_at = budgets.get_spent(budget, now), budgets.get_period_bounds(budget, now)[1]
    reserved = budgets.compute_reservation(budget, now=now, basis=basis)
    return {
        "scope": budget.scope,
        "unit": budget.unit,
        "model": budget.model,
        "period": budget.period,
        "hard": budget.hard,
        "exhausted": budgets.is_over(budget, spent, reserved, now=now),
        "amount": format_decimal(budgets.get_limit(budget, now)) if disclosure != Disclosure.NOTHING else None,
        "spent": format_decimal(spent) if disclosure == Disclosure.SPENDING else None,
        "resets_at": format_timestamp(resets_at) if resets_at else None,
    }


def _open_stores(lease: Lease) -> LeaseStores:
    return open_stores(lease.agent_did, lease.pk)


def _put_artifact(lease: Lease, arguments: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    encoding = arguments.get("encoding", "utf-8")
    media_type = arguments.get("media_type") or ("text/plain" if encoding == "utf-8" else "application/octet-stream")
    require_match("name", arguments["name"], NAME_PATTERN, NAME_RULES)
    require_match("media_type", media_type, MEDIA_TYPE_PATTERN, "a media type")
    try:
        content = decode_content(arguments["content"], encoding)
    except ValueError:
        raise InvalidRequest("content", "Not base64.") from None
    artifacts = _open_stores(lease).artifacts
    artifact, replaced = artifacts.put(
        arguments["name"], BytesIO(content), claims=ContentUploads(clock_from(now)), media_type=media_type, now=now, actor=ACTOR
    )
    return _serialize_artifact(artifact) | {"replaced": replaced}


def _get_artifact(lease: Lease, arguments: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    name, offset, encoding = arguments["name"], arguments.get("offset", 0), arguments.get("encoding", "utf-8")
    require_match("name", name, NAME_PATTERN, NAME_RULES)
    with tempfile.SpooledTemporaryFile(MAX_IN_MEMORY_BYTES) as file:
        artifact = _open_stores(lease).artifacts.fetch(name, file)  # type: ignore[arg-type]
        if artifact is None:
            raise ArtifactNotFound()
        file.seek(min(offset, artifact.size))
        content = file.read(arguments.get("length", DEFAULT_READ_BYTES))
    end = offset + len(content)
    return _serialize_artifact(artifact) | {
        "content": encode_content(content, encoding), "encoding": encoding, "offset": offset,
        "next_offset": end if end < artifact.size else None,
    }  # fmt: skip


def _serialize_artifact(artifact: Artifact) -> dict[str, Any]:
    return {
        "name": artifact.name, "media_type": artifact.media_type, "size_bytes": artifact.size, "sha256": artifact.sha256,
    }  # fmt: skip


def _post_condition(lease: Lease, arguments: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    condition = arguments["condition"]
    require_match("condition", condition, CONDITION_PATTERN, CONDITION_DESCRIPTION)
    ended = conditions.post_condition(lease.environment_id, condition, now=now, agents=[lease.agent_did], actor=ACTOR)
    if ended:
        begin_reclaim(ended)
    return {"ended": [str(each.pk) for each in ended]}


def _create_service_token(lease: Lease, arguments: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    require_match("aud", arguments["aud"], AUDIENCE_PATTERN, AUDIENCE_DESCRIPTION)
    require_match("lxm", arguments["lxm"], NSID_PATTERN, NSID_DESCRIPTION)
    seconds = arguments.get("lifetime_seconds")
    lifetime = timedelta(seconds=seconds) if seconds else DEFAULT_TOKEN_LIFETIME
    token, minted = execution.mint_service_token(
        lease.pk, aud=arguments["aud"], lxm=arguments["lxm"], lifetime=lifetime, now=now, actor=ACTOR
    )
    return {"token": token, "expires_at": format_timestamp(minted.expires_at)}


def _create_record(lease: Lease, arguments: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    require_match("collection", arguments["collection"], NSID_PATTERN, NSID_DESCRIPTION)
    record = records.create_for_agent(
        lease, arguments["collection"], arguments["record"], key=arguments.get("key", ""), now=now, actor=ACTOR
    )
    return {
        "key": record.record_key, "status": record.status, "uri": record.uri, "cid": record.cid, "error": record.error,
    }  # fmt: skip


EXECUTORS: Mapping[str, Callable[[Lease, Mapping[str, Any], datetime], dict[str, Any]]] = {
    "lease_status": _get_status,
    "budget": _get_budgets,
    "put_artifact": _put_artifact,
    "get_artifact": _get_artifact,
    "post_condition": _post_condition,
    "service_token": _create_service_token,
    "create_record": _create_record,
}
