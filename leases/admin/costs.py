"""Operators' pages on costs as seen from here: a holder is a lease, and an agent has a page."""

from django.contrib import admin

from billing.admin.costs import CostRecordAdmin
from billing.admin.members import MembershipAdmin, MembershipForm
from billing.admin.usage import UsageRecordAdmin
from billing.models import CostRecord, Membership, UsageRecord
from leases.admin.formatting import LeaseHolderMixin
from leases.admin.sandboxes import AgentDidFormMixin

for model in (CostRecord, Membership, UsageRecord):
    admin.site.unregister(model)


@admin.register(CostRecord)
class LeasedCostRecordAdmin(LeaseHolderMixin, CostRecordAdmin):
    pass


@admin.register(UsageRecord)
class LeasedUsageRecordAdmin(LeaseHolderMixin, UsageRecordAdmin):
    pass


class LeasedMembershipForm(AgentDidFormMixin, MembershipForm):
    pass


@admin.register(Membership)
class LeasedMembershipAdmin(LeaseHolderMixin, MembershipAdmin):
    form = LeasedMembershipForm
