"""What requests say and answers show of stored state and files."""

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rest_framework import serializers

from leases.api.fields import Matching, Text
from leases.api.serializers import Acquire
from leases.models import DID, DID_ACCEPTS, Lease
from sandboxes.db.clock import iso
from sandboxes.models import Snapshot
from sandboxes.models.state import SnapshotKind
from sandboxes.providers.base import Stat

LAST_SECOND = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp())
KINDS = ("file", "directory", "link", "other")


class Id(serializers.UUIDField):
    """A UUID as JSON has it: a number is none."""

    def to_internal_value(self, data: Any) -> uuid.UUID:
        if not isinstance(data, str):
            self.fail("invalid", value=data)
        return super().to_internal_value(data)


class NewSnapshot(serializers.Serializer):
    name = Text(max_length=100, allow_blank=True, default="", help_text="What you call it.")


class Restore(serializers.Serializer):
    snapshot_id = Id()


class Fork(Acquire):
    """The new lease. What is not said is as in the lease that is forked, or as its environment type says."""

    agent_did = Matching(
        DID, DID_ACCEPTS, max_length=255, required=False, allow_null=True, help_text="Who gets it. Default: the same agent."
    )
    environment_type = Matching(
        r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", required=False, allow_null=True,
        help_text="Default: the same.",
    )  # fmt: skip
    snapshot_id = Id(required=False, allow_null=True, help_text="What it starts with. Default: what is in the workspace now.")


class SnapshotShown(serializers.Serializer):
    id = serializers.UUIDField()
    name = serializers.CharField(help_text="As whoever asked for it called it.")
    kind = serializers.ChoiceField(
        SnapshotKind.choices, help_text="asked: on request; sleep: when its sandbox fell asleep; restored: an earlier one, "
        "made the newest again; forked: of the lease that this one was forked from.",
    )  # fmt: skip
    at = serializers.DateTimeField(help_text="The newest is what the next wake starts from.")
    size_bytes = serializers.IntegerField()


class EntryShown(serializers.Serializer):
    name = serializers.CharField(help_text="Path relative to the directory that was asked for. What is no UTF-8 is replaced.")
    kind = serializers.ChoiceField(KINDS)
    size = serializers.IntegerField(help_text="Bytes of a file, else 0.")
    mode = serializers.CharField(help_text="Permission bits, octal.")
    mtime = serializers.DateTimeField()
    target = serializers.CharField(help_text="Where a link points to, else empty.")


class ListingShown(serializers.Serializer):
    root = serializers.CharField()  # type: ignore[assignment]
    path = serializers.CharField(help_text="Empty for the root itself.")
    entries = EntryShown(many=True)


def fork_said(said: Mapping[str, Any], lease: Lease) -> dict[str, Any]:
    """What a fork asks for, with what it leaves out. In the same type it stays in the same pool."""
    kind = said.get("environment_type") or lease.environment_type_id
    pool = said.get("pool") or (lease.pool.name if kind == lease.environment_type_id else "")
    return {**said, "agent_did": said.get("agent_did") or lease.agent_did, "environment_type": kind, "pool": pool}


def snapshot_shown(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "id": str(snapshot.pk),
        "name": snapshot.name,
        "kind": snapshot.kind,
        "at": iso(snapshot.at),
        "size_bytes": snapshot.size_bytes,
    }


def listing_shown(root: str, under: str, found: Mapping[str, Stat]) -> dict[str, Any]:
    start = len(under) + bool(under)
    entries = [_entry_shown(path[start:], stat) for path, stat in sorted(found.items())]
    return {"root": root, "path": under, "entries": entries}


def _entry_shown(name: str, stat: Stat) -> dict[str, Any]:
    return {
        "name": _text(name),
        "kind": stat.kind,
        "size": stat.size,
        "mode": f"{stat.mode:04o}",
        "mtime": iso(datetime.fromtimestamp(min(max(stat.mtime, 0), LAST_SECOND), UTC)),
        "target": _text(stat.target),
    }


def _text(name: str) -> str:
    """A file's name as text: any bytes may be one."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
