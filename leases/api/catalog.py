"""Catalog of runnable agents: list, get, run."""

from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases import leasing
from leases.agent_runs.clis.registry import CLIS
from leases.api.agent_runs import AgentRunSerializer, AgentRunStarter, NewAgentRunSerializer
from leases.api.base import schema
from leases.api.base.fields import PatternField, build_did_field
from leases.api.base.pagination import paginate
from leases.api.base.views import ApiRequest, ApiView
from leases.api.queue_fields import QueuedRunSerializer
from leases.catalog.models import ENVIRONMENT_ID_PREFIX, ID_PREFIX, CatalogAgent
from leases.errors import CatalogAgentNotFound
from leases.models import ENVIRONMENT_ID_DESCRIPTION, ENVIRONMENT_ID_PATTERN, Lease
from sandboxes.models import PackAssignment
from sandboxes.models.policies import SEALED_POLICY_NAME


class CatalogAgentSerializer(serializers.Serializer):
    id = serializers.CharField(help_text="`sandbox:<name>`.")
    title = serializers.CharField()
    description = serializers.CharField()
    cli = serializers.ChoiceField(sorted(CLIS))
    model = serializers.CharField(help_text="Empty: that of the CLI.")
    environment_type = serializers.CharField(help_text="Of the leases in which the agent runs.")
    pack = serializers.CharField(allow_null=True, help_text="Pack and version of the environment type.")
    policy = serializers.CharField(help_text="Sandbox policy of the environment type.")
    limits = serializers.DictField(help_text="Limits of each run, besides those of the policy.")


class CatalogRunSerializer(NewAgentRunSerializer):
    """Fields of an agent run that the catalog does not set, and the lease in which it runs."""

    agent_did = build_did_field()
    environment_id = PatternField(
        ENVIRONMENT_ID_PATTERN, ENVIRONMENT_ID_DESCRIPTION, required=False, allow_null=True,
        help_text=f"Default: {ENVIRONMENT_ID_PREFIX} and the name of the agent, so that all runs share one sandbox.",
    )  # fmt: skip
    cli = model = permission_mode = system_prompt = argv = shell = None  # type: ignore[assignment]  # removes the field


CATALOG_RUN_SERIALIZER = CatalogRunSerializer()


class CatalogView(ApiView):
    @extend_schema(
        operation_id="agent_catalog_list",
        summary="List the agents of the catalog",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(CatalogAgentSerializer)),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """Return the agents that can be run, newest first."""
        page, next_url = paginate(_get_enabled(), "created_at", request)
        return Response({"results": serialize_catalog_agents(page), "next": next_url})


class CatalogAgentView(ApiView):
    @extend_schema(
        operation_id="agent_catalog_get",
        summary="Get an agent of the catalog",
        responses=schema.build_responses(CatalogAgentSerializer, 404),
    )
    def get(self, request: ApiRequest, catalog_id: str) -> HttpResponse:
        """Return one agent by its id, `sandbox:<name>`."""
        return Response(serialize_catalog_agents([find_catalog_agent(catalog_id)])[0])


class CatalogRunListView(AgentRunStarter):
    @extend_schema(
        operation_id="agent_catalog_run",
        summary="Run an agent of the catalog",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=CatalogRunSerializer,
        responses=schema.build_responses(AgentRunSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(201,))
        | {202: QueuedRunSerializer},
    )
    def post(self, request: ApiRequest, catalog_id: str) -> HttpResponse:
        """Run the CLI in a lease of the catalog entry's environment type: the active one of the agent, or a new one.

        The answer is that of an agent run, with `lease_id`; its messages are in the stream of the run."""
        data = self.validate_body(CATALOG_RUN_SERIALIZER)
        self.caller.require(data["agent_did"])
        agent = find_catalog_agent(catalog_id)
        lease_request = leasing.LeaseRequest(
            agent_did=data["agent_did"],
            environment_id=data.get("environment_id") or f"{ENVIRONMENT_ID_PREFIX}{agent.name}",
            environment_type=agent.environment_type.name,
            key_id=str(self.caller.pk),
            allowed=self.caller.allowed,
        )

        def acquire() -> Lease:
            return leasing.acquire(lease_request, now=self.now, actor=self.actor, admit=self.consume_creation_token)[0]

        fixed = {
            "cli": agent.cli, "model": agent.model, "permission_mode": agent.permission_mode, "argv": agent.argv,
            "system_prompt": agent.system_prompt,
        }  # fmt: skip
        return self.start(acquire, data | fixed, agent.limits, agent_did=data["agent_did"])


def _get_enabled() -> Any:
    return CatalogAgent.objects.filter(enabled=True).select_related("environment_type__policy")


def find_catalog_agent(catalog_id: str) -> CatalogAgent:
    """Return an enabled agent. Raise CatalogAgentNotFound."""
    name = catalog_id.removeprefix(ID_PREFIX)
    agent: CatalogAgent | None = _get_enabled().filter(name=name).first() if catalog_id.startswith(ID_PREFIX) else None
    if agent is None:
        raise CatalogAgentNotFound()
    return agent


def serialize_catalog_agents(agents: list[CatalogAgent]) -> list[dict[str, Any]]:
    types = [agent.environment_type.name for agent in agents]
    assignments = PackAssignment.objects.filter(environment_type__in=types).select_related("version")
    packs = {row.environment_type: str(row.version) for row in assignments.defer("version__archive", "version__schemas")}
    return [
        {
            "id": agent.catalog_id,
            "title": agent.title,
            "description": agent.description,
            "cli": agent.cli,
            "model": agent.model,
            "environment_type": agent.environment_type.name,
            "pack": packs.get(agent.environment_type.name),
            "policy": str(agent.environment_type.policy or SEALED_POLICY_NAME),
            "limits": agent.limits.to_document(),
        }
        for agent in agents
    ]
