"""What requests say and answers show of stored state and files."""

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rest_framework import serializers

from leases.api.fields import PatternField, StrictCharField
from leases.api.serializers import AcquireSerializer
from leases.models import DID_DESCRIPTION, DID_PATTERN, Lease
from sandboxes.db.clock import format_timestamp
from sandboxes.models import Snapshot
from sandboxes.models.state import SnapshotKind
from sandboxes.providers.base import FileStat

MAX_TIMESTAMP = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp())
FILE_KINDS = ("file", "directory", "link", "other")


class StrictUUIDField(serializers.UUIDField):
    """A UUID as JSON has it: a number is none."""

    def to_internal_value(self, data: Any) -> uuid.UUID:
        if not isinstance(data, str):
            self.fail("invalid", value=data)
        return super().to_internal_value(data)


class NewSnapshotSerializer(serializers.Serializer):
    name = StrictCharField(max_length=100, allow_blank=True, default="", help_text="What you call it.")


class RestoreSerializer(serializers.Serializer):
    snapshot_id = StrictUUIDField()


class ForkSerializer(AcquireSerializer):
    """The new lease. What is not said is as in the lease that is forked, or as its environment type says."""

    agent_did = PatternField(
        DID_PATTERN,
        DID_DESCRIPTION,
        max_length=255,
        required=False,
        allow_null=True,
        help_text="Who gets it. Default: the same agent.",
    )
    environment_type = PatternField(
        r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", required=False, allow_null=True,
        help_text="Default: the same.",
    )  # fmt: skip
    snapshot_id = StrictUUIDField(
        required=False, allow_null=True, help_text="What it starts with. Default: what is in the workspace now."
    )


class SnapshotSerializer(serializers.Serializer):
    id = serializers.UUIDField()
    name = serializers.CharField(help_text="As whoever asked for it called it.")
    kind = serializers.ChoiceField(
        SnapshotKind.choices, help_text="asked: on request; sleep: when its sandbox fell asleep; restored: an earlier one, "
        "made the newest again; forked: of the lease that this one was forked from.",
    )  # fmt: skip
    at = serializers.DateTimeField(help_text="The newest is what the next wake starts from.")
    size_bytes = serializers.IntegerField()


class FileEntrySerializer(serializers.Serializer):
    name = serializers.CharField(help_text="Path relative to the directory that was asked for. What is no UTF-8 is replaced.")
    kind = serializers.ChoiceField(FILE_KINDS)
    size = serializers.IntegerField(help_text="Bytes of a file, else 0.")
    mode = serializers.CharField(help_text="Permission bits, octal.")
    mtime = serializers.DateTimeField()
    target = serializers.CharField(help_text="Where a link points to, else empty.")


class FileListingSerializer(serializers.Serializer):
    root = serializers.CharField()  # type: ignore[assignment]
    path = serializers.CharField(help_text="Empty for the root itself.")
    entries = FileEntrySerializer(many=True)


def apply_fork_defaults(said: Mapping[str, Any], lease: Lease) -> dict[str, Any]:
    """What a fork asks for, with what it leaves out. In the same type it stays in the same pool."""
    kind = said.get("environment_type") or lease.environment_type_id
    pool = said.get("pool") or (lease.pool.name if kind == lease.environment_type_id else "")
    return {**said, "agent_did": said.get("agent_did") or lease.agent_did, "environment_type": kind, "pool": pool}


def serialize_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "id": str(snapshot.pk),
        "name": snapshot.name,
        "kind": snapshot.kind,
        "at": format_timestamp(snapshot.at),
        "size_bytes": snapshot.size_bytes,
    }


def serialize_listing(root: str, under: str, found: Mapping[str, FileStat]) -> dict[str, Any]:
    start = len(under) + bool(under)
    entries = [_serialize_entry(path[start:], stat) for path, stat in sorted(found.items())]
    return {"root": root, "path": under, "entries": entries}


def _serialize_entry(name: str, stat: FileStat) -> dict[str, Any]:
    return {
        "name": _decode_name(name),
        "kind": stat.kind,
        "size": stat.size,
        "mode": f"{stat.mode:04o}",
        "mtime": format_timestamp(datetime.fromtimestamp(min(max(stat.mtime, 0), MAX_TIMESTAMP), UTC)),
        "target": _decode_name(stat.target),
    }


def _decode_name(name: str) -> str:
    """A file's name as text: any bytes may be one."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
