"""Budgets: list and read; with operators' keys also create, change, top up and delete."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

import structlog
from django.core.exceptions import ValidationError as InvalidBudget
from django.db.models import Model, QuerySet
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.exceptions import PermissionDenied
from rest_framework.response import Response

from billing import budgets
from billing.errors import BudgetNotFound
from billing.models import Budget, BudgetTopUp
from billing.models.budgets import Scope
from leases.api.base import schema
from leases.api.base.idempotency import HEADER_NAME, KeyReused, StatusAndBody
from leases.api.base.pagination import paginate
from leases.api.base.permissions import HasKey, ManagesBudgets
from leases.api.base.views import ApiRequest, ApiView
from leases.api.budget_documents import (
    BudgetChangeSerializer,
    BudgetSerializer,
    NewBudgetSerializer,
    NewTopUpSerializer,
    ToppedUpBudgetSerializer,
    TopUpSerializer,
    serialize_budget,
    serialize_top_up,
)
from leases.budget_subjects import require_subject
from leases.errors import InvalidRequest
from leases.models import KeyScope

log = structlog.get_logger(__name__)
MAX_ID = 2**63 - 1
FIXED_FIELDS = ("scope", "subject", "model", "unit", "period")  # of a budget
FIELDS = {"grace": "grace_seconds", "__all__": "model"}  # of the request, by columns of the model's errors


NEW_BUDGET_SERIALIZER, CHANGE_SERIALIZER = NewBudgetSerializer(), BudgetChangeSerializer()
NEW_TOP_UP_SERIALIZER = NewTopUpSerializer()


class BudgetApiView(ApiView):
    """Base of the views of budgets. Agents' keys read, and operators' keys without a list of pools write."""

    permission_classes = [HasKey, ManagesBudgets]
    key_scope = KeyScope.COSTS

    def find_visible(self) -> QuerySet[Budget]:
        key = self.caller.key
        return Budget.objects.all() if key.operator else budgets.find_visible_budgets(self.key_id, key.dids, now=self.now)

    def get_budget(self, budget_id: int) -> Budget:
        budget = self.find_visible().filter(pk=budget_id).first() if budget_id <= MAX_ID else None
        if budget is None:
            raise BudgetNotFound
        return budget

    def serialize(self, budget: Budget, basis: budgets.ReservationBasis | None = None) -> dict[str, Any]:
        disclosure = budgets.get_disclosure(budget.scope, budget.subject, **self.caller.budget_access)
        return serialize_budget(budget, disclosure, basis or budgets.ReservationBasis.load(), now=self.now)

    def derive_request_id(self, run_id: UUID) -> UUID:
        """Return the id of the row that this request creates. A key of a client names one row, also after an error freed it.

        The first digest stays when the API key is rotated."""
        key, holder = self.request.META.get("HTTP_IDEMPOTENCY_KEY"), self.caller.key
        text = f"{holder.first_digest or holder.digest} {self.request.path} {key}"
        return run_id if key is None else uuid5(NAMESPACE_OID, text)

    def log_change(self, event: str, budget: Budget, **fields: Any) -> None:
        log.info(event, budget=budget.pk, description=str(budget), actor=self.actor, **fields)


class BudgetListView(BudgetApiView):
    @extend_schema(
        operation_id="budgets_list",
        summary="List budgets",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(BudgetSerializer)),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """Return the budgets that apply to leases of this key's agents, newest first; with an operator's key, all budgets.

        An agent's key reads amount and spending of budgets for its agents and for the key itself, and the amount of budgets
        for an environment type. Of other budgets it reads only whether they are exhausted and when they reset."""
        page, next_url = paginate(self.find_visible(), "created_at", request)
        basis = budgets.ReservationBasis.load()
        return Response({"results": [self.serialize(budget, basis) for budget in page], "next": next_url})

    @extend_schema(
        operation_id="budgets_create",
        summary="Create a budget",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewBudgetSerializer,
        responses=schema.build_responses(BudgetSerializer, 409, 413, 415, ok=(201,)),
    )
    def post(self, request: ApiRequest) -> HttpResponse:
        """Create a budget, once for an Idempotency-Key. The spending of the present period counts at once.

        Needs an operator's key without a list of pools, with the scopes `costs` and `leases`."""
        data = self.validate_body(NEW_BUDGET_SERIALIZER)
        with name_fields():
            require_valid_subject(data["scope"], data["subject"])

        def act(run_id: UUID) -> StatusAndBody:
            with name_fields():
                stated = Budget(**to_columns(data))
                request_id = self.derive_request_id(run_id)
                budget, is_new = budgets.create_budget(stated, request_id=request_id, actor=self.actor, now=self.now)
            require_same(stated, budget, FIXED_FIELDS)
            if is_new:
                self.log_change("budget created", budget)
            return 201, self.serialize(budget)

        return self.execute_once(act)


class BudgetView(BudgetApiView):
    @extend_schema(
        operation_id="budgets_get",
        summary="Get a budget",
        responses=schema.build_responses(BudgetSerializer, 404),
    )
    def get(self, request: ApiRequest, budget_id: int) -> HttpResponse:
        """Return a budget, as far as the key may read it."""
        return Response(self.serialize(self.get_budget(budget_id)))

    @extend_schema(
        operation_id="budgets_update",
        summary="Change a budget",
        request=BudgetChangeSerializer,
        responses=schema.build_responses(BudgetSerializer, 404, 413, 415),
    )
    def patch(self, request: ApiRequest, budget_id: int) -> HttpResponse:
        """Change the stated fields, at once. Idempotent. For an increase of one period alone, add a top-up.

        Needs an operator's key without a list of pools, with the scopes `costs` and `leases`."""
        changes = to_columns(self.validate_body(CHANGE_SERIALIZER))
        with name_fields():
            budget = budgets.change_budget(self.get_budget(budget_id).pk, changes, actor=self.actor, now=self.now)
        self.log_change("budget changed", budget, fields=sorted(changes))
        return Response(self.serialize(budget))

    @extend_schema(
        operation_id="budgets_delete",
        summary="Delete a budget",
        responses=schema.build_responses(None, 404, ok=(204,)),
    )
    def delete(self, request: ApiRequest, budget_id: int) -> HttpResponse:
        """Delete a budget and its top-ups. Needs an operator's key without a list of pools, with `costs` and `leases`."""
        budget = self.get_budget(budget_id)
        if not budgets.remove_budget(budget.pk, actor=self.actor, now=self.now):
            raise BudgetNotFound
        self.log_change("budget deleted", budget)
        return Response(status=204)


class TopUpListView(BudgetApiView):
    @extend_schema(
        operation_id="budgets_list_top_ups",
        summary="List the top-ups of a budget",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(TopUpSerializer), 404),
    )
    def get(self, request: ApiRequest, budget_id: int) -> HttpResponse:
        """Return the top-ups of all periods, newest first. Operator keys only."""
        if not self.caller.key.operator:
            raise PermissionDenied(ManagesBudgets.message)
        page, next_url = paginate(self.get_budget(budget_id).top_ups.all(), "created_at", request)
        return Response({"results": [serialize_top_up(row) for row in page], "next": next_url})

    @extend_schema(
        operation_id="budgets_top_up",
        summary="Top up a budget",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewTopUpSerializer,
        responses=schema.build_responses(ToppedUpBudgetSerializer, 404, 409, 413, 415, ok=(201,)),
    )
    def post(self, request: ApiRequest, budget_id: int) -> HttpResponse:
        """Add an amount to the current period, once for an Idempotency-Key. It takes effect at once, and ends with the period.

        Needs an operator's key without a list of pools, with the scopes `costs` and `leases`."""
        data = self.validate_body(NEW_TOP_UP_SERIALIZER)
        budget = self.get_budget(budget_id)

        def act(run_id: UUID) -> StatusAndBody:
            request_id = self.derive_request_id(run_id)
            with name_fields():
                topped_up, row, _ = budgets.top_up(budget.pk, **data, actor=self.actor, request_id=request_id, now=self.now)
            require_same(BudgetTopUp(**data), row, data)
            return 201, {"top_up": serialize_top_up(row), "budget": self.serialize(topped_up)}

        return self.execute_once(act)


def require_same(stated: Model, stored: Model, fields: Iterable[str]) -> None:
    """Raise KeyReused if the row that an earlier request with this key created has other values."""
    if any(getattr(stated, name) != getattr(stored, name) for name in fields):
        raise KeyReused(f"This {HEADER_NAME} was sent with another request.")


@contextmanager
def name_fields() -> Iterator[None]:
    """Raise InvalidRequest with the name of the field for a value that only the model's validation refuses."""
    try:
        yield
    except InvalidBudget as error:
        name, messages = next(iter(error.message_dict.items())) if hasattr(error, "error_dict") else ("subject", error.messages)
        raise InvalidRequest(FIELDS.get(name, name), messages[0]) from None


def require_valid_subject(scope: str, subject: str) -> None:
    if bool(subject) == (scope == Scope.ALL):
        raise InvalidBudget({"subject": "Must be empty with the scope `all`, and is required with every other scope."})
    if subject:
        require_subject(scope, subject)


def to_columns(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a budget that a request states."""
    columns = {name: value for name, value in data.items() if name != "grace_seconds"}
    if "grace_seconds" in data:
        columns["grace"] = timedelta(seconds=data["grace_seconds"])
    if "warn_percents" in data:
        columns["warn_percents"] = sorted({*data["warn_percents"]})
    return columns
