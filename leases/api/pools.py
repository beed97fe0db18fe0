"""Pools and quotas."""

from collections.abc import Sequence
from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases.api import schema
from leases.api.fields import validate_url_value
from leases.api.leases import ACQUIRE_SERIALIZER
from leases.api.views import ApiRequest, ApiView
from sandboxes import pool_stats
from sandboxes.db.clock import format_timestamp
from sandboxes.models import Pool, Quota
from sandboxes.pool_stats import PoolStats, Stats


def build_count_field(**options: Any) -> serializers.IntegerField:
    return serializers.IntegerField(required=False, min_value=0, **options)


class PoolStatsSerializer(serializers.Serializer):
    """Statistics of one pool or of all pools, for operator keys only.

    Hits, `slept` and `evicted_*` are counters that only grow."""

    total = build_count_field(help_text="Sandboxes in any state but destroyed.")
    cold = build_count_field(help_text="Sleeping: state stored, no process.")
    warming = build_count_field()
    warm = build_count_field()
    waiting = build_count_field()
    running = build_count_field()
    evicting = build_count_field()
    destroying = build_count_field()
    max_capacity = build_count_field()
    used = build_count_field(help_text="Occupied capacity; equals total.")
    resume_warm_hits = build_count_field(help_text="Uses that found their sandbox awake.")
    resume_cold_hits = build_count_field(help_text="Uses that woke their sandbox: the sum of the next three.")
    resume_cold_local_hits = build_count_field(help_text="Wakes from state on this host.")
    resume_cold_cloud_hits = build_count_field(help_text="Wakes from state in the store.")
    resume_cold_fresh_hits = build_count_field(help_text="Wakes without stored state.")
    pre_warm_hits = build_count_field(help_text="Leases that received a pre-warmed sandbox.")
    slept = build_count_field(help_text="Times a sandbox was put to sleep, for any reason.")
    evicted_cold = build_count_field(help_text="Evictions of a cold sandbox.")
    evicted_warm = build_count_field(help_text="Evictions of a warm sandbox, which had nothing unsaved.")
    evicted_waiting = build_count_field(help_text="Evictions of a waiting sandbox, whose state was stored first.")
    quarantined = build_count_field(help_text="Sandboxes whose destruction failed too often.")
    stalled = build_count_field(help_text="Sandboxes past a deadline that no sweep has handled.")
    lost = build_count_field(help_text="Sandboxes that their provider lost while a lease held them.")
    oldest_waiting_seconds = serializers.FloatField(
        required=False, help_text="Idle time of the longest waiting sandbox; 0 if none waits."
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
    used = serializers.IntegerField(help_text="Occupied capacity, sleeping sandboxes included.")
    draining = serializers.BooleanField(help_text="The pool accepts no new sandboxes.")
    quotas = QuotaSerializer(many=True, help_text="Quotas of this key's agents, or of the agent named by `agent_did`.")
    warm_paused_until = serializers.DateTimeField(
        required=False, allow_null=True, help_text="Pre-warming is paused until then because starts have failed."
    )
    warm_error = serializers.CharField(required=False, help_text="Error of the last failed start.")


class PoolListSerializer(PoolStatsSerializer):
    """All pools; with an operator's key also their total."""

    pools = PoolSerializer(many=True)


class PoolListView(ApiView):
    @extend_schema(
        operation_id="pool_get",
        summary="List pools",
        parameters=[schema.QUOTA_AGENT_PARAMETER],
        responses=schema.build_responses(PoolListSerializer),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """Return the pools with their capacity, use, and the quotas of this key's agents.

        An operator's key also gets statistics for each pool and in total."""
        dids = self.caller.key.dids
        if did := request.GET.get("agent_did"):
            dids = [validate_url_value(ACQUIRE_SERIALIZER, "agent_did", did)]
            self.caller.require(did)
        if not self.caller.key.operator:
            pools = Pool.objects.order_by("name")
            return Response({"pools": [serialize_pool(pool, pool_stats.find_quotas(pool.pk, dids)) for pool in pools]})
        counted = pool_stats.collect_pool_stats(now=self.now)
        rendered = [serialize_pool(pool, pool_stats.find_quotas(pool.pk, dids)) for pool in counted]
        return Response({"pools": rendered} | serialize_pool_stats(pool_stats.sum_stats(counted)))


def serialize_pool_stats(of: Stats) -> dict[str, Any]:
    return {
        "total": of.total,
        "cold": of.cold,
        "warming": of.warming,
        "warm": of.warm,
        "waiting": of.waiting,
        "running": of.running,
        "evicting": of.evicting,
        "destroying": of.destroying,
        "max_capacity": of.capacity,
        "used": of.used,
        "resume_warm_hits": of.warm_hits,
        "resume_cold_hits": of.woken,
        "resume_cold_local_hits": of.woken_local,
        "resume_cold_cloud_hits": of.woken_cloud,
        "resume_cold_fresh_hits": of.woken_fresh,
        "pre_warm_hits": of.claimed_warm,
        "slept": of.slept,
        "evicted_cold": of.evicted_cold,
        "evicted_warm": of.evicted_warm,
        "evicted_waiting": of.evicted_waiting,
        "quarantined": of.quarantined,
        "stalled": of.stalled,
        "lost": of.lost,
        "oldest_waiting_seconds": of.oldest_waiting.total_seconds(),
        "warm_target": of.warm_target,
        "warm_ready": of.warm_ready,
    }


def serialize_pool(of: Pool | PoolStats, quotas: Sequence[Quota]) -> dict[str, Any]:
    """Serialize a pool, with its statistics if `of` has them."""
    rendered = {
        "name": of.name,
        "max_capacity": of.capacity,
        "used": of.used,
        "draining": of.draining,
        "quotas": [
            {"agent_did": one.agent_did, "most": one.most, "guaranteed": one.guaranteed, "used": one.used} for one in quotas
        ],
    }
    if isinstance(of, PoolStats):
        until = of.warm_paused_until
        rendered |= serialize_pool_stats(of) | {
            "warm_paused_until": format_timestamp(until) if until else None,
            "warm_error": of.warm_error,
        }
    return rendered
