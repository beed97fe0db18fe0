"""Shells of a lease: create, list, delete. `exec` and background processes name the shell in which they run."""

from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases import leasing, shells
from leases.api.base import schema
from leases.api.base.fields import EnvField, PatternField, StrictSerializer, validate_url_value
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.api.runs import SHELL_NAME_DESCRIPTION, SHELL_NAME_PATTERN, CwdField
from leases.models import Shell
from sandboxes.db.clock import format_timestamp
from sandboxes.providers.base import WORKSPACE


class NewShellSerializer(StrictSerializer):
    name = PatternField(SHELL_NAME_PATTERN, SHELL_NAME_DESCRIPTION, help_text="Unique in the lease.")
    env = EnvField(
        default=dict, help_text="Environment variables of its commands. Their values are stored encrypted, and never returned."
    )
    cwd = CwdField(default=WORKSPACE)


class ShellSerializer(serializers.Serializer):
    name = serializers.CharField()
    cwd = serializers.CharField()
    env_names = serializers.ListField(child=serializers.CharField())
    created_at = serializers.DateTimeField()


class ShellsSerializer(serializers.Serializer):
    results = ShellSerializer(many=True)


NEW_SHELL_SERIALIZER = NewShellSerializer()


class ShellListView(LeaseApiView):
    @extend_schema(
        operation_id="leases_shells_list", summary="List shells", responses=schema.build_responses(ShellsSerializer, 404)
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return all shells of a lease, by name. A lease has at most 64."""
        return Response({"results": [serialize_shell(shell) for shell in Shell.objects.filter(lease=pk)]})

    @extend_schema(
        operation_id="leases_shells_create",
        summary="Create a shell",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewShellSerializer,
        responses=schema.build_responses(ShellSerializer, 404, 409, 410, 413, 415, ok=(201,)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Create a shell: a working directory and environment variables for the commands that name the shell.

        Commands outside of the shell do not see its variables. A shell outlives sleep and wake of the sandbox, and ends with
        the lease. The sandbox is not woken and the lease is not renewed."""
        data = self.validate_body(NEW_SHELL_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            shell = shells.create_shell(pk, data["name"], env=data["env"], cwd=data["cwd"], now=self.now)
            return 201, serialize_shell(shell)

        return self.execute_once(act)


class ShellView(LeaseApiView):
    @extend_schema(
        operation_id="leases_shells_get", summary="Get a shell", responses=schema.build_responses(ShellSerializer, 404)
    )
    def get(self, request: ApiRequest, pk: UUID, name: str) -> HttpResponse:
        """Return one shell, without the values of its variables."""
        return Response(serialize_shell(shells.find_shell(pk, _validate_name(name))))

    @extend_schema(
        operation_id="leases_shells_delete",
        summary="Delete a shell",
        responses=schema.build_responses(None, 404, 410, ok=(204,)),
    )
    def delete(self, request: ApiRequest, pk: UUID, name: str) -> HttpResponse:
        """Delete a shell and the values of its variables. Idempotent. Commands in progress continue."""
        leasing.require_active(pk, now=self.now)
        shells.delete_shell(pk, _validate_name(name))
        return HttpResponse(status=204)


def _validate_name(name: str) -> str:
    return str(validate_url_value(NEW_SHELL_SERIALIZER, "name", name))


def serialize_shell(shell: Shell) -> dict[str, Any]:
    return {
        "name": shell.name,
        "cwd": shell.cwd,
        "env_names": shell.env_names,
        "created_at": format_timestamp(shell.created_at),
    }
