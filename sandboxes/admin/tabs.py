"""Tabs of the sandbox list. Dashboard tiles and panels count the rows of a tab and link to it."""

from django.db.models import Q

from sandboxes.admin.base.changelist import ListTab
from sandboxes.models import GONE_STATES, SandboxState
from sandboxes.pool_stats import build_stalled_filter, find_unsaved_attachments

LIVE_TAB = ListTab(
    "Live",
    "No live sandboxes. A sandbox appears when a lease first uses one, or when a pool keeps some ready.",
    lambda now: ~Q(state=SandboxState.DESTROYED),
)
RUNNING_TAB = ListTab(
    "Running",
    "No running sandboxes. A sandbox is running while a command runs in it.",
    lambda now: Q(state=SandboxState.RUNNING),
)
WAITING_TAB = ListTab(
    "Waiting", "No waiting sandboxes. A sandbox waits between two runs of its lease.", lambda now: Q(state=SandboxState.WAITING)
)
SUSPENDED_TAB = ListTab(
    "Suspended",
    "No suspended sandboxes. Set a time to suspend on an environment type to freeze its waiting sandboxes.",
    lambda now: Q(state=SandboxState.SUSPENDED),
)
UNCLAIMED_TAB = ListTab(
    "Unclaimed",
    "No unclaimed sandboxes. Set the warm target of a pool to keep some ready.",
    lambda now: Q(state=SandboxState.WARM, holder__isnull=True),
)
EVICTING_TAB = ListTab("Evicting", "No sandbox is being evicted.", lambda now: Q(state=SandboxState.EVICTING))
COLD_TAB = ListTab(
    "Cold", "No cold sandboxes. An idle sandbox becomes cold once its state is stored.", lambda now: Q(state=SandboxState.COLD)
)
UNSTORED_TAB = ListTab(
    "State not stored",
    "No failed evictions: the state of every evicted sandbox is stored.",
    lambda now: Q(state=SandboxState.WAITING, lost_at__isnull=True) & ~Q(last_error=""),
)
UNSAVED_TAB = ListTab(
    "Data not stored",
    "No unsaved /data: every change is stored.",
    lambda now: Q(pk__in=find_unsaved_attachments().values("sandbox")),
)
LOST_TAB = ListTab(
    "Lost",
    "No lost sandboxes: every sandbox still exists at its provider.",
    lambda now: Q(lost_at__isnull=False) & ~Q(state__in=GONE_STATES),
)
QUARANTINE_TAB = ListTab(
    "Quarantine",
    "Quarantine is empty: every destroy was confirmed or is still being retried.",
    lambda now: Q(state=SandboxState.DESTROYING, quarantined_at__isnull=False),
)
STALLED_TAB = ListTab("Stalled", "No stalled sandboxes: none is past its deadline.", build_stalled_filter)

SANDBOX_TABS = {
    "live": LIVE_TAB,
    "running": RUNNING_TAB,
    "waiting": WAITING_TAB,
    "suspended": SUSPENDED_TAB,
    "unclaimed": UNCLAIMED_TAB,
    "evicting": EVICTING_TAB,
    "cold": COLD_TAB,
    "unstored": UNSTORED_TAB,
    "unsaved": UNSAVED_TAB,
    "lost": LOST_TAB,
    "quarantine": QUARANTINE_TAB,
    "stalled": STALLED_TAB,
    "history": ListTab("History", "No sandboxes yet. One is created when a lease first uses it."),
}
