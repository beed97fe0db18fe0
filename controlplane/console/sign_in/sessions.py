"""Clocks of a session of the console: time without a request, and age."""

from datetime import UTC, datetime

from django.conf import settings
from django.http import HttpRequest

from sandboxes.db import database_time

BEGAN_AT = "signed_in_at"  # seconds since 1970
SEEN_AT = "seen_at"
BACKGROUND_HEADER = "X-Leasehold-Background"  # of requests that a page makes by itself
SEEN_STEPS = 60  # a session is written at most so often in its idle timeout


def begin(request: HttpRequest) -> None:
    """Start both clocks of a session."""
    request.session[BEGAN_AT] = request.session[SEEN_AT] = database_time.now().timestamp()


def find_end(request: HttpRequest) -> datetime | None:
    """Return the time at which the session ends without a further request. None for a session without valid clocks."""
    try:
        began_at, seen_at = (datetime.fromtimestamp(request.session[name], UTC) for name in (BEGAN_AT, SEEN_AT))
        return min(began_at + settings.SIGN_IN.max_age, seen_at + settings.SIGN_IN.idle_timeout)
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return None


def keep(request: HttpRequest, now: datetime) -> None:
    """Restart the idle clock, unless the page makes this request by itself or the clock was restarted a moment ago."""
    step_seconds = settings.SIGN_IN.idle_timeout.total_seconds() / SEEN_STEPS
    if BACKGROUND_HEADER not in request.headers and now.timestamp() - request.session[SEEN_AT] >= step_seconds:
        request.session[SEEN_AT] = now.timestamp()
