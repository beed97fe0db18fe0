"""The door to copies of a workspace: take one, go back to one, start another lease from one."""

from uuid import UUID

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from drf_spectacular.utils import extend_schema

from leases import fork, snapshots
from leases.api import schema
from leases.api import serializers as show
from leases.api import serializers_state as state
from leases.api.idempotency import Answer
from leases.api.leases import Door, asked
from leases.api.pagination import page
from sandboxes.eviction import EVICT_WITHIN
from sandboxes.runs import GRACE
from sandboxes.state import workspace

NEW, RESTORE, FORK = state.NewSnapshot(), state.Restore(), state.Fork()


class Snapshots(Door):
    @extend_schema(
        operation_id="leases_snapshots_list",
        parameters=schema.PAGE,
        responses=schema.answers(schema.page_of(state.SnapshotShown), 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The copies of a lease's workspace that are kept, newest first; also after its end, for as long as those are kept."""
        found, following = page(workspace.of(self.caller.lease(pk).pk), "at", request)
        return JsonResponse({"results": [state.snapshot_shown(snapshot) for snapshot in found], "next": following})

    @extend_schema(
        operation_id="leases_snapshots_create",
        parameters=[schema.IDEMPOTENCY_KEY],
        request=state.NewSnapshot,
        responses=schema.answers(state.SnapshotShown, 402, 404, 409, 410, 413, 415, 429, ok=(201,)),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Store the workspace as it is now. A sandbox that sleeps is not woken for it. Only the newest copies are kept,
        these and those taken when it fell asleep, as many of each as the operator says (10 and 2 if not said)."""
        self.caller.lease(pk)
        body, said = self.read(request, NEW)

        def act(run_id: UUID) -> Answer:
            return 201, state.snapshot_shown(snapshots.take(pk, name=said["name"], now=self.now, actor=self.actor))

        return self.once(request, act, body=body, patience=settings.SANDBOX_START_TIMEOUT + EVICT_WITHIN + 2 * GRACE)


class Restore(Door):
    @extend_schema(
        operation_id="leases_restore",
        parameters=[schema.IDEMPOTENCY_KEY],
        request=state.Restore,
        responses=schema.answers(state.SnapshotShown, 404, 409, 410, 413, 415),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Have an earlier copy in the workspace from the next use on. What is in it now is stored before, and can be gone
        back to in the same way. 409 while something runs in the sandbox. /data is not changed."""
        self.caller.lease(pk)
        body, said = self.read(request, RESTORE)

        def act(run_id: UUID) -> Answer:
            return 200, state.snapshot_shown(snapshots.restore(pk, said["snapshot_id"], now=self.now, actor=self.actor))

        return self.once(request, act, body=body, patience=settings.SANDBOX_START_TIMEOUT + EVICT_WITHIN + 2 * GRACE)


class Fork(Door):
    @extend_schema(
        operation_id="leases_fork",
        parameters=[schema.IDEMPOTENCY_KEY],
        request=state.Fork,
        responses=schema.answers(show.LeaseShown, 402, 404, 409, 410, 413, 415, 429, ok=(200, 201)),
    )
    def post(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """A lease in another environment that starts with a copy of this one's workspace (201). Asked again, it is the
        same one (200); 409 if another lease is held there. A lease that has ended is forked from the newest copy kept.
        /workspace/config.json is the new lease's own; /data is that of its agent."""
        lease = self.caller.lease(pk)
        body, said = self.read(request, FORK)
        said = state.fork_said(said, lease)
        self.caller.require(said["agent_did"])

        def act(run_id: UUID) -> Answer:
            granted, is_new = fork.fork(
                lease, asked(said, self.key_id), snapshot=said.get("snapshot_id"), now=self.now, actor=self.actor,
                admit=self.admit,
            )  # fmt: skip
            return 201 if is_new else 200, self.shown(granted, is_new=is_new)

        return self.once(request, act, body=body, patience=settings.SANDBOX_START_TIMEOUT + EVICT_WITHIN + 2 * GRACE)
