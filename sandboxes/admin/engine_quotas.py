"""Limits of engines on the pages of hosts and pools, beside the capacity of the pools."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from django.utils.safestring import SafeString

from sandboxes.admin.base.formatting import SummaryField, render_time_ago
from sandboxes.hosts import engine_quotas
from sandboxes.hosts.engine_quotas import QuotaUse
from sandboxes.models import Host

FIELD_LABEL = "Cluster quota"


@dataclass(frozen=True)
class QuotaPanel:
    """Table of the limits of one host. `failure` is why they may be outdated; empty: they are not."""

    host: Host
    uses: list[QuotaUse]
    failure: str

    @property
    def read(self) -> SafeString | str:
        return render_time_ago(self.host.quotas_read_at) if self.host.quotas_read_at else ""

    @property
    def exceeds(self) -> bool:
        return any(use.exceeds for use in self.uses)

    @property
    def has_needs(self) -> bool:
        return any(use.needed for use in self.uses)


def build_quota_panels(hosts: Iterable[Host], now: datetime) -> list[QuotaPanel]:
    return [QuotaPanel(host, engine_quotas.list_uses(host), engine_quotas.describe_failure(host, now=now)) for host in hosts]


def build_quota_fields(panels: Iterable[QuotaPanel]) -> list[SummaryField]:
    """Build one field for each host: whether its limits suffice for the capacity of the pools."""
    return [_build_field(panel) for panel in panels]


def _build_field(panel: QuotaPanel) -> SummaryField:
    exceeded = [use for use in panel.uses if use.exceeds]
    if exceeded:
        note = "; ".join(f"{use.resource}: pools need {use.needed}, quota {use.hard}" for use in exceeded)
        if panel.failure:
            note += f". Outdated: {panel.failure}"
        return SummaryField(FIELD_LABEL, "below capacity", note=note, alarm=True)
    if panel.failure:
        return SummaryField(FIELD_LABEL, "outdated" if panel.read else "unknown", note=panel.failure, alarm=True)
    if not panel.read:
        return SummaryField(FIELD_LABEL, "not read yet", note="read every minute by the worker")
    if not panel.uses:
        return SummaryField(FIELD_LABEL, "none", note="the namespace has no ResourceQuota")
    if not panel.has_needs:
        return SummaryField(FIELD_LABEL, "not compared", note="its pools also have sandboxes on other hosts")
    fullest = max((use for use in panel.uses if use.percent is not None), key=lambda use: use.percent or 0, default=None)
    note = f"{fullest.resource}: {fullest.used} of {fullest.hard} used" if fullest else "use not counted yet"
    return SummaryField(FIELD_LABEL, "covers capacity", note=note)
