"""Allow list of a policy: domain names with optional ports.

An entry is a name ("pypi.org"), all names below a name ("*.example.org", without "example.org" itself), or either with a port
("git.example.org:8443"). An entry without a port allows 443 and 80. Imports no model: models validate with this module."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from django.core.exceptions import ValidationError

DEFAULT_PORTS = frozenset({80, 443})
MAX_ENTRIES = 128
MAX_NAME_CHARACTERS = 253
LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
NAME_PATTERN = re.compile(rf"(?:{LABEL}\.)+(?!\d+$){LABEL}")  # at least two labels; a numeric last label is an IP address
ENTRY_PATTERN = re.compile(r"(?P<name>(?:\*\.)?[^:*]+)(?::(?P<port>[1-9]\d{0,4}))?")


class AllowedDomain(NamedTuple):
    """Parsed entry of an allow list."""

    name: str  # without "*."
    includes_subdomains: bool  # only the names below `name`
    ports: frozenset[int]

    def allows(self, host: str, port: int) -> bool:
        is_match = host.endswith(f".{self.name}") if self.includes_subdomains else host == self.name
        return is_match and port in self.ports


def parse_entry(entry: object) -> AllowedDomain:
    """Parse one entry. Raise ValueError with a message for the operator."""
    match = ENTRY_PATTERN.fullmatch(entry) if isinstance(entry, str) else None
    if match is None:
        raise ValueError('expected a domain such as "pypi.org", "*.example.org" or "git.example.org:8443"')
    name, port = match["name"], match["port"]
    bare_name = name.removeprefix("*.")
    if not is_domain(bare_name):
        raise ValueError(
            "not a lower-case domain name with at least two labels; IP addresses and single labels are not allowed"
        )
    if port and int(port) > 65535:
        raise ValueError("the port exceeds 65535")
    return AllowedDomain(bare_name, bare_name != name, frozenset({int(port)}) if port else DEFAULT_PORTS)


def is_domain(name: str) -> bool:
    """Return whether this is a lower-case ASCII domain name with at least two labels."""
    return len(name) <= MAX_NAME_CHARACTERS and NAME_PATTERN.fullmatch(name) is not None


def is_allowed(host: str, port: int, entries: Iterable[str]) -> bool:
    """Return whether an allow list admits this host and port."""
    return any(parse_entry(entry).allows(host, port) for entry in entries)


def check_allowed_domains(value: Any) -> None:
    """Validate an allow list. Raise ValidationError that names the first invalid entry."""
    if not isinstance(value, list) or len(value) > MAX_ENTRIES:
        raise ValidationError(f"A list of at most {MAX_ENTRIES} domains.")
    for entry in value:
        try:
            parse_entry(entry)
        except ValueError as error:
            raise ValidationError(f"{str(entry)[:260]!r}: {error}.") from error
