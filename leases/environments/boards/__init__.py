"""Registry of board renderers, one module for each environment type. To add one: write the module and list it here."""

from collections.abc import Iterable, Mapping
from typing import Any

from leases.environments.boards import catan
from leases.environments.boards.base import BoardRenderer

RENDERERS: Mapping[str, BoardRenderer] = {"catan": catan}
MAX_ACTION_CHARS = 300


def find_renderer(environment_type: str) -> BoardRenderer | None:
    return RENDERERS.get(environment_type)


def describe_action(environment_type: str, action: Mapping[str, Any]) -> str:
    """Describe an action in words, else as its name and fields."""
    renderer = find_renderer(environment_type)
    text = renderer.describe_action(action) if renderer else ""
    return truncate(text or _list_fields(action))


def _list_fields(action: Mapping[str, Any]) -> str:
    name = next((str(action[key]) for key in ("action", "type", "name") if isinstance(action.get(key), str)), "")
    fields = [f"{key}: {_format_value(value)}" for key, value in action.items() if value != name and value is not None]
    return " · ".join(filter(None, [(name.replace("_", " ").lower() if name.isupper() else name.replace("_", " ")), *fields]))


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_format_value(each)}" for key, each in value.items()) + "}"
    return ", ".join(map(_format_value, value)) if isinstance(value, list) else str(value)


def truncate(text: str) -> str:
    return text if len(text) <= MAX_ACTION_CHARS else f"{text[: MAX_ACTION_CHARS - 1]}…"


def outline(value: Any, depth: int = 0) -> str:
    """Format a JSON value as indented lines, for states without a renderer."""
    indent = "  " * depth
    if isinstance(value, dict):
        return "\n".join(_outline_entry(f"{indent}{key}:", each, depth) for key, each in value.items())
    if isinstance(value, list):
        return "\n".join(_outline_entry(f"{indent}-", each, depth) for each in value)
    return f"{indent}{_format_scalar(value)}"


def _is_nested(values: Iterable[Any]) -> bool:
    return any(isinstance(each, (dict, list)) for each in values)


def _outline_entry(label: str, value: Any, depth: int) -> str:
    if isinstance(value, list) and not _is_nested(value):
        return f"{label} {', '.join(map(_format_scalar, value))}".rstrip()
    if isinstance(value, dict) and label.endswith("-") and not _is_nested(value.values()):
        return f"{label} {', '.join(f'{key}: {_format_scalar(each)}' for key, each in value.items())}".rstrip()
    if isinstance(value, (dict, list)):
        return f"{label}\n{outline(value, depth + 1)}" if value else f"{label} –"
    return f"{label} {_format_scalar(value)}"


def _format_scalar(value: Any) -> str:
    return "–" if value is None else ("no", "yes")[value] if isinstance(value, bool) else str(value)
