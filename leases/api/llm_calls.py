"""The door to what a lease's sandboxes asked their models, and what that took."""

from uuid import UUID

from django.http import HttpRequest, HttpResponse, JsonResponse
from drf_spectacular.utils import extend_schema

from leases.api import schema
from leases.api.leases import AgentApiView
from leases.api.pagination import paginate
from leases.api.serializers_llm_calls import CallPageSerializer, serialize_call, serialize_call_totals
from sandboxes.egress.totals import calculate_totals
from sandboxes.models import LlmCall


class CallListView(AgentApiView):
    @extend_schema(
        operation_id="leases_calls_list",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(CallPageSerializer, 404),
    )
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """What this lease's sandboxes asked their model, newest first, and the totals."""
        calls = LlmCall.objects.filter(holder=self.caller.lease(pk).pk)
        found, following = paginate(calls, "started_at", request)
        shown = [serialize_call(call) for call in found]
        return JsonResponse({"total": serialize_call_totals(calculate_totals(calls)), "results": shown, "next": following})
