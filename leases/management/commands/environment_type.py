"""manage.py environment_type: list, show, add and change environment types."""

from typing import Any

from leases.models import EnvironmentType
from leases.placement import list_pools
from leases.resource_limits import LIMIT_FIELDS, describe_limits
from sandboxes.formatting import pluralize
from sandboxes.management.named_rows import NamedRowCommand
from sandboxes.models.policies import SEALED_POLICY_NAME

SET_ELSEWHERE = ("id", "name", "pool", "cheapest_pool", *LIMIT_FIELDS)  # by `environment pools` and `limits type`


class Command(NamedRowCommand):
    help = (
        "List, show, add and change environment types. `manage.py environment pools NAME` sets the pools of a type, and "
        "`manage.py limits type NAME` what its leases may request."
    )
    model = EnvironmentType
    columns = tuple(field.name for field in EnvironmentType._meta.local_concrete_fields if field.name not in SET_ELSEWHERE)
    facts = ("cheapest_pool",)

    def describe(self, row: EnvironmentType) -> dict[str, Any]:
        pools = [pool.name for pool in list_pools(row)]
        return super().describe(row) | {"pools": pools, "limits": describe_limits(row)}

    def format_line(self, row: EnvironmentType) -> str:
        pools = " ".join(pool.name for pool in list_pools(row))
        notes = [
            f"pools {pools}",
            f"policy {row.policy or SEALED_POLICY_NAME}",
            f"ttl {row.ttl.total_seconds():g}s of {row.max_ttl.total_seconds():g}s",
            pluralize(len(row.expiry_conditions), "end condition", "end conditions"),
            "restricted" if row.restricted else "",
        ]
        return f"{row.name} {', '.join(filter(None, notes))}"
