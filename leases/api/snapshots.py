"""The door to copies of a workspace: take one, go back to one, start another lease from one."""

from uuid import UUID

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from drf_spectacular.utils import extend_schema

from leases import fork, snapshots
from leases.api import schema
from leases.api import serializers as show
from leases.api import serializers_state as state
from leases.api.idempotency import StatusAndBody
from leases.api.leases import AgentApiView, build_lease_request
from leases.api.pagination import paginate
from sandboxes.eviction import EVICTION_TIMEOUT
from sandboxes.runs import KILL_GRACE
from sandboxes.state import workspace

NEW_SNAPSHOT_SERIALIZER, RESTORE_SERIALIZER, FORK_SERIALIZER = (
    state.NewSnapshotSerializer(),
    state.RestoreSerializer(),
    state.ForkSerializer(),
)


class SnapshotListView(AgentApiView):
    @extend_schema(
        operation_id="leases_snapshots_list",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(state.SnapshotSerializer), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The copies of a lease's workspace that are kept, newest first; also after its end, for as long as those are kept."""
        found, following = paginate(workspace.find_by_holder(self.caller.lease(pk).pk), "at", request)
        return JsonResponse({"results": [state.serialize_snapshot(snapshot) for snapshot in found], "next": following})

    @extend_schema(
        operation_id="leases_snapshots_create",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=state.NewSnapshotSerializer,
        responses=schema.build_responses(state.SnapshotSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(201,)),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Store the workspace as it is now. A sandbox that sleeps is not woken for it. Only the newest copies are kept,
        these and those taken when it fell asleep, as many of each as the operator says (10 and 2 if not said)."""
        self.caller.lease(pk)
        body, said = self.read(request, NEW_SNAPSHOT_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            return 201, state.serialize_snapshot(snapshots.take_snapshot(pk, name=said["name"], now=self.now, actor=self.actor))

        return self.once(request, act, body=body, patience=settings.SANDBOX_START_TIMEOUT + EVICTION_TIMEOUT + 2 * KILL_GRACE)


class SnapshotRestoreView(AgentApiView):
    @extend_schema(
        operation_id="leases_restore",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=state.RestoreSerializer,
        responses=schema.build_responses(state.SnapshotSerializer, 404, 409, 410, 413, 415),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Have an earlier copy in the workspace from the next use on. What is in it now is stored before, and can be gone
        back to in the same way. 409 while something runs in the sandbox. /data is not changed."""
        self.caller.lease(pk)
        body, said = self.read(request, RESTORE_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            return 200, state.serialize_snapshot(
                snapshots.restore_snapshot(pk, said["snapshot_id"], now=self.now, actor=self.actor)
            )

        return self.once(request, act, body=body, patience=settings.SANDBOX_START_TIMEOUT + EVICTION_TIMEOUT + 2 * KILL_GRACE)


class LeaseForkView(AgentApiView):
    @extend_schema(
        operation_id="leases_fork",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=state.ForkSerializer,
        responses=schema.build_responses(show.LeaseSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(200, 201)),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """A lease in another environment that starts with a copy of this one's workspace (201). Asked again, it is the
        same one (200); 409 if another lease is held there. A lease that has ended is forked from the newest copy kept.
        /workspace/config.json is the new lease's own; /data is that of its agent."""
        lease = self.caller.lease(pk)
        body, said = self.read(request, FORK_SERIALIZER)
        said = state.apply_fork_defaults(said, lease)
        self.caller.require(said["agent_did"])

        def act(run_id: UUID) -> StatusAndBody:
            granted, is_new = fork.fork(
                lease, build_lease_request(said, self.key_id), snapshot=said.get("snapshot_id"), now=self.now, actor=self.actor,
                admit=self.admit,
            )  # fmt: skip
            return 201 if is_new else 200, self.shown(granted, is_new=is_new)

        return self.once(request, act, body=body, patience=settings.SANDBOX_START_TIMEOUT + EVICTION_TIMEOUT + 2 * KILL_GRACE)
