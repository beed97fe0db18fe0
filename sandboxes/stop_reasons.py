"""Reasons for which sandboxes were stopped, in the form that clients receive."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sandboxes.lifecycle import COLD, DESTROYING, EVICTING
from sandboxes.models import Transition, TransitionReason

# The texts of other reasons may name another agent, or contain the note of an operator. Clients get their labels.
_PUBLIC_TEXT_REASONS = (TransitionReason.LEASE_ENDED, TransitionReason.START_FAILED, TransitionReason.STATE_LOST)


@dataclass(frozen=True)
class SandboxStop:
    """Transition that began the eviction or the destruction of a sandbox."""

    state: str  # evicting or destroying
    reason: TransitionReason
    at: datetime
    detail: str


def find_last_stop(holder: UUID) -> SandboxStop | None:
    """Return the newest stop of a sandbox of this holder, or None.

    The release of a cold sandbox's place is not a stop: its process had been stopped before."""
    stops = Transition.objects.filter(holder=holder, to__in=(EVICTING, DESTROYING)).exclude(was=COLD)
    if (last := stops.order_by("-at", "-pk").first()) is None:
        return None
    reason = TransitionReason(last.code)
    detail = last.reason if reason in _PUBLIC_TEXT_REASONS else str(reason.label)
    return SandboxStop(state=last.to, reason=reason, at=last.at, detail=detail)
