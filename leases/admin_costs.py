"""Operators' pages on costs as seen from here: a holder is a lease, and an agent has a page."""

from django.contrib import admin

from billing.admin_costs import CostRecordAdmin, UsageRecordAdmin
from billing.models import CostRecord, UsageRecord
from leases.cells import HeldByLease

for model in (CostRecord, UsageRecord):
    admin.site.unregister(model)


@admin.register(CostRecord)
class LeasedCostRecordAdmin(HeldByLease, CostRecordAdmin):
    pass


@admin.register(UsageRecord)
class LeasedUsageRecordAdmin(HeldByLease, UsageRecordAdmin):
    pass
