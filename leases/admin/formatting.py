"""Small pieces of the operator's pages that only this app knows: a holder is a lease, and an agent has a page."""

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from leases.models import Agent, Lease
from sandboxes.admin.base import SummaryField
from sandboxes.admin.formatting import render_admin_link, render_badge


def build_agent_field(did: str) -> SummaryField:
    """An agent, with a link to its page if it has one."""
    agent = Agent.objects.filter(did=did).first() if did else None
    return SummaryField("Agent", render_admin_link("leases_agent", agent.pk, did) if agent else did or "–")


class LeaseHolderMixin:
    """A holder is named by the lease it is, and its agent has a page."""

    def agent(self, did: str) -> SummaryField:
        return build_agent_field(did)

    def holder(self, pk: UUID) -> SummaryField:
        lease = Lease.objects.filter(pk=pk).first()
        if lease is None:
            return SummaryField("Holder", str(pk), note="no such lease")
        return SummaryField(
            "Lease", render_admin_link("leases_lease", pk, lease.environment_id), note=render_badge(lease.status)
        )

    def holders(self, pks: Collection[UUID]) -> Mapping[UUID, Any]:
        found = Lease.objects.in_bulk(pks)
        return {pk: render_admin_link("leases_lease", pk, found[pk].environment_id) if pk in found else str(pk) for pk in pks}
