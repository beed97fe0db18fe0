"""Recognition of URLs, inline data and ids of stored objects in strings of a request.

LiteLLM and the providers look for URLs with different parsers, some of them anywhere in a string. URLs are therefore recognized
generously, and data by its alphabet, which has no colon."""

import re
from typing import Any

# A scheme with a slash or backslash, also with whitespace between, which parsers of URLs skip; a known scheme alone; a host
# without a scheme.
URL_PATTERN = re.compile(
    r":\s*[/\\]|^\s*(?:https?|ftps?|file|data|gs|s3|wss?|javascript|blob)\s*:|^\s*[/\\]{2}[\w-]*[.:\[]", re.IGNORECASE
)
BASE64_PATTERN = re.compile(r"[A-Za-z0-9+/=_\-\s]*")
DATA_URL_PREFIX_PATTERN = re.compile(r"data:[\w.+-]*(?:/[\w.+-]+)?(?:;[\w-]+=[\w.+-]*)*;base64,")
# Inputs of embeddings that LiteLLM takes for references: files of Google's API by name or URL, objects of cloud stores.
REFERENCE_PATTERN = re.compile(r"^\s*(?:[a-z][a-z0-9+.-]*:\s*[/\\]|files/)|\b(?:gs|s3)://", re.IGNORECASE)
ID_NAME_PATTERN = re.compile(r"(?:^|_)ids?$|[a-z](?:Id|ID)s?$")
STORED_ID_PATTERN = re.compile(
    r"(?:asst|assistant|batch|cntr|container|conv|cmp|fc|file|ft|item|msg|pmpt|resp|rs|run|skill|step|thread|upload|vs|vsf)"
    r"[-_](?=[a-z_-]*[A-Z0-9])[A-Za-z0-9_-]{6,}"
)


def is_url(text: str) -> bool:
    return URL_PATTERN.search(text) is not None


def is_inline_data(text: str) -> bool:
    """Return whether a string is base64, or a data: URL with base64."""
    prefix = DATA_URL_PREFIX_PATTERN.match(text)
    return BASE64_PATTERN.fullmatch(text, prefix.end() if prefix else 0) is not None


def is_reference(text: str) -> bool:
    """Return whether an input of embeddings names an object instead of being a text or inline data."""
    return REFERENCE_PATTERN.search(text) is not None


def is_stored_id(name: str | int | None, value: Any) -> bool:
    """Return whether a field's value names an object that the provider stores, by the name of the field or by the value."""
    if isinstance(name, str) and ID_NAME_PATTERN.search(name) and value is not None:
        return True
    return isinstance(value, str) and STORED_ID_PATTERN.fullmatch(value) is not None


def has_reference(name: str | int | None, value: Any, depth: int = 64) -> bool:
    """Return whether a value contains a URL or an id of a stored object. Deeper values than `depth` count as such."""
    if isinstance(value, dict):
        return not depth or any(has_reference(key, child, depth - 1) for key, child in value.items())
    if isinstance(value, list):
        return not depth or any(has_reference(name, child, depth - 1) for child in value)
    return is_stored_id(name, value) or (isinstance(value, str) and is_url(value))
