"""Small pieces of the operator's pages that only this app knows: a holder is a lease, and an agent has a page."""

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from leases.models import Agent, Lease
from sandboxes.admin.base import Fact
from sandboxes.admin.formatting import badge, link


def agent_fact(did: str) -> Fact:
    """An agent, with a link to its page if it has one."""
    agent = Agent.objects.filter(did=did).first() if did else None
    return Fact("Agent", link("leases_agent", agent.pk, did) if agent else did or "–")


class HeldByLease:
    """A holder is named by the lease it is, and its agent has a page."""

    def agent(self, did: str) -> Fact:
        return agent_fact(did)

    def holder(self, pk: UUID) -> Fact:
        lease = Lease.objects.filter(pk=pk).first()
        if lease is None:
            return Fact("Holder", str(pk), note="no such lease")
        return Fact("Lease", link("leases_lease", pk, lease.environment_id), note=badge(lease.status))

    def holders(self, pks: Collection[UUID]) -> Mapping[UUID, Any]:
        found = Lease.objects.in_bulk(pks)
        return {pk: link("leases_lease", pk, found[pk].environment_id) if pk in found else str(pk) for pk in pks}
