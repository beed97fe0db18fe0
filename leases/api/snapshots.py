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
from leases.api.base import schema
from leases.api.base.fields import PatternField, StrictCharField, StrictSerializer, StrictUUIDField
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.pagination import paginate
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.api.leases import AcquireSerializer, LeaseSerializer, build_lease_request, render_lease
from leases.models import DID_DESCRIPTION, DID_PATTERN, Lease
from leases.placement import find_fork_pool
from sandboxes.claims import CLAIM_TTL, KILL_GRACE
from sandboxes.db.clock import format_timestamp
from sandboxes.models import Snapshot
from sandboxes.models.state import SnapshotKind
from sandboxes.state import workspace
from sandboxes.state.exact_tars import OMISSION_KINDS


class NewSnapshotSerializer(StrictSerializer):
    name = StrictCharField(max_length=100, allow_blank=True, default="", help_text="Name chosen by the caller.")


class RestoreSerializer(StrictSerializer):
    snapshot_id = StrictUUIDField()


class ForkSerializer(AcquireSerializer):
    """New lease of a fork. Defaults of agent, environment type and, within the same type, pool: those of the forked lease."""

    agent_did = PatternField(
        DID_PATTERN,
        DID_DESCRIPTION,
        max_length=255,
        required=False,
        allow_null=True,
        help_text="Agent of the new lease. Default: agent of the forked lease.",
    )
    environment_type = PatternField(
        r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", required=False, allow_null=True,
        help_text="Default: environment type of the forked lease.",
    )  # fmt: skip
    snapshot_id = StrictUUIDField(
        required=False, allow_null=True, help_text="Snapshot to start from. Default: the current workspace."
    )


class OmissionSerializer(serializers.Serializer):
    kind = serializers.ChoiceField([*OMISSION_KINDS.items()])
    count = serializers.IntegerField()
    paths = serializers.ListField(child=serializers.CharField(), help_text="The first 5, of which at most 200 characters.")


class SnapshotSerializer(serializers.Serializer):
    id = serializers.UUIDField()
    name = serializers.CharField(help_text="Name given on creation.")
    kind = serializers.ChoiceField(
        SnapshotKind.choices, help_text="asked: on request; sleep: at the eviction of the sandbox; restored: copy of an "
        "earlier snapshot, made current by a restore; forked: copy of the forked lease's workspace; "
        "found: files that the database did not record, since it lost its last changes. No wake starts from them by itself.",
    )  # fmt: skip
    at = serializers.DateTimeField(help_text="Creation time. The next wake starts from the newest snapshot.")
    size_bytes = serializers.IntegerField(help_text="Size of the stored tar.")
    omitted = OmissionSerializer(
        many=True, help_text="Content that is not kept, and that a restore does therefore not bring back."
    )


NEW_SNAPSHOT_SERIALIZER = NewSnapshotSerializer()
RESTORE_SERIALIZER = RestoreSerializer()
FORK_SERIALIZER = ForkSerializer()


class SnapshotListView(LeaseApiView):
    @extend_schema(
        operation_id="leases_snapshots_list",
        summary="List snapshots",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(SnapshotSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return the workspace snapshots of a lease, newest first.

        Snapshots are kept for LEASEHOLD_KEEP_STATE after the end of the lease."""
        page, next_url = paginate(workspace.find_by_holder(pk), "at", request)
        return Response({"results": [serialize_snapshot(snapshot) for snapshot in page], "next": next_url})

    @extend_schema(
        operation_id="leases_snapshots_create",
        summary="Take a snapshot",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewSnapshotSerializer,
        responses=schema.build_responses(SnapshotSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(201,)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Store the current workspace. A cold sandbox is not woken.

        Only the newest snapshots are retained, by default 10 taken on request and 2 taken at an eviction."""
        data = self.validate_body(NEW_SNAPSHOT_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            return 201, serialize_snapshot(snapshots.take_snapshot(pk, name=data["name"], now=self.now, actor=self.actor))

        return self.execute_once(act, max_duration=settings.SANDBOX_START_TIMEOUT + CLAIM_TTL + 2 * KILL_GRACE)


class SnapshotRestoreView(LeaseApiView):
    @extend_schema(
        operation_id="leases_restore",
        summary="Restore a snapshot",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=RestoreSerializer,
        responses=schema.build_responses(SnapshotSerializer, 404, 409, 410, 413, 415),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Replace the workspace with a snapshot, effective from the next use. /data is not changed.

        The current workspace is stored as a snapshot first. 409 while a run is open in the sandbox."""
        data = self.validate_body(RESTORE_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            return 200, serialize_snapshot(snapshots.restore_snapshot(pk, data["snapshot_id"], now=self.now, actor=self.actor))

        return self.execute_once(act, max_duration=settings.SANDBOX_START_TIMEOUT + CLAIM_TTL + 2 * KILL_GRACE)


class LeaseForkView(LeaseApiView):
    @extend_schema(
        operation_id="leases_fork",
        summary="Fork a lease",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=ForkSerializer,
        responses=schema.build_responses(LeaseSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(200, 201)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Grant a lease in another environment that starts with a copy of this lease's workspace (201).

        A repeated request returns the same lease (200); 409 if the agent holds another lease in that environment. An ended
        lease is forked from its newest snapshot. The new lease has its own config.json and the /data of its agent."""
        lease = self.lease
        data = self.validate_body(FORK_SERIALIZER)
        data = apply_fork_defaults(data, lease)
        self.caller.require(data["agent_did"])

        def act(run_id: UUID) -> StatusAndBody:
            granted, is_new = fork.fork(
                lease, build_lease_request(data, self.caller), snapshot=data.get("snapshot_id"), now=self.now, actor=self.actor,
                admit=self.consume_creation_token,
            )  # fmt: skip
            return 201 if is_new else 200, render_lease(granted, now=self.now, is_new=is_new)

        return self.execute_once(act, max_duration=settings.SANDBOX_START_TIMEOUT + CLAIM_TTL + 2 * KILL_GRACE)


def apply_fork_defaults(data: Mapping[str, Any], lease: Lease) -> dict[str, Any]:
    """Return the fork request with its defaults applied. In the same environment type the pool stays the same,
    unless the type chooses it."""
    environment_type = data.get("environment_type") or lease.environment_type_id
    pool = data.get("pool") or (find_fork_pool(lease) if environment_type == lease.environment_type_id else "")
    return {**data, "agent_did": data.get("agent_did") or lease.agent_did, "environment_type": environment_type, "pool": pool}


def serialize_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "id": str(snapshot.pk),
        "name": snapshot.name,
        "kind": snapshot.kind,
        "at": format_timestamp(snapshot.at),
        "size_bytes": snapshot.size_bytes,
        "omitted": snapshot.omitted,
    }
