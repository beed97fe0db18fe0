"""Inventory of all engines for operators: list, get, destroy and adopt what has no owner."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.response import Response

from billing.models import Rate
from billing.pricing import format_decimal
from billing.standing_price import find_entry_price
from leases.adoption import adopt_sandbox
from leases.api.base import schema
from leases.api.base.fields import PatternField, StrictCharField, StrictSerializer, StrictUUIDField
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.permissions import HasKey, IsUnrestrictedOperator
from leases.api.base.views import ApiRequest, ApiView
from leases.errors import InvalidRequest
from sandboxes.db.clock import format_timestamp
from sandboxes.inventory.entries import Entry, Finding, Inventory, collect_inventory
from sandboxes.inventory.listings import EngineListing, ListingState
from sandboxes.inventory.removal import destroy_ownerless
from sandboxes.providers.errors import FailureCause, Unavailable
from sandboxes.providers.registry import PROVIDERS


class EngineSerializer(serializers.Serializer):
    provider = serializers.CharField()
    host = serializers.CharField(allow_null=True, help_text="Name of the host; null until the engine has run a sandbox.")
    state = serializers.ChoiceField(
        [state.value for state in ListingState],
        help_text="listed; unavailable: no response; not_configured: this server lacks a package or a key of the provider; "
        "not_supported: the provider cannot list; other_host: this server does not reach the engine.",
    )
    error = serializers.CharField(help_text="Why there is no listing.")
    sandboxes = serializers.IntegerField(allow_null=True, help_text="Number listed; null without a listing.")


class InventoryEntrySerializer(serializers.Serializer):
    provider = serializers.CharField()
    host = serializers.CharField(allow_null=True)
    name = serializers.CharField(help_text="At the engine.")
    finding = serializers.ChoiceField(
        [finding.value for finding in Finding],
        help_text="unknown_owner: no pool has its owner label; no_row: no row names it; missing: its engine does not list it; "
        "unconfirmed: its engine has no conclusive listing; starting: without a row and younger than the grace period.",
    )
    sandbox_id = serializers.CharField(help_text="`<agent did>::<environment>` of its row, or of its former row. Empty: none.")
    sandbox = serializers.UUIDField(allow_null=True, help_text="Id of the row.")
    lease_id = serializers.UUIDField(allow_null=True)
    pool = serializers.CharField(allow_null=True, help_text="Of the row, or the pool with its owner label.")
    owner = serializers.CharField(help_text="Owner label at the engine. Empty if the engine does not list the sandbox.")
    state = serializers.CharField(allow_null=True, help_text="Of the row.")
    process_state = serializers.CharField(
        allow_null=True, help_text="At the engine: running, suspended, stopped, or volumes if only these are left."
    )
    since = serializers.DateTimeField(help_text="Creation at the engine; without a listing, start of the row's state.")
    usd_per_hour = serializers.CharField(
        allow_null=True, help_text="Decimal number, by the rates and without allowances; null without a rate, size or process."
    )
    is_maximum_price = serializers.BooleanField(help_text="An item is charged by measured use, which may cost less.")


class InventorySerializer(serializers.Serializer):
    at = serializers.DateTimeField()
    engines = EngineSerializer(many=True)
    sandboxes = InventoryEntrySerializer(many=True, help_text="Those with a finding first.")


class ReasonSerializer(StrictSerializer):
    reason = StrictCharField(min_length=5, max_length=200, help_text="Recorded in the log.")


class AdoptionSerializer(ReasonSerializer):
    pool = PatternField(
        r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", required=False, allow_null=True,
        help_text="Pool of the new row. Default: the pool with the owner label of the sandbox.",
    )  # fmt: skip
    lease_id = StrictUUIDField(
        required=False, allow_null=True, help_text="Active lease that gets /workspace as a snapshot. Default: not stored."
    )


class DestroyedSerializer(serializers.Serializer):
    destroyed = serializers.BooleanField(help_text="False if the engine did not list it any more.")


class AdoptedSerializer(serializers.Serializer):
    sandbox = serializers.UUIDField(help_text="Id of the row, which is in quarantine.")
    snapshot_id = serializers.UUIDField(allow_null=True)


REASON_SERIALIZER, ADOPTION_SERIALIZER = ReasonSerializer(), AdoptionSerializer()


class InventoryApiView(ApiView):
    permission_classes = [HasKey, IsUnrestrictedOperator]

    def require_provider(self, provider: str) -> None:
        if provider not in PROVIDERS:
            raise NotFound("There is no such provider.")


class InventoryView(InventoryApiView):
    @extend_schema(
        operation_id="inventory_list",
        summary="List everything that exists",
        parameters=[schema.FINDING_PARAMETER],
        responses=schema.build_responses(InventorySerializer),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """List all engines, and join the listings with the rows of sandboxes. Takes up to 20 s, if an engine is slow.

        Operator keys without a list of pools only."""
        finding = request.GET.get("finding", "")
        if finding and finding not in [*map(str, Finding)]:
            raise InvalidRequest("finding", f"Not one of {', '.join(Finding)}.")
        inventory = collect_inventory(now=self.now, grace=settings.ORPHAN_GRACE)
        return Response(build_inventory_document(inventory, finding=finding))


class InventoryEntryView(InventoryApiView):
    @extend_schema(
        operation_id="inventory_get",
        summary="Get one sandbox of the inventory",
        responses=schema.build_responses(InventoryEntrySerializer, 404),
    )
    def get(self, request: ApiRequest, provider: str, name: str) -> HttpResponse:
        """Return one sandbox by its provider and its name at the engine. Operator keys without a list of pools only."""
        self.require_provider(provider)
        entry = find_entry(collect_inventory(now=self.now, grace=settings.ORPHAN_GRACE), provider, name)
        if entry is None:
            raise NotFound("No engine lists such a sandbox, and no row with a process has this name.")
        return Response(serialize_entry(entry, [*Rate.objects.all()], now=self.now))


class InventoryDestroyView(InventoryApiView):
    @extend_schema(
        operation_id="inventory_destroy",
        summary="Destroy a sandbox without an owner",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=ReasonSerializer,
        responses=schema.build_responses(DestroyedSerializer, 404, 409, 413, 415),
    )
    def post(self, request: ApiRequest, provider: str, name: str) -> HttpResponse:
        """Destroy a sandbox that an engine lists and no row names, with its files. Refused for one with a row (`has_owner`) or
        younger than the grace period (`within_grace`).

        Operator keys without a list of pools only. Release the lease of a sandbox that has an owner."""
        self.require_provider(provider)
        reason = self.validate_body(REASON_SERIALIZER)["reason"]

        def act(run_id: UUID) -> StatusAndBody:
            with _report_unusable(provider):
                destroyed = destroy_ownerless(
                    provider, name, now=self.now, grace=settings.ORPHAN_GRACE, actor=self.actor, reason=reason
                )
            return 200, {"destroyed": destroyed}

        return self.execute_once(act)


class InventoryAdoptView(InventoryApiView):
    @extend_schema(
        operation_id="inventory_adopt",
        summary="Adopt a sandbox without an owner",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=AdoptionSerializer,
        responses=schema.build_responses(AdoptedSerializer, 404, 409, 410, 413, 415),
    )
    def post(self, request: ApiRequest, provider: str, name: str) -> HttpResponse:
        """Insert the row of a sandbox that an engine lists and no row names, in quarantine, so that no sweep destroys it.

        With `lease_id` its files become a snapshot of this lease, which can be restored. Operator keys without a list of pools
        only."""
        self.require_provider(provider)
        data = self.validate_body(ADOPTION_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            with _report_unusable(provider):
                adopted = adopt_sandbox(
                    provider, name, pool_name=data.get("pool") or "", lease_id=data.get("lease_id"), now=self.now,
                    actor=self.actor, reason=data["reason"],
                )  # fmt: skip
            snapshot_id = str(adopted.snapshot.pk) if adopted.snapshot else None
            return 200, {"sandbox": str(adopted.sandbox.pk), "snapshot_id": snapshot_id}

        return self.execute_once(act)


@contextmanager
def _report_unusable(provider: str) -> Iterator[None]:
    """Report a provider that is not configured on this server as unavailable."""
    try:
        yield
    except ImproperlyConfigured as error:
        raise Unavailable(str(error), cause=FailureCause.NOT_SUPPORTED, provider=provider) from error


def find_entry(inventory: Inventory, provider: str, name: str) -> Entry | None:
    return next((each for each in inventory.entries if (each.engine.provider, each.name) == (provider, name)), None)


def build_inventory_document(inventory: Inventory, *, finding: str = "") -> dict[str, Any]:
    """Return the document of an inventory, restricted to one finding if it is given."""
    rates = [*Rate.objects.all()]
    entries = [each for each in inventory.entries if finding in ("", each.finding)]
    return {
        "at": format_timestamp(inventory.at),
        "engines": [_serialize_engine(engine) for engine in inventory.engines],
        "sandboxes": [serialize_entry(each, rates, now=inventory.at) for each in entries],
    }


def _serialize_engine(engine: EngineListing) -> dict[str, Any]:
    return {
        "provider": engine.provider,
        "host": engine.host.name if engine.host else None,
        "state": engine.state.value,
        "error": engine.error,
        "sandboxes": len(engine.sandboxes) if engine.state == ListingState.LISTED else None,
    }


def serialize_entry(entry: Entry, rates: Iterable[Rate], *, now: datetime) -> dict[str, Any]:
    row, price = entry.row, find_entry_price(entry, rates, now=now)
    return {
        "provider": entry.engine.provider,
        "host": entry.engine.host.name if entry.engine.host else None,
        "name": entry.name,
        "finding": entry.finding.value,
        "sandbox_id": entry.sandbox_id,
        "sandbox": str(row.pk) if row else None,
        "lease_id": str(row.holder) if row and row.holder else None,
        "pool": entry.pool.name if entry.pool else None,
        "owner": entry.listed.owner if entry.listed else "",
        "state": row.state if row else None,
        "process_state": entry.process_state or None,
        "since": format_timestamp(entry.created_at),
        "usd_per_hour": format_decimal(price.usd) if price else None,
        "is_maximum_price": price is not None and price.is_maximum,
    }
