"""Pools with their quotas and statistics."""

from collections.abc import Sequence
from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases.api.base import schema
from leases.api.base.fields import validate_url_value
from leases.api.base.views import ApiRequest, ApiView
from leases.api.leases import ACQUIRE_SERIALIZER
from sandboxes import pool_stats
from sandboxes.db.clock import format_optional_timestamp
from sandboxes.models import Pool, Quota
from sandboxes.pool_stats import PoolStats


def build_count_field(**options: Any) -> serializers.IntegerField:
    return serializers.IntegerField(required=False, min_value=0, **options)


class PoolStatsSerializer(serializers.Serializer):
    """Statistics of one pool or of all pools, for operator keys only.

    `*_hits`, `slept` and `evicted_*` are cumulative counters."""

    total = build_count_field(help_text="Sandboxes in any state but destroyed.")
    cold = build_count_field(help_text="State stored, no process.")
    warming = build_count_field()
    warm = build_count_field()
    waiting = build_count_field()
    suspended = build_count_field(help_text="Waiting, with frozen processes.")
    running = build_count_field()
    evicting = build_count_field()
    destroying = build_count_field()
    max_capacity = build_count_field()
    used = build_count_field(help_text="Occupied capacity; equals total.")
    resume_warm_hits = build_count_field(help_text="Uses that found their sandbox awake.")
    resume_cold_hits = build_count_field(help_text="Uses that woke their sandbox: sum of the hits by source.")
    resume_cold_local_hits = build_count_field(help_text="Wakes from state on this host.")
    resume_cold_cloud_hits = build_count_field(help_text="Wakes from state in the store.")
    resume_cold_vendor_hits = build_count_field(help_text="Wakes from a snapshot at the vendor of the sandbox.")
    resume_cold_fresh_hits = build_count_field(help_text="Wakes without stored state.")
    pre_warm_hits = build_count_field(help_text="Leases that received a pre-warmed sandbox.")
    slept = build_count_field(help_text="Times a sandbox was put to sleep, for any reason.")
    evicted_cold = build_count_field(help_text="Evictions of a cold sandbox.")
    evicted_warm = build_count_field(help_text="Evictions of a warm sandbox, which has no unsaved state.")
    evicted_waiting = build_count_field(help_text="Evictions of a waiting or suspended sandbox, whose state is stored first.")
    quarantined = build_count_field(help_text="Sandboxes whose destruction failed too often.")
    stalled = build_count_field(help_text="Sandboxes past their deadline that no sweep has handled.")
    lost = build_count_field(help_text="Sandboxes that their provider lost while a lease held them.")
    queue_length = build_count_field(help_text="Requests that wait for a place.")
    oldest_waiting_seconds = serializers.FloatField(
        required=False, help_text="Idle time of the waiting or suspended sandbox that has waited longest; 0 if there is none."
    )
    warm_target = build_count_field(help_text="Pre-warmed sandboxes to keep ready.")
    warm_ready = build_count_field(help_text="Pre-warmed sandboxes that are ready.")


class QuotaSerializer(serializers.Serializer):
    agent_did = serializers.CharField()
    most = serializers.IntegerField(allow_null=True, help_text="Maximum number of the agent's sandboxes; null: no limit.")
    guaranteed = serializers.IntegerField(help_text="Number of the agent's sandboxes that are never evicted for other agents.")
    used = serializers.IntegerField()


class PoolSerializer(PoolStatsSerializer):
    """Pool with capacity and quotas; with an operator's key also its statistics."""

    name = serializers.CharField()
    max_capacity = serializers.IntegerField(help_text="Maximum number of sandboxes.")
    used = serializers.IntegerField(help_text="Occupied capacity, cold sandboxes included.")
    draining = serializers.BooleanField(help_text="The pool accepts no new sandboxes.")
    quotas = QuotaSerializer(many=True, help_text="Quotas of this key's agents, or of the agent named by `agent_did`.")
    warm_paused_until = serializers.DateTimeField(
        required=False, allow_null=True, help_text="End of the pause of pre-warming after failed starts; null: not paused."
    )
    warm_error = serializers.CharField(required=False, help_text="Error of the last failed start.")


class PoolListSerializer(PoolStatsSerializer):
    """Pools that the key may use; with an operator's key also their total."""

    pools = PoolSerializer(many=True)


class PoolListView(ApiView):
    @extend_schema(
        operation_id="pool_get",
        summary="List pools",
        parameters=[schema.QUOTA_AGENT_PARAMETER],
        responses=schema.build_responses(PoolListSerializer),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """Return the pools that this key may use, with their capacity, use, and the quotas of this key's agents.

        With an operator's key the response also has statistics of each of these pools and their total."""
        dids, allowed = self.caller.key.dids, self.caller.allowed
        if did := request.GET.get("agent_did"):
            dids = [validate_url_value(ACQUIRE_SERIALIZER, "agent_did", did)]
            self.caller.require(did)
        if not self.caller.key.operator:
            pools = [pool for pool in Pool.objects.order_by("name") if allowed.allows_pool(pool)]
            return Response({"pools": [serialize_pool(pool, pool_stats.find_quotas(pool.pk, dids)) for pool in pools]})
        counted = [pool for pool in pool_stats.collect_pool_stats(now=self.now) if allowed.allows_pool(pool)]
        rendered = [serialize_pool(pool, pool_stats.find_quotas(pool.pk, dids)) for pool in counted]
        return Response({"pools": rendered} | pool_stats.serialize_stats(pool_stats.sum_stats(counted)))


def serialize_pool(pool: Pool | PoolStats, quotas: Sequence[Quota]) -> dict[str, Any]:
    """Serialize a pool; a PoolStats also with its statistics."""
    rendered = {
        "name": pool.name,
        "max_capacity": pool.capacity,
        "used": pool.used,
        "draining": pool.draining,
        "quotas": [
            {"agent_did": quota.agent_did, "most": quota.most, "guaranteed": quota.guaranteed, "used": quota.used}
            for quota in quotas
        ],
    }
    if isinstance(pool, PoolStats):
        until = pool.warm_paused_until
        rendered |= pool_stats.serialize_stats(pool) | {
            "warm_paused_until": format_optional_timestamp(until),
            "warm_error": pool.warm_error,
        }
    return rendered
