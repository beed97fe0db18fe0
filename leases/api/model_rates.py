"""Model rates for operators: list and add prices of tokens."""

from datetime import UTC
from decimal import Decimal
from typing import Any
from uuid import UUID

import structlog
from django.core.exceptions import ValidationError as InvalidRate
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from billing.pricing import format_decimal
from leases.api.base import schema
from leases.api.base.fields import DecimalStringField, StrictCharField, StrictIntegerField, StrictSerializer
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.pagination import paginate
from leases.api.base.permissions import HasKey, ManagesModelRates
from leases.api.base.views import ApiRequest, ApiView
from leases.errors import InvalidRequest
from leases.models import KeyScope
from sandboxes.db.clock import format_timestamp
from sandboxes.egress.model_pricing import MAX_NAME_LENGTH, find_candidate_names, load_rates
from sandboxes.egress.prices.additions import add_rates
from sandboxes.models import TokenKind, TokenRate
from sandboxes.models.token_rates import MILLION, find_present, find_superseded, get_unit

log = structlog.get_logger(__name__)
PRICE_DIGITS = 15
PRICE_DECIMALS = 9
FIELDS = {"pattern": "model", "usd_per_million": "prices"}  # of the request, by columns with another name


class PriceField(DecimalStringField):
    def __init__(self, **options: Any) -> None:
        super().__init__(max_digits=PRICE_DIGITS, decimal_places=PRICE_DECIMALS, min_value=Decimal(0), **options)


class ModelPricesSerializer(StrictSerializer):
    def get_fields(self) -> dict[str, Any]:
        return {kind.value: PriceField(required=False, help_text=f"{kind.label.capitalize()}.") for kind in TokenKind}


class NewModelRateSerializer(StrictSerializer):
    model = StrictCharField(max_length=MAX_NAME_LENGTH, help_text="Name or pattern: `gpt-4o`, `claude-*`, `*`.")
    prices = ModelPricesSerializer(help_text="USD per million tokens, or per 1,000 web searches, by kind. At least one.")
    tokens_from = StrictIntegerField(
        min_value=0, max_value=2**62, default=0, help_text="Only for calls with at least as many input tokens. 0: all calls."
    )
    tier = StrictCharField(
        max_length=32, default="", allow_blank=True, help_text="Only for this service tier. Empty: tiers without own rates."
    )
    valid_from = serializers.DateTimeField(
        default_timezone=UTC, help_text="Start, compared with the start of a call. May be in the past. UTC without an offset."
    )
    source = StrictCharField(  # type: ignore[assignment]
        max_length=300, help_text="Page that states the price, and the day on which it was read."
    )
    note = StrictCharField(max_length=300, default="", allow_blank=True)


class ModelRateSerializer(serializers.Serializer):
    id = serializers.IntegerField()
    model = serializers.CharField(help_text="Name or pattern.")
    kind = serializers.ChoiceField(TokenKind.values)
    usd = serializers.CharField(help_text="Decimal number, per unit.")
    unit = serializers.CharField(help_text="million tokens, or 1,000 searches.")
    tokens_from = serializers.IntegerField()
    tier = serializers.CharField()
    valid_from = serializers.DateTimeField()
    superseded = serializers.BooleanField(help_text="A newer rate with the same model, kind, size, tier and start counts.")
    source = serializers.CharField()  # type: ignore[assignment]
    note = serializers.CharField()
    created_at = serializers.DateTimeField()


class AddedModelRatesSerializer(serializers.Serializer):
    results = ModelRateSerializer(many=True, help_text="One rate for each price, in the order of the kinds.")


NEW_MODEL_RATE_SERIALIZER = NewModelRateSerializer()


class ModelRateListView(ApiView):
    permission_classes = [HasKey, ManagesModelRates]
    key_scope = KeyScope.COSTS

    @extend_schema(
        operation_id="model_rates_list",
        summary="List model rates",
        parameters=[schema.RATED_MODEL_PARAMETER, *schema.PAGE_PARAMETERS],
        responses=schema.build_responses(schema.build_page_serializer(ModelRateSerializer)),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """Return all rates, the newest first; with `model` those that price a call of this model now, on one page.

        Operator keys without a list of pools only."""
        if "model" in request.GET:
            rates = self._list_current(request.GET["model"])
            return Response({"results": [serialize_rate(rate, superseded=False) for rate in rates], "next": None})
        page, next_url = paginate(TokenRate.objects.all(), "created_at", request)
        superseded = list_superseded(TokenRate.objects.filter(pk__in=[rate.pk for rate in page]))
        return Response(
            {"results": [serialize_rate(rate, superseded=rate.pk in superseded) for rate in page], "next": next_url}
        )

    def _list_current(self, model: str) -> list[TokenRate]:
        if not model or len(model) > MAX_NAME_LENGTH or "\0" in model:
            raise InvalidRequest("model", f"Must be a name of 1 to {MAX_NAME_LENGTH} characters.")
        return load_rates(find_candidate_names(model), at=self.now).list_current()

    @extend_schema(
        operation_id="model_rates_create",
        summary="Add model rates",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewModelRateSerializer,
        responses=schema.build_responses(AddedModelRatesSerializer, 409, 413, 415, ok=(200, 201)),
    )
    def post(self, request: ApiRequest) -> HttpResponse:
        """Add a rate for each price, all or none (201). Rates that exist with the same price are returned; 200: all of them.

        A rate with the start of an existing one and another price supersedes it. Calls that have a price keep it. Needs an
        operator's key without a list of pools, with the scopes `costs` and `leases`."""
        data = self.validate_body(NEW_MODEL_RATE_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            rates, added = self._add(data)
            return 201 if added else 200, {"results": [serialize_rate(rate, superseded=False) for rate in rates]}

        return self.execute_once(act)

    def _add(self, data: dict[str, Any]) -> tuple[list[TokenRate], int]:
        """Save the rates that do not exist. Return all of them, and the number of new ones."""
        stated = build_rates(data)
        with transaction.atomic():
            present = find_present(stated)
            new = [rate for rate in stated if not _has_price(present.get(rate.key), rate)]
            try:
                add_rates(new, actor=self.actor, now=self.now)
            except InvalidRate as error:
                raise _build_refusal(error) from None
        if new:
            log.info(
                "model rates added", actor=self.actor, model=data["model"], kinds=[rate.kind for rate in new],
                superseded=[present[rate.key].pk for rate in new if rate.key in present],
            )  # fmt: skip
        return [rate if rate in new else present[rate.key] for rate in stated], len(new)


def _has_price(present: TokenRate | None, rate: TokenRate) -> bool:
    return present is not None and present.usd_per_million == rate.usd_per_million


def build_rates(data: dict[str, Any]) -> list[TokenRate]:
    """Return a rate for each price of a request, unsaved, in the order of the kinds. Raise InvalidRequest without one."""
    if not data["prices"]:
        raise InvalidRequest("prices", "State at least one price.")
    return [
        TokenRate(
            pattern=data["model"], kind=kind.value, usd_per_million=data["prices"][kind] * MILLION / get_unit(kind)[0],
            tokens_from=data["tokens_from"], tier=data["tier"], valid_from=data["valid_from"], source=data["source"],
            note=data["note"],
        )
        for kind in TokenKind
        if kind in data["prices"]
    ]  # fmt: skip


def _build_refusal(error: InvalidRate) -> InvalidRequest:
    """Name the field of the request, for a value that only the model's validation refuses."""
    name, messages = next(iter(error.message_dict.items())) if hasattr(error, "error_dict") else ("prices", error.messages)
    return InvalidRequest(FIELDS.get(name, name), messages[0])


def list_superseded(rates: QuerySet[TokenRate]) -> set[int]:
    return set(find_superseded(rates).values_list("pk", flat=True))


def serialize_rate(rate: TokenRate, *, superseded: bool) -> dict[str, Any]:
    return {
        "id": rate.pk,
        "model": rate.pattern,
        "kind": str(rate.kind),
        "usd": format_decimal(rate.stated_usd),
        "unit": rate.unit_name,
        "tokens_from": rate.tokens_from,
        "tier": rate.tier,
        "valid_from": format_timestamp(rate.valid_from),
        "superseded": superseded,
        "source": rate.source,
        "note": rate.note,
        "created_at": format_timestamp(rate.created_at),
    }
