"""The door to one-shot runs: one request, one command in a sandbox of its own, one answer, and nothing left."""

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, BinaryIO
from uuid import UUID

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from drf_spectacular.utils import extend_schema
from rest_framework.exceptions import NotFound

from leases import leasing, one_shot
from leases.api import schema
from leases.api import serializers_one_shot as show
from leases.api.fields import decode_input, seconds_to_timedelta
from leases.api.idempotency import StatusAndBody
from leases.api.leases import AgentApiView, parse_encoding
from leases.errors import InvalidRequest
from leases.errors import RequestTooLarge as BodyTooLarge
from leases.one_shot import OneShotRequest
from sandboxes.providers import tar_validation
from sandboxes.providers.base import Rejected, TooLarge
from sandboxes.runs import KILL_GRACE

NEW_RUN_SERIALIZER = show.NewRunSerializer()
MAX_NEW_RUN_BODY_BYTES = 32 << 20  # a workspace, mostly


class OneShotRunCreateView(AgentApiView):
    @extend_schema(
        operation_id="runs_create",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER, schema.ENCODING_PARAMETER],
        request=show.NewRunSerializer,
        responses=schema.build_responses(show.OneShotResultSerializer, 402, 409, 413, 415, 429),
    )
    def post(self, request: HttpRequest) -> HttpResponse:
        """Run one command in a sandbox of its own, made for it and destroyed before this answers. However it ended is an
        answer, also that there was no sandbox to be had; no place, no quota and bad input are errors, and nothing has run."""
        encoding = parse_encoding(request)
        body, said = self.read(request, NEW_RUN_SERIALIZER, MAX_NEW_RUN_BODY_BYTES)
        self.caller.require(said["agent_did"])
        back = io.BytesIO()
        wish = replace(build_one_shot_request(said, encoding, back), key_id=self.key_id)

        def act(run_id: UUID) -> StatusAndBody:
            result = one_shot.run_once(replace(wish, run_id=run_id), now=self.now, actor=self.actor, admit=self.admit)
            return 200, show.serialize_one_shot_result(result, back.getvalue(), encoding)

        patience = wish.max_duration + one_shot.CLEANUP_TIMEOUT + 2 * KILL_GRACE
        return self.once(request, act, body=body, patience=patience, repeatable=False)


class OneShotRunView(AgentApiView):
    @extend_schema(
        operation_id="runs_get",
        parameters=[schema.ENCODING_PARAMETER],
        responses=schema.build_responses(show.OneShotRunSerializer, 404),
    )
    def get(self, request: HttpRequest, run_id: UUID) -> HttpResponse:
        """What is known of a one-shot run, also after the connection that asked for it was lost."""
        lease = self.caller.lease(run_id)
        if lease.environment_id != f"run-{run_id}":
            raise NotFound("There is no such run.")
        result = one_shot.load_result(leasing.apply_elapsed_clock(lease, self.now))
        return JsonResponse(show.serialize_one_shot_run(result, parse_encoding(request)))


def build_one_shot_request(said: Mapping[str, Any], encoding: str, back: BinaryIO) -> OneShotRequest:
    limits, workspace = said.get("limits") or {}, said.get("workspace")
    return OneShotRequest(
        agent_did=said["agent_did"],
        argv=said["argv"],
        timeout=seconds_to_timedelta(limits, "timeout_seconds") or settings.EXEC_TIMEOUT,
        stdin=decode_input(said["stdin"], encoding, "stdin"),
        env=said["env"],
        cwd=said["cwd"],
        workspace=None if workspace is None else _decode_workspace(workspace),
        output=back if said["return_workspace"] else None,
        max_returned_bytes=show.MAX_RETURNED_WORKSPACE_BYTES,
        memory_mib=limits.get("memory_mib"),
        environment_type=said.get("environment_type") or one_shot.DEFAULT_ENVIRONMENT_TYPE,
        pool=said.get("pool") or "",
    )


def _decode_workspace(text: str) -> BinaryIO:
    """The workspace of a request, checked."""
    tar = io.BytesIO(decode_input(text, "base64", "workspace"))
    try:
        tar_validation.validate_tar(tar)
    except TooLarge as wrong:
        raise BodyTooLarge(str(wrong), field="workspace") from None
    except Rejected as wrong:
        raise InvalidRequest("workspace", str(wrong)) from None
    return tar
