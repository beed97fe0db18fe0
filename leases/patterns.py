"""Validation of strings that no serializer has validated."""

import re

from leases.errors import InvalidRequest

MAX_CHARS = 320


def require_match(name: str, value: str, pattern: str, description: str) -> None:
    """Raise InvalidRequest that names the field, unless the whole value matches and has at most MAX_CHARS."""
    if len(value) > MAX_CHARS or not re.fullmatch(pattern, value, re.ASCII):
        raise InvalidRequest(name, f"Not {description}.")
