"""Workspace snapshots: take, restore, fork."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases import fork, snapshots
from leases.api import schema
from leases.api.fields import PatternField, StrictCharField, StrictUUIDField
from leases.api.idempotency import StatusAndBody
from leases.api.leases import AcquireSerializer, LeaseSerializer, build_lease_request, render_lease
from leases.api.pagination import paginate
from leases.api.views import ApiRequest, LeaseApiView
from leases.models import DID_DESCRIPTION, DID_PATTERN, Lease
from sandboxes.db.clock import format_timestamp
from sandboxes.eviction import EVICTION_TIMEOUT
from sandboxes.models import Snapshot
from sandboxes.models.state import SnapshotKind
from sandboxes.runs import KILL_GRACE
from sandboxes.state import workspace


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


NEW_SNAPSHOT_SERIALIZER = NewSnapshotSerializer()
RESTORE_SERIALIZER = RestoreSerializer()
FORK_SERIALIZER = ForkSerializer()


class SnapshotListView(LeaseApiView):
    @extend_schema(
        operation_id="leases_snapshots_list",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(SnapshotSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """The copies of a lease's workspace that are kept, newest first; also after its end, for as long as those are kept."""
        found, following = paginate(workspace.find_by_holder(pk), "at", request)
        return Response({"results": [serialize_snapshot(snapshot) for snapshot in found], "next": following})

    @extend_schema(
        operation_id="leases_snapshots_create",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewSnapshotSerializer,
        responses=schema.build_responses(SnapshotSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(201,)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Store the workspace as it is now. A sandbox that sleeps is not woken for it. Only the newest copies are kept,
        these and those taken when it fell asleep, as many of each as the operator says (10 and 2 if not said)."""
        said = self.validate_body(NEW_SNAPSHOT_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            return 201, serialize_snapshot(snapshots.take_snapshot(pk, name=said["name"], now=self.now, actor=self.actor))

        return self.execute_once(act, patience=settings.SANDBOX_START_TIMEOUT + EVICTION_TIMEOUT + 2 * KILL_GRACE)


class SnapshotRestoreView(LeaseApiView):
    @extend_schema(
        operation_id="leases_restore",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=RestoreSerializer,
        responses=schema.build_responses(SnapshotSerializer, 404, 409, 410, 413, 415),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Have an earlier copy in the workspace from the next use on. What is in it now is stored before, and can be gone
        back to in the same way. 409 while something runs in the sandbox. /data is not changed."""
        said = self.validate_body(RESTORE_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            return 200, serialize_snapshot(snapshots.restore_snapshot(pk, said["snapshot_id"], now=self.now, actor=self.actor))

        return self.execute_once(act, patience=settings.SANDBOX_START_TIMEOUT + EVICTION_TIMEOUT + 2 * KILL_GRACE)


class LeaseForkView(LeaseApiView):
    @extend_schema(
        operation_id="leases_fork",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=ForkSerializer,
        responses=schema.build_responses(LeaseSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(200, 201)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """A lease in another environment that starts with a copy of this one's workspace (201). Asked again, it is the
        same one (200); 409 if another lease is held there. A lease that has ended is forked from the newest copy kept.
        /workspace/config.json is the new lease's own; /data is that of its agent."""
        lease = self.lease
        said = self.validate_body(FORK_SERIALIZER)
        said = apply_fork_defaults(said, lease)
        self.caller.require(said["agent_did"])

        def act(run_id: UUID) -> StatusAndBody:
            granted, is_new = fork.fork(
                lease, build_lease_request(said, self.key_id), snapshot=said.get("snapshot_id"), now=self.now, actor=self.actor,
                admit=self.consume_creation_token,
            )  # fmt: skip
            return 201 if is_new else 200, render_lease(granted, now=self.now, is_new=is_new)

        return self.execute_once(act, patience=settings.SANDBOX_START_TIMEOUT + EVICTION_TIMEOUT + 2 * KILL_GRACE)


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
