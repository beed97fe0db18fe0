"""Small pieces of the operator's pages as HTML. Everything goes through format_html: agents wrote most of it."""

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from sandboxes.formatting import CONTROL_CHARACTER_ESCAPES
from sandboxes.formatting import format_bytes as format_bytes
from sandboxes.formatting import format_path as format_path
from sandboxes.formatting import pluralize as pluralize


def format_duration(length: timedelta) -> str:
    """A duration in at most two units: "350 ms", "1 m 5 s", "11 m", "4 h 57 m", "3 d 2 h"."""
    seconds = max(length.total_seconds(), 0)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit, big, next_unit, small in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= big:
            rest = whole % big // small
            exact = rest and (unit != "m" or whole < 600)
            return f"{whole // big} {unit} {rest} {next_unit}" if exact else f"{whole // big} {unit}"
    return f"{whole} s"


def format_age(length: timedelta) -> str:
    """A duration as long ago as a person cares: whole seconds."""
    return format_duration(length) if length >= timedelta(seconds=10) else f"{max(int(length.total_seconds()), 0)} s"


def format_time_until(moment: datetime | None, then: str, due: str) -> str:
    """What comes, and how soon: "sleeps in 4 m"; `due` once it is past, nothing if it will not come."""
    if moment is None:
        return ""
    left = moment - timezone.now()
    return f"{then} in {format_age(left)}" if left > timedelta(0) else due


def format_usd(amount: Decimal) -> str:
    """Money in full, without the zeros that a column fills up with. Whoever shows it says that these are USD."""
    return f"{amount.normalize():,f}"


def render_timestamp(moment: datetime, text: str = "") -> SafeString:
    """A moment, as `text` or in full; the full one in UTC is always at hand."""
    full = f"{moment:%Y-%m-%d %H:%M:%S}"
    return format_html('<time datetime="{}" title="{} UTC">{}</time>', moment.isoformat(), full, text or full)


def render_time_ago(moment: datetime | None, never: str = "never") -> SafeString | str:
    return render_timestamp(moment, f"{format_age(timezone.now() - moment)} ago") if moment else never


def render_time_since(moment: datetime) -> SafeString:
    return render_timestamp(moment, format_age(timezone.now() - moment))


def render_badge(kind: str, text: str = "") -> SafeString:
    """A coloured dot and a word; console.css has one colour for each kind, the same on every page."""
    return format_html('<span class="lh-badge is-{}">{}</span>', kind, text or kind)


def render_two_lines(first: Any, second: Any) -> SafeString:
    """Two lines of one cell."""
    return format_html('<span class="lh-two"><span>{}</span><span>{}</span></span>', first, second)


def render_meter(used: int | Decimal, most: int | Decimal) -> SafeString:
    """How much is used of what there may be, as a bar. The numbers stand beside it."""
    share = min(used / most, 1) if most else 1
    kind = "is-full" if share == 1 else ""
    return format_html('<meter class="lh-meter {}" min="0" max="1" value="{}"></meter>', kind, f"{share:.4f}")


def render_admin_link(model: str, pk: Any, text: Any) -> SafeString:
    """A link to a row's page; model as in "sandboxes_pool"."""
    return format_html('<a class="lh-link" href="{}">{}</a>', reverse(f"admin:{model}_change", args=[pk]), text)


def build_changelist_url(model: str, **params: Any) -> str:
    """The address of a list, cut down by a slice or a column."""
    return reverse(f"admin:{model}_changelist", query=params)


def format_command(argv: Sequence[str]) -> str:
    """An argv as one line for a shell."""
    return shlex.join(str(word) for word in argv).translate(CONTROL_CHARACTER_ESCAPES)


def decode_output(output: bytes) -> str:
    """What a command printed, as something a browser can show."""
    return output.decode("utf-8", "replace").replace("\r\n", "\n").translate(CONTROL_CHARACTER_ESCAPES)


def truncate_text(said: str, most: int = 90) -> str:
    return said if len(said) <= most else said[: most - 1] + "…"


def format_counts(parts: Mapping[str, int]) -> str:
    """What there is of several things: "2 local, 1 cloud"."""
    return ", ".join(f"{number:,} {what}" for what, number in parts.items() if number)
