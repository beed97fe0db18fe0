"""Parts of the list of sandboxes that have a name: each is a tab, and every number elsewhere that links to it."""

from django.db.models import F, Q, QuerySet

from sandboxes.admin.base import ListTab
from sandboxes.models import GONE_STATES, Attachment, SandboxState
from sandboxes.pool_stats import build_stalled_filter


def find_unsaved_attachments() -> QuerySet[Attachment]:
    """Sandboxes with changes in /data that are stored nowhere else, whatever the reason."""
    here = Attachment.objects.filter(unsaved_since__isnull=False, incarnation=F("sandbox__incarnation"))
    return here.filter(sandbox__lost_at__isnull=True).exclude(sandbox__state__in=[SandboxState.COLD, SandboxState.DESTROYED])


LIVE_TAB = ListTab("Live", "No sandbox exists now.", lambda now: ~Q(state=SandboxState.DESTROYED))
RUNNING_TAB = ListTab("Running", "Nothing runs now.", lambda now: Q(state=SandboxState.RUNNING))
WAITING_TAB = ListTab("Waiting", "No sandbox waits for its next run.", lambda now: Q(state=SandboxState.WAITING))
UNCLAIMED_TAB = ListTab(
    "Unclaimed",
    "No sandbox is ready that nobody holds yet.",
    lambda now: Q(state=SandboxState.WARM, holder__isnull=True),
)
EVICTING_TAB = ListTab("Evicting", "No sandbox is falling asleep.", lambda now: Q(state=SandboxState.EVICTING))
COLD_TAB = ListTab("Cold", "No sandbox sleeps.", lambda now: Q(state=SandboxState.COLD))
UNSTORED_TAB = ListTab(
    "Not stored",
    "The state of every sandbox that went to sleep was stored.",
    lambda now: Q(state=SandboxState.WAITING, lost_at__isnull=True) & ~Q(last_error=""),
)
UNSAVED_TAB = ListTab(
    "Data not stored",
    "Every change in /data is stored.",
    lambda now: Q(pk__in=find_unsaved_attachments().values("sandbox")),
)
LOST_TAB = ListTab(
    "Lost",
    "No provider has lost a sandbox that a lease still holds.",
    lambda now: Q(lost_at__isnull=False) & ~Q(state__in=GONE_STATES),
)
QUARANTINE_TAB = ListTab(
    "Quarantine",
    "Nothing in quarantine: every destroy was confirmed, or is still being tried.",
    lambda now: Q(state=SandboxState.DESTROYING, quarantined_at__isnull=False),
)
STALLED_TAB = ListTab("Stalled", "Nothing is past its deadline.", build_stalled_filter)

SANDBOX_TABS = {
    "live": LIVE_TAB,
    "running": RUNNING_TAB,
    "waiting": WAITING_TAB,
    "unclaimed": UNCLAIMED_TAB,
    "evicting": EVICTING_TAB,
    "cold": COLD_TAB,
    "unstored": UNSTORED_TAB,
    "unsaved": UNSAVED_TAB,
    "lost": LOST_TAB,
    "quarantine": QUARANTINE_TAB,
    "stalled": STALLED_TAB,
    "history": ListTab("History", "There was never a sandbox."),
}
