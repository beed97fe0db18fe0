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
    """What an operator's key sees of a pool, or of all of them together. Hits, `slept` and `evicted_*` only grow."""

    total = build_count_field(help_text="Sandboxes that exist, in whatever state.")
    cold = build_count_field(help_text="Asleep: state stored, no process.")
    warming = build_count_field()
    warm = build_count_field()
    waiting = build_count_field()
    running = build_count_field()
    evicting = build_count_field()
    destroying = build_count_field()
    max_capacity = build_count_field()
    used = build_count_field(help_text="Places taken; the same as total.")
    resume_warm_hits = build_count_field(help_text="Uses that found their sandbox alive.")
    resume_cold_hits = build_count_field(help_text="Uses that had to wake it: the sum of the next three.")
    resume_cold_local_hits = build_count_field(help_text="Its state came from this host's copy.")
    resume_cold_cloud_hits = build_count_field(help_text="Its state came from the store.")
    resume_cold_fresh_hits = build_count_field(help_text="There was no state to bring back.")
    pre_warm_hits = build_count_field(help_text="Leases that were given a sandbox which was ready beforehand.")
    slept = build_count_field(help_text="Times a sandbox was put to sleep, when idle or for any other reason.")
    evicted_cold = build_count_field(help_text="Places taken from a sleeping sandbox for another one.")
    evicted_warm = build_count_field(help_text="The same, from one with nothing unsaved in it.")
    evicted_waiting = build_count_field(help_text="The same, from one that was put to sleep for it.")
    quarantined = build_count_field(help_text="Destroying them failed too often.")
    stalled = build_count_field(help_text="Past a deadline, and no sweep has taken care.")
    lost = build_count_field(help_text="Lost by their provider while a lease held them.")
    oldest_waiting_seconds = serializers.FloatField(required=False, help_text="Since its last use; 0 if none waits.")
    warm_target = build_count_field(help_text="To be kept ready that nobody holds.")
    warm_ready = build_count_field(help_text="Ready, and nobody holds them.")


class QuotaSerializer(serializers.Serializer):
    agent_did = serializers.CharField()
    most = serializers.IntegerField(allow_null=True, help_text="Sandboxes it may have at once; null: no limit.")
    guaranteed = serializers.IntegerField(help_text="While it has no more than these, nobody else is given a place of its.")
    used = serializers.IntegerField()


class PoolSerializer(PoolStatsSerializer):
    """Its name, its places and the quotas for everybody, the rest with an operator's key."""

    name = serializers.CharField()
    max_capacity = serializers.IntegerField(help_text="Sandboxes that may exist at once.")
    used = serializers.IntegerField(help_text="Of these places; asleep sandboxes count.")
    draining = serializers.BooleanField(help_text="It takes nothing new.")
    quotas = QuotaSerializer(many=True, help_text="Of the agents this key speaks for, or of the one that was asked for.")
    warm_paused_until = serializers.DateTimeField(
        required=False, allow_null=True, help_text="Starts have failed, so nothing is kept ready until then."
    )
    warm_error = serializers.CharField(required=False, help_text="What the last start said that failed.")


class PoolListSerializer(PoolStatsSerializer):
    """Every pool, and with an operator's key their sum."""

    pools = PoolSerializer(many=True)


class PoolListView(ApiView):
    @extend_schema(
        operation_id="pool_get",
        parameters=[schema.QUOTA_AGENT_PARAMETER],
        responses=schema.build_responses(PoolListSerializer),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """The pools, how full they are, and what this key's agents may have in them. With an operator's key also what
        there is in each state, and what has become of it: for each pool, and for all together."""
        dids = self.caller.key.dids
        if did := request.GET.get("agent_did"):
            dids = [validate_url_value(ACQUIRE_SERIALIZER, "agent_did", did)]
            self.caller.require(did)
        if not self.caller.key.operator:
            every = Pool.objects.order_by("name")
            return Response({"pools": [serialize_pool(one, pool_stats.find_quotas(one.pk, dids)) for one in every]})
        counted = pool_stats.collect_pool_stats(now=self.now)
        shown = [serialize_pool(one, pool_stats.find_quotas(one.pk, dids)) for one in counted]
        return Response({"pools": shown} | serialize_pool_stats(pool_stats.sum_stats(counted)))


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
    """One pool; with its numbers if they were counted."""
    shown = {
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
        shown |= serialize_pool_stats(of) | {
            "warm_paused_until": format_timestamp(until) if until else None,
            "warm_error": of.warm_error,
        }
    return shown
