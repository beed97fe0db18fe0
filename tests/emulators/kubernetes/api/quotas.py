"""Resource quotas: usage of a namespace, and the refusal of objects beyond it."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from tests.emulators.kubernetes.api.resources import BUILT_IN, PODS, QUOTAS, Resource
from tests.emulators.kubernetes.api.status import forbidden
from tests.emulators.kubernetes.api.store import Object, Store, key_of
from tests.emulators.kubernetes.api.validation.names import parse_quantity

ENDED_PHASES = {"Failed", "Succeeded"}
COMPUTE = {"cpu", "memory", "ephemeral-storage"}


def _format(value: Decimal) -> str:
    if value == value.to_integral_value():
        number = int(value)
        for power, suffix in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
            if number and number % (1 << power) == 0:
                return f"{number >> power}{suffix}"
        return str(number)
    return f"{int(value * 1000)}m"


def _split(key: str) -> tuple[str, str]:
    """Return (requests or limits, resource) for a key of compute resources, otherwise ("", key)."""
    kind, _, name = key.rpartition(".")
    if key in COMPUTE:
        return "requests", key
    return (kind, name) if kind in {"requests", "limits"} and name in COMPUTE else ("", key)


def _measure_item(key: str, resource: Resource, item: Object) -> Decimal:
    """Return the usage of one object."""
    kind, name = _split(key)
    if resource == PODS and (item.get("status") or {}).get("phase") in ENDED_PHASES:
        return Decimal(key == "count/pods")
    if kind:
        if resource != PODS:
            return Decimal(0)
        containers = item["spec"]["containers"]
        return sum((parse_quantity(_get_resources(one, kind).get(name, 0)) for one in containers), Decimal(0))
    return Decimal(key in {resource.plural, f"count/{resource.qualified}"})


def _get_resources(container: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return (container.get("resources") or {}).get(kind) or {}


def measure(store: Store, namespace: str, hard: Mapping[str, Any]) -> dict[str, str]:
    """Return the usage of a namespace for each key of a quota."""
    used = {}
    for key in hard:
        total = Decimal(0)
        for resource in BUILT_IN:
            total += sum((_measure_item(key, resource, item) for item in store.list(resource, namespace)), Decimal(0))
        used[key] = _format(total)
    return used


def require(store: Store, resource: Resource, item: Object) -> None:
    """Raise ApiError if an object does not fit into the quotas of its namespace."""
    namespace, name = key_of(item)
    for quota in store.list(QUOTAS, namespace) if namespace else ():
        hard = (quota.get("spec") or {}).get("hard") or {}
        title = quota["metadata"]["name"]
        if resource == PODS:
            _require_declared(title, hard, item)
        used = measure(store, namespace, hard)
        asked = {key: _measure_item(key, resource, item) for key in hard}
        over = [key for key in hard if asked[key] and parse_quantity(used[key]) + asked[key] > parse_quantity(hard[key])]
        if over:
            parts = [
                ", ".join(f"{key}={value}" for key, value in values)
                for values in (
                    [(key, _format(asked[key])) for key in over],
                    [(key, used[key]) for key in over],
                    [(key, hard[key]) for key in over],
                )
            ]
            raise forbidden(
                resource, name, f"exceeded quota: {title}, requested: {parts[0]}, used: {parts[1]}, limited: {parts[2]}"
            )


def _require_declared(title: str, hard: Mapping[str, Any], pod: Object) -> None:
    """Raise ApiError unless each container declares the compute resources that a quota limits."""
    for key in hard:
        kind, resource_name = _split(key)
        missing = [one["name"] for one in pod["spec"]["containers"] if kind and resource_name not in _get_resources(one, kind)]
        if missing:
            raise forbidden(
                PODS, pod["metadata"]["name"], f"failed quota: {title}: must specify {key} for: {','.join(missing)}"
            )
