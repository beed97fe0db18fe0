"""Options of management commands for limits of the resources that a request may state."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

AMOUNT_OPTIONS = {"max_memory_mib": "MiB", "max_millicpus": "MILLICPUS", "max_disk_mib": "MiB", "max_gpus": "NUMBER"}
LIST_OPTIONS = {"allowed_images": "IMAGE", "allowed_sizes": "SIZE", "allowed_gpu_types": "TYPE"}
NO_LIMIT = "none"


def add_limit_options(parser: ArgumentParser) -> None:
    for name, unit in AMOUNT_OPTIONS.items():
        parser.add_argument(
            _build_option(name), metavar=unit, help=f"maximum that a lease may request; {NO_LIMIT!r} removes the limit"
        )
    for name, unit in LIST_OPTIONS.items():
        parser.add_argument(
            _build_option(name), nargs="*", metavar=unit, help="names that a lease may request; without a name, no limit"
        )


def parse_limits(options: dict[str, Any]) -> dict[str, Any]:
    """Return the stated limits by the names of their columns. Raise CommandError, naming the option."""
    limits: dict[str, Any] = {name: options[name] for name in LIST_OPTIONS if options[name] is not None}
    return limits | {name: _parse_amount(name, options[name]) for name in AMOUNT_OPTIONS if options[name] is not None}


def _parse_amount(name: str, text: str) -> int | None:
    if text == NO_LIMIT:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise CommandError(f"{_build_option(name)}: must be a number or {NO_LIMIT!r}.")
    return int(text)


def _build_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
