"""Permissions of API keys for new leases: environment types and pools, limits of resources, and the project.

An environment type determines the policy, spend limit and pool of a lease; a pool the provider, image and resources."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from leases.errors import InvalidRequest
from leases.models import AgentKey, EnvironmentType
from leases.projects.models import DEFAULT_PROJECT_ID
from sandboxes.models import Pool
from sandboxes.models.resource_limits import ResourceLimits


class Restrictable(Protocol):
    """Row that an operator may restrict: an environment type, or a pool with or without its statistics."""

    @property
    def name(self) -> str: ...
    @property
    def restricted(self) -> bool: ...


@dataclass(frozen=True)
class AllowLists:
    """Names of environment types and pools. An empty list allows every row that is not `restricted`, a list only its rows."""

    environment_types: Sequence[str] = ()
    pools: Sequence[str] = ()
    limits: ResourceLimits | None = field(default=None, compare=False)  # of the resources that a lease may request
    project_id: int | None = DEFAULT_PROJECT_ID  # of an agent's key; operators' keys act in every project
    is_operator: bool = False  # the key may act for every agent, and add it to an environment

    @classmethod
    def of_key(cls, key: AgentKey) -> "AllowLists":
        project_id = DEFAULT_PROJECT_ID if key.operator else key.project_id
        return cls(key.allowed_environment_types, key.allowed_pools, key, project_id, key.operator)

    def allows_environment_type(self, row: Restrictable) -> bool:
        return _is_allowed(row, self.environment_types)

    def allows_pool(self, row: Restrictable) -> bool:
        """Return whether the pool may be listed, and named for any environment type."""
        return _is_allowed(row, self.pools)

    def allows_placement(self, row: Pool, environment_type: EnvironmentType) -> bool:
        """Return whether a lease of an allowed environment type may use the pool.

        Without a list of pools the operator's choice of a pool for the environment type is sufficient, restricted or not."""
        return self.allows_pool(row) or (not self.pools and row.pk == environment_type.pool_id)


def _is_allowed(row: Restrictable, names: Sequence[str]) -> bool:
    return row.name in names if names else not row.restricted


def require_known(field: str, names: Sequence[str]) -> None:
    """Raise InvalidRequest for a name without a row. `field` is "environment_types" or "pools"."""
    model: type[EnvironmentType | Pool] = EnvironmentType if field == "environment_types" else Pool
    known = set(model._default_manager.filter(name__in=names).values_list("name", flat=True)) if names else set()
    if unknown := [name for name in names if name not in known]:
        raise InvalidRequest(field, f"There is no {model._meta.verbose_name} {unknown[0][:80]!r}.")
