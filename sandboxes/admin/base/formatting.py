"""Text and HTML of console values. All HTML is built with format_html, because agents wrote most of the text."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from sandboxes.db import database_time
from sandboxes.formatting import CONTROL_CHARACTER_ESCAPES


def format_duration(length: timedelta) -> str:
    """Format a duration in at most two units: "350 ms", "1 m 5 s", "11 m", "4 h 57 m", "3 d 2 h"."""
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
    """Format a duration like `format_duration`, in whole seconds below ten."""
    return format_duration(length) if length >= timedelta(seconds=10) else f"{max(int(length.total_seconds()), 0)} s"


def format_time_until(moment: datetime | None, then: str, due: str) -> str:
    """Format a future event, such as "sleeps in 4 m". Returns `due` once the moment is past and "" without a moment."""
    if moment is None:
        return ""
    left = moment - database_time.now()
    return f"{then} in {format_age(left)}" if left > timedelta(0) else due


def format_usd(amount: Decimal) -> str:
    """Format an amount in full without trailing zeros. The caller adds the currency."""
    return f"{amount.normalize():,f}"


def render_timestamp(moment: datetime, text: str = "") -> SafeString:
    """Render a moment as `text`, by default in full, with the full UTC time as tooltip."""
    full = f"{moment:%Y-%m-%d %H:%M:%S}"
    return format_html('<time datetime="{}" title="{} UTC">{}</time>', moment.isoformat(), full, text or full)


def render_time_ago(moment: datetime | None, never: str = "never") -> SafeString | str:
    """Render a past moment as "4 m ago", or `never` without a moment."""
    return render_timestamp(moment, f"{format_age(database_time.now() - moment)} ago") if moment else never


def render_time_since(moment: datetime) -> SafeString:
    """Render the time passed since a moment, such as "4 m"."""
    return render_timestamp(moment, format_age(database_time.now() - moment))


def render_badge(kind: str, text: str = "") -> SafeString:
    """Render a coloured dot and a word, by default the kind. console.css has one colour for each kind."""
    return format_html('<span class="lh-badge is-{}">{}</span>', kind, text or kind)


def render_two_lines(first: Any, second: Any) -> SafeString:
    """Render two lines of one table cell."""
    return format_html('<span class="lh-two"><span>{}</span><span>{}</span></span>', first, second)


def render_meter(used: int | Decimal, limit: int | Decimal) -> SafeString:
    """Render used share of a limit as a bar. The caller shows the numbers beside it."""
    share = min(used / limit, 1) if limit else 1
    kind = "is-full" if share == 1 else ""
    return format_html('<meter class="lh-meter {}" min="0" max="1" value="{}"></meter>', kind, f"{share:.4f}")


def render_admin_link(model: str, pk: Any, text: Any) -> SafeString:
    """Render a link to a row's page. `model` is in the form "sandboxes_pool"."""
    return format_html('<a class="lh-link" href="{}">{}</a>', reverse(f"admin:{model}_change", args=[pk]), text)


def build_changelist_url(model: str, **params: Any) -> str:
    """Build the URL of a changelist, narrowed by `slice` (a tab) or by columns."""
    return reverse(f"admin:{model}_changelist", query=params)


def format_command(argv: Sequence[str]) -> str:
    """Format an argv as one shell-quoted line."""
    return shlex.join(str(word) for word in argv).translate(CONTROL_CHARACTER_ESCAPES)


def decode_output(output: bytes) -> str:
    """Decode output bytes for display: invalid UTF-8 replaced, control characters escaped."""
    return output.decode("utf-8", "replace").replace("\r\n", "\n").translate(CONTROL_CHARACTER_ESCAPES)


def truncate_text(text: str, limit: int = 90) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def format_counts(parts: Mapping[str, int]) -> str:
    """Format the counts that are not zero: "2 failed, 1 refused"."""
    return ", ".join(f"{number:,} {label}" for label, number in parts.items() if number)


@dataclass(frozen=True)
class SummaryField:
    """Box in the summary at the top of a row's page."""

    label: str
    value: Any
    note: Any = ""
    href: str = ""
    alarm: bool = False


def build_sandbox_field(row: Any) -> SummaryField:
    """Build the link to the sandbox of a run, process, reading or snapshot."""
    link = render_admin_link("sandboxes_sandbox", row.sandbox_id, row.sandbox)
    return SummaryField("Sandbox", link, note=f"incarnation {row.incarnation}")
