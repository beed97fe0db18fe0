"""Agents: list, create, get."""

from typing import Any
from uuid import UUID

from django.db import transaction
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.response import Response

from leases.api.base import schema
from leases.api.base.fields import StrictCharField, StrictSerializer, build_did_field, build_project_field
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.pagination import paginate
from leases.api.base.permissions import HasKey, OperatorWrites
from leases.api.base.views import ApiRequest, ApiView
from leases.errors import Conflict
from leases.models import Agent
from leases.projects import registry
from sandboxes import audit
from sandboxes.db.clock import format_timestamp


class NewAgentSerializer(StrictSerializer):
    did = build_did_field()
    name = StrictCharField(max_length=100, allow_blank=True, default="")
    project = build_project_field()


class AgentSerializer(serializers.Serializer):
    did = serializers.CharField()
    name = serializers.CharField()
    project = serializers.CharField(help_text="The agent enters environments of this project only.")
    created_at = serializers.DateTimeField()


NEW_AGENT_SERIALIZER = NewAgentSerializer()


class AgentListView(ApiView):
    permission_classes = [HasKey, OperatorWrites]

    @extend_schema(
        operation_id="agents_list",
        summary="List agents",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(AgentSerializer)),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """Return the agents of this key, newest first; with an operator's key, all agents."""
        agents = Agent.objects.select_related("project")
        if not self.caller.key.operator:
            agents = agents.filter(did__in=self.caller.key.dids)
        page, next_url = paginate(agents, "created_at", request)
        return Response({"results": [serialize_agent(agent) for agent in page], "next": next_url})

    @extend_schema(
        operation_id="agents_create",
        summary="Create an agent",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewAgentSerializer,
        responses=schema.build_responses(AgentSerializer, 409, 413, 415, ok=(200, 201)),
    )
    def post(self, request: ApiRequest) -> HttpResponse:
        """Create an agent (201), or return the existing one unchanged (200). Operator keys only.

        An agent is also created with its first API key or lease."""
        data = self.validate_body(NEW_AGENT_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            project = registry.find(data.get("project") or "")
            defaults = {"name": data["name"], "project": project, "created_at": self.now}
            with transaction.atomic():
                agent, is_new = Agent.objects.select_related("project").get_or_create(did=data["did"], defaults=defaults)
                if is_new:
                    audit.record(agent, "Create agent", f"project {project}", actor=self.actor, now=self.now)
            if "project" in data and agent.project_id != project.pk:
                raise Conflict("The agent belongs to another project.", field="project")
            return 201 if is_new else 200, serialize_agent(agent)

        return self.execute_once(act)


class AgentView(ApiView):
    @extend_schema(operation_id="agents_get", summary="Get an agent", responses=schema.build_responses(AgentSerializer, 404))
    def get(self, request: ApiRequest, did: str) -> HttpResponse:
        """Return one agent."""
        agent = (
            Agent.objects.select_related("project").filter(did=did).first()
            if self.caller.may_act_for(did) and "\0" not in did
            else None
        )
        if agent is None:
            raise NotFound("There is no such agent.")
        return Response(serialize_agent(agent))


def serialize_agent(agent: Agent) -> dict[str, Any]:
    return {
        "did": agent.did,
        "name": agent.name,
        "project": agent.project.name,
        "created_at": format_timestamp(agent.created_at),
    }
