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
from leases.api.fields import decoded, span
from leases.api.idempotency import Answer
from leases.api.leases import Door, encoding_of
from leases.errors import Invalid
from leases.errors import TooLarge as BodyTooLarge
from leases.one_shot import Wish
from sandboxes.providers.base import Rejected, TooLarge
from sandboxes.runs import GRACE
from sandboxes.state import archives

NEW = show.NewRun()
LARGEST_NEW = 32 << 20  # a workspace, mostly


class Runs(Door):
    @extend_schema(
        operation_id="runs_create",
        parameters=[schema.IDEMPOTENCY_KEY, schema.ENCODING],
        request=show.NewRun,
        responses=schema.answers(show.OnceEnded, 402, 409, 413, 415, 429),
    )
    def post(self, request: HttpRequest) -> HttpResponse:
        """Run one command in a sandbox of its own, made for it and destroyed before this answers. However it ended is an
        answer, also that there was no sandbox to be had; no place, no quota and bad input are errors, and nothing has run."""
        encoding = encoding_of(request)
        body, said = self.read(request, NEW, LARGEST_NEW)
        self.caller.require(said["agent_did"])
        back = io.BytesIO()
        wish = replace(wished(said, encoding, back), key_id=self.key_id)

        def act(run_id: UUID) -> Answer:
            result = one_shot.run_once(replace(wish, run_id=run_id), now=self.now, actor=self.actor, admit=self.admit)
            return 200, show.once_ended(result, back.getvalue(), encoding)

        patience = wish.longest + one_shot.GONE_WITHIN + 2 * GRACE
        return self.once(request, act, body=body, patience=patience, repeatable=False)


class OneRun(Door):
    @extend_schema(
        operation_id="runs_get",
        parameters=[schema.ENCODING],
        responses=schema.answers(show.OnceShown, 404),
    )
    def get(self, request: HttpRequest, run_id: UUID) -> HttpResponse:
        """What is known of a one-shot run, also after the connection that asked for it was lost."""
        lease = self.caller.lease(run_id)
        if lease.environment_id != f"run-{run_id}":
            raise NotFound("There is no such run.")
        result = one_shot.result_of(leasing.as_of(lease, self.now))
        return JsonResponse(show.once_shown(result, encoding_of(request)))


def wished(said: Mapping[str, Any], encoding: str, back: BinaryIO) -> Wish:
    limits, workspace = said.get("limits") or {}, said.get("workspace")
    return Wish(
        agent_did=said["agent_did"],
        argv=said["argv"],
        timeout=span(limits, "timeout_seconds") or settings.EXEC_TIMEOUT,
        stdin=decoded(said["stdin"], encoding, "stdin"),
        env=said["env"],
        cwd=said["cwd"],
        workspace=None if workspace is None else _tar(workspace),
        back=back if said["return_workspace"] else None,
        most_back=show.LARGEST_BACK,
        memory_mib=limits.get("memory_mib"),
        environment_type=said.get("environment_type") or one_shot.TYPE,
        pool=said.get("pool") or "",
    )


def _tar(text: str) -> BinaryIO:
    """The workspace of a request, checked."""
    tar = io.BytesIO(decoded(text, "base64", "workspace"))
    try:
        archives.check(tar)
    except TooLarge as wrong:
        raise BodyTooLarge(str(wrong), field="workspace") from None
    except Rejected as wrong:
        raise Invalid("workspace", str(wrong)) from None
    return tar
