"""ResourceQuotas of the namespace of the sandboxes, with the amounts that sandboxes use up."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sandboxes.providers.engine_reports import EngineQuota, QuotaMeasure
from sandboxes.providers.kubernetes.api_client import ApiClient, build_path
from sandboxes.providers.kubernetes.configuration import KubernetesConfiguration
from sandboxes.providers.kubernetes.pod_spec import CPU_REQUEST_SHARE
from sandboxes.providers.kubernetes.quantities import MEBI, MILLI, parse_quantity


@dataclass(frozen=True)
class Demand:
    """Amount of a resource that one sandbox uses up."""

    measure: QuotaMeasure
    base_unit: Decimal
    unit: str
    amount_per_measure: float = 1.0


def read_quotas(api: ApiClient, configuration: KubernetesConfiguration) -> list[EngineQuota]:
    """Return one entry for each resource of each quota. Raise ProviderError."""
    demands = _build_demands(configuration)
    return [
        entry
        for quota in api.list_items(build_path(configuration.namespace, "resourcequotas"))
        for entry in _iter_entries(quota, demands)
    ]


def _build_demands(configuration: KubernetesConfiguration) -> Mapping[str, Demand]:
    """Return the demand of a sandbox by resource, as pod_spec requests it."""
    pods = Demand(QuotaMeasure.SANDBOXES, Decimal(1), "")
    memory = Demand(QuotaMeasure.MEMORY_MIB, MEBI, "Mi")
    limited_cpu = Demand(QuotaMeasure.MILLICPUS, MILLI, "m")
    requested_cpu = Demand(QuotaMeasure.MILLICPUS, MILLI, "m", CPU_REQUEST_SHARE)
    disk = Demand(QuotaMeasure.SANDBOXES, MEBI, "Mi", configuration.disk_mib)
    return {
        "pods": pods, "count/pods": pods,
        "memory": memory, "requests.memory": memory, "limits.memory": memory,
        "cpu": requested_cpu, "requests.cpu": requested_cpu, "limits.cpu": limited_cpu,
        "ephemeral-storage": disk, "requests.ephemeral-storage": disk, "limits.ephemeral-storage": disk,
    }  # fmt: skip


def _iter_entries(quota: Mapping[str, Any], demands: Mapping[str, Demand]) -> Iterator[EngineQuota]:
    spec, status = quota.get("spec") or {}, quota.get("status") or {}
    used = status.get("used") or {}
    is_scoped = bool(spec.get("scopes") or spec.get("scopeSelector"))  # counts some Pods only
    for resource, hard in sorted((spec.get("hard") or {}).items()):
        hard_text, used_text = str(hard), str(used.get(resource, ""))
        demand = None if is_scoped else demands.get(resource)
        amount = parse_quantity(hard_text, demand.base_unit) if demand else None
        if demand is None or amount is None:
            yield EngineQuota(quota["metadata"]["name"], resource, hard_text, used_text)
            continue
        yield EngineQuota(
            name=quota["metadata"]["name"],
            resource=resource,
            hard=hard_text,
            used=used_text,
            hard_amount=amount,
            used_amount=parse_quantity(used_text, demand.base_unit),
            unit=demand.unit,
            measure=demand.measure,
            amount_per_measure=demand.amount_per_measure,
        )
