"""Plain-text formatting of sizes, counts and paths, for commands and pages alike."""

from collections.abc import Iterable
from difflib import get_close_matches

# Control characters and bidirectional control characters, each mapped to a visible escape. Agents choose file names and output,
# so these characters must not reach a terminal or a page. Newline and tab are not escaped.
CONTROL_CHARACTER_ESCAPES = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\n\t"
}


def suggest_match(value: str, known: Iterable[str]) -> str:
    """Return " Did you mean docker?" with the known name nearest to `value`, or an empty string if none is near."""
    matches = get_close_matches(value, sorted(known), n=1)
    return f" Did you mean {matches[0]}?" if matches else ""


def format_bytes(count: int) -> str:
    """Format a size with one decimal place in the largest fitting binary unit: "812 B", "3.4 KiB", "1.2 GiB"."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1023.95 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.1f} {units[0]}" if units[0] != "B" else f"{count} B"


def format_path(name: str) -> str:
    """Format a path on one line, with all control characters escaped."""
    return name.translate({**CONTROL_CHARACTER_ESCAPES, ord("\n"): "\\n", ord("\t"): "\\t"})


def pluralize(number: int, singular: str, plural: str) -> str:
    return f"{number:,} {singular if number == 1 else plural}"
