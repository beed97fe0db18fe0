"""The door to what a lease's sandboxes asked their models, and what that took."""

from uuid import UUID

from django.http import HttpRequest, HttpResponse, JsonResponse
from drf_spectacular.utils import extend_schema

from leases.api import schema
from leases.api.leases import Door
from leases.api.pagination import page
from leases.api.serializers_llm_calls import CallsShown, call_shown, total_shown
from sandboxes.egress.totals import totals
from sandboxes.models import LlmCall


class Calls(Door):
    @extend_schema(operation_id="leases_calls_list", parameters=schema.PAGE, responses=schema.answers(CallsShown, 404))
    def get(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """What this lease's sandboxes asked their model, newest first, and the totals."""
        calls = LlmCall.objects.filter(holder=self.caller.lease(pk).pk)
        found, following = page(calls, "started_at", request)
        shown = [call_shown(call) for call in found]
        return JsonResponse({"total": total_shown(totals(calls)), "results": shown, "next": following})
