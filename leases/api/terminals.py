"""Terminals and previews of a lease: URLs of the stream server that need no API key."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases import shells, terminals
from leases.api.base import schema
from leases.api.base.fields import ArgvField, StrictBooleanField, StrictCharField, StrictIntegerField, StrictSerializer
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.renderers import encode_json
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.api.process_fields import ProcessSerializer, serialize_process
from leases.api.processes import MAX_NEW_PROCESS_BODY_BYTES, find_started_process
from leases.api.runs import LeaseProgramSerializer
from leases.stream_server.address import DEFAULT_GRANT_LIFETIME, MAX_GRANT_LIFETIME
from sandboxes.agent.protocol import TerminalSize
from sandboxes.claims import KILL_GRACE
from sandboxes.db.clock import clock_from, format_timestamp
from sandboxes.models import Run
from sandboxes.processes import START_TIMEOUT, ProcessSpec

MAX_TERMINAL_SIZE = 1000  # rows or columns


class LifetimeField(StrictIntegerField):
    """Seconds until a URL expires, and each connection that it has opened ends."""

    def __init__(self) -> None:
        super().__init__(
            min_value=1,
            max_value=int(MAX_GRANT_LIFETIME.total_seconds()),
            default=int(DEFAULT_GRANT_LIFETIME.total_seconds()),
            help_text="Seconds until the URL expires and its connections end.",
        )


class NewTerminalSerializer(LeaseProgramSerializer):
    argv = ArgvField(default=list(terminals.DEFAULT_COMMAND), help_text="Program and arguments. Default: a login shell.")
    name = StrictCharField(max_length=100, allow_blank=True, default="", help_text="Name chosen by the caller.")
    rows = StrictIntegerField(min_value=1, max_value=MAX_TERMINAL_SIZE, default=terminals.DEFAULT_SIZE.rows)
    columns = StrictIntegerField(min_value=1, max_value=MAX_TERMINAL_SIZE, default=terminals.DEFAULT_SIZE.columns)
    keep_awake = StrictBooleanField(
        default=False, help_text="Do not suspend the sandbox while the program runs. Input to the terminal delays it anyway."
    )
    expires_seconds = LifetimeField()


class TerminalUrlRequestSerializer(StrictSerializer):
    view_only = StrictBooleanField(default=False, help_text="The connection shows the output and accepts no input.")
    expires_seconds = LifetimeField()


class NewPreviewSerializer(StrictSerializer):
    port = StrictIntegerField(min_value=1, max_value=65535, help_text="TCP port on the loopback interface of the sandbox.")
    expires_seconds = LifetimeField()


class TerminalUrlSerializer(serializers.Serializer):
    url = serializers.CharField(help_text="WebSocket URL. The URL is the credential.")
    expires_at = serializers.DateTimeField()
    view_only = serializers.BooleanField()


class TerminalSerializer(ProcessSerializer):
    url = serializers.CharField(help_text="WebSocket URL. The URL is the credential.")
    expires_at = serializers.DateTimeField(help_text="End of the validity of the URL.")


class PreviewSerializer(serializers.Serializer):
    url = serializers.CharField(help_text="URL that leads to the port. The URL is the credential.")
    port = serializers.IntegerField()
    expires_at = serializers.DateTimeField()


NEW_TERMINAL_SERIALIZER, TERMINAL_URL_SERIALIZER = NewTerminalSerializer(), TerminalUrlRequestSerializer()
NEW_PREVIEW_SERIALIZER = NewPreviewSerializer()


class TerminalListView(LeaseApiView):
    max_body_bytes = MAX_NEW_PROCESS_BODY_BYTES

    @extend_schema(
        operation_id="leases_terminals_open",
        summary="Open a terminal",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewTerminalSerializer,
        responses=schema.build_responses(TerminalSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(201,)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Start a program with a terminal, and return a WebSocket URL to connect to it.

        The terminal is a background process: `/processes` lists it, and DELETE there ends it. Several clients may be connected
        at once, and a client that reconnects continues where it was. Binary messages are input and output; the text message
        `{"type": "resize", "rows": 24, "columns": 80}` changes the size. The URL and its connections end with the API key."""
        data = self.validate_body(NEW_TERMINAL_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            clock = clock_from(self.now)
            context = shells.build_context(pk, data.get("shell"), cwd=data.get("cwd"), env=data["env"])
            size = TerminalSize(data["rows"], data["columns"])
            spec = ProcessSpec(data["argv"], context.env, context.cwd, data["name"], run_id, data["keep_awake"], terminal=size)
            return 201, serialize_process(terminals.open_terminal(pk, spec, now=clock(), actor=self.actor))

        def rebuild(run: Run) -> StatusAndBody | None:
            process = find_started_process(run)
            return (201, serialize_process(process)) if process else None

        max_duration = settings.SANDBOX_START_TIMEOUT + START_TIMEOUT + 2 * KILL_GRACE
        response = self.execute_once(act, max_duration=max_duration, repeatable=False, rebuild=rebuild)
        return self._add_url(pk, response, lifetime=timedelta(seconds=data["expires_seconds"]))

    def _add_url(self, pk: UUID, response: HttpResponse, *, lifetime: timedelta) -> HttpResponse:
        """Add a URL to the response, which is stored without it: the URL is a credential."""
        if response.status_code != 201:
            return response
        process = json.loads(response.content)
        url, grant = terminals.grant_access(  # also if the program has ended already
            pk, UUID(process["process_id"]), read_only=False, lifetime=lifetime, issuer=self.caller.issuer, actor=self.actor,
            now=self.now,
        )  # fmt: skip
        response.content = encode_json(process | {"url": url, "expires_at": format_end(grant.expires_at)})
        return response


class TerminalUrlView(LeaseApiView):
    @extend_schema(
        operation_id="leases_terminals_url",
        summary="Get a URL of a terminal",
        request=TerminalUrlRequestSerializer,
        responses=schema.build_responses(TerminalUrlSerializer, 404, 409, 410, 413, 415),
    )
    def post(self, request: ApiRequest, pk: UUID, process_id: UUID) -> HttpResponse:
        """Return a further URL of a terminal, for example one that only shows the output. The lease is not renewed."""
        data = self.validate_body(TERMINAL_URL_SERIALIZER)
        url, grant = terminals.build_terminal_url(
            pk, process_id, read_only=data["view_only"], lifetime=timedelta(seconds=data["expires_seconds"]),
            issuer=self.caller.issuer, actor=self.actor, now=self.now,
        )  # fmt: skip
        return Response({"url": url, "expires_at": format_end(grant.expires_at), "view_only": grant.read_only})


class PreviewListView(LeaseApiView):
    @extend_schema(
        operation_id="leases_previews_create",
        summary="Get a preview URL of a port",
        request=NewPreviewSerializer,
        responses=schema.build_responses(PreviewSerializer, 404, 410, 413, 415, ok=(201,)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return a URL that leads to a program that listens on a TCP port in the sandbox, by HTTP and WebSocket.

        The policy of the environment type must allow previews. The program need not listen yet. Requests neither renew the
        lease nor wake a cold sandbox. The URL ends with the lease, and when the API key is revoked or expires, not when it is
        rotated."""
        data = self.validate_body(NEW_PREVIEW_SERIALIZER)
        lifetime = timedelta(seconds=data["expires_seconds"])
        url, grant = terminals.build_preview_url(pk, data["port"], lifetime=lifetime, key_id=self.caller.pk, now=self.now)
        body: dict[str, Any] = {"url": url, "port": grant.port, "expires_at": format_end(grant.expires_at)}
        return Response(body, status=201)


def format_end(seconds: int) -> str:
    return format_timestamp(datetime.fromtimestamp(seconds, UTC))
