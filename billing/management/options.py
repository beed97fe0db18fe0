"""What commands about money have in common: options that are checked as requests are, and tables."""

from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError
from rest_framework import serializers


def validate_options(form: type[serializers.Serializer], given: dict[str, Any]) -> dict[str, Any]:
    """What options say, those that were not given left out; CommandError naming the one that is wrong."""
    read = form(data={name: value for name, value in given.items() if value is not None and name in form().fields})
    if not read.is_valid():
        name, wrong = next(iter(read.errors.items()))
        raise CommandError(f"--{name.replace('_', '-')}: {wrong[0]}")
    said: dict[str, Any] = read.validated_data
    return said


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they have to be; all but the first to the right."""
    lines = [head, *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    right = [[f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)][1:] for line in lines]
    cells = [[f"{line[0]:<{widths[0]}}", *rest] for line, rest in zip(lines, right, strict=True)]
    return "\n".join("  ".join(each) for each in cells)
