"""Validation of strings that no serializer has validated."""

import re

from django.db.models import Model

from leases.errors import InvalidRequest

MAX_CHARS = 320


def require_match(name: str, value: str, pattern: str, description: str) -> None:
    """Raise InvalidRequest that names the field, unless the whole value matches and has at most MAX_CHARS."""
    if len(value) > MAX_CHARS or not re.fullmatch(pattern, value, re.ASCII):
        raise InvalidRequest(name, f"Not {description}.")


def require_fits(model: type[Model], /, **texts: str) -> None:
    """Raise InvalidRequest that names the field, for a text that is longer than its column of `model`, or has a NUL."""
    for name, text in texts.items():
        max_length = getattr(model._meta.get_field(name), "max_length", None)
        if max_length is not None and len(text) > max_length:
            raise InvalidRequest(name, f"At most {max_length} characters.")
        if "\0" in text:
            raise InvalidRequest(name, "NUL is not allowed.")
