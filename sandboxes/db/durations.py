"""Text form of durations: "5m", "30s", "2h", "1d" or plain seconds."""

import re
from datetime import timedelta

SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}
ACCEPTED_FORMAT = 'a duration: seconds, or a number with s, m, h or d, such as "90", "30s", "5m", "2h"'
MAX_DURATION = timedelta(days=366)


def parse_duration(text: str | int) -> timedelta:
    """Parse a duration, longer than zero and at most 366 days. Raise ValueError with the accepted format."""
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError(f"not {ACCEPTED_FORMAT}")
    match = re.fullmatch(r"(\d{1,9})([smhd]?)", str(text).strip(), re.ASCII)
    if not match:
        raise ValueError(f"{str(text)[:40]!r} is not {ACCEPTED_FORMAT}")
    duration = timedelta(seconds=int(match[1]) * SECONDS_PER_UNIT.get(match[2], 1))
    if not timedelta(0) < duration <= MAX_DURATION:
        raise ValueError(f"{text!r} is out of range: longer than 0, at most 366 days")
    return duration
