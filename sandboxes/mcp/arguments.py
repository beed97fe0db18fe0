"""Validation of the arguments of a tool by its JSON schema."""

from collections.abc import Mapping
from typing import Any

import jsonschema

from sandboxes.mcp.tools import Tool

MAX_DETAIL_CHARS = 500  # of a validation error, which repeats the argument


def omit_nulls(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without those that are null and cannot be. Some models state null for each optional argument."""
    return {name: value for name, value in arguments.items() if value is not None or _accepts_null(tool, name)}


def _accepts_null(tool: Tool, name: str) -> bool:
    return name not in tool.arguments or jsonschema.Draft202012Validator(tool.arguments[name]).is_valid(None)


def find_argument_error(tool: Tool, arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the name of an argument that does not match the tool's schema and the reason, or None."""
    for name in arguments:
        if name not in tool.arguments:
            return name.encode(errors="replace").decode(), f"Unknown argument. {tool.name} accepts {', '.join(tool.arguments)}."
    for name in tool.required:
        if name not in arguments:
            return name, "This argument is required."
    for name, value in arguments.items():
        for error in jsonschema.Draft202012Validator(tool.arguments[name]).iter_errors(value):
            return name, error.message[:MAX_DETAIL_CHARS]
        try:
            _encode_strings(value)
        except UnicodeEncodeError:
            return name, "Not valid Unicode: surrogates come in pairs."
    return None


def _encode_strings(value: Any) -> None:
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict):
        _encode_strings([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            _encode_strings(item)
