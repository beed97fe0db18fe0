"""Option validation by API serializers, and text tables, for the billing commands."""

from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError
from rest_framework import serializers


def validate_options(serializer_class: type[serializers.Serializer], options: dict[str, Any]) -> dict[str, Any]:
    """Validate command options with an API serializer. Raise CommandError with the name of an invalid option."""
    fields = serializer_class().fields
    serializer = serializer_class(data={name: value for name, value in options.items() if value is not None and name in fields})
    if not serializer.is_valid():
        name, errors = next(iter(serializer.errors.items()))
        raise CommandError(f"--{name.replace('_', '-')}: {errors[0]}")
    validated: dict[str, Any] = serializer.validated_data
    return validated


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns, the first to the left and the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(header))]
    right = [[f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)][1:] for line in lines]
    cells = [[f"{line[0]:<{widths[0]}}", *rest] for line, rest in zip(lines, right, strict=True)]
    return "\n".join("  ".join(each) for each in cells)
