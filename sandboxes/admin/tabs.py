"""Parts of the list of sandboxes that have a name: each is a tab, and every number elsewhere that links to it."""

from django.db.models import F, Q, QuerySet

from sandboxes.admin.base import Slice
from sandboxes.models import GONE, Attachment, State
from sandboxes.pool_stats import stalled


def unsaved() -> QuerySet[Attachment]:
    """Sandboxes with changes in /data that are stored nowhere else, whatever the reason."""
    here = Attachment.objects.filter(unsaved_since__isnull=False, incarnation=F("sandbox__incarnation"))
    return here.filter(sandbox__lost_at__isnull=True).exclude(sandbox__state__in=[State.COLD, State.DESTROYED])


LIVE = Slice("Live", "No sandbox exists now.", lambda now: ~Q(state=State.DESTROYED))
RUNNING = Slice("Running", "Nothing runs now.", lambda now: Q(state=State.RUNNING))
WAITING = Slice("Waiting", "No sandbox waits for its next run.", lambda now: Q(state=State.WAITING))
UNCLAIMED = Slice(
    "Unclaimed",
    "No sandbox is ready that nobody holds yet.",
    lambda now: Q(state=State.WARM, holder__isnull=True),
)
EVICTING = Slice("Evicting", "No sandbox is falling asleep.", lambda now: Q(state=State.EVICTING))
COLD = Slice("Cold", "No sandbox sleeps.", lambda now: Q(state=State.COLD))
UNSTORED = Slice(
    "Not stored",
    "The state of every sandbox that went to sleep was stored.",
    lambda now: Q(state=State.WAITING, lost_at__isnull=True) & ~Q(last_error=""),
)
UNSAVED = Slice(
    "Data not stored",
    "Every change in /data is stored.",
    lambda now: Q(pk__in=unsaved().values("sandbox")),
)
LOST = Slice(
    "Lost",
    "No provider has lost a sandbox that a lease still holds.",
    lambda now: Q(lost_at__isnull=False) & ~Q(state__in=GONE),
)
QUARANTINE = Slice(
    "Quarantine",
    "Nothing in quarantine: every destroy was confirmed, or is still being tried.",
    lambda now: Q(state=State.DESTROYING, quarantined_at__isnull=False),
)
STALLED = Slice("Stalled", "Nothing is past its deadline.", stalled)

SANDBOXES = {
    "live": LIVE, "running": RUNNING, "waiting": WAITING, "unclaimed": UNCLAIMED, "evicting": EVICTING, "cold": COLD,
    "unstored": UNSTORED, "unsaved": UNSAVED, "lost": LOST, "quarantine": QUARANTINE, "stalled": STALLED,
    "history": Slice("History", "There was never a sandbox."),
}  # fmt: skip
