"""Vocabulary of the tables: shapes of JSON values, down to the leaves.

A shape says which values are forwarded. `cleaning` decides about all others. A field of a table that may be absent may be null
as well."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from fnmatch import fnmatchcase
from typing import Union

from sandboxes.egress.request_filter.errors import INVALID_REQUEST

TYPE_PATTERN = re.compile(r"[a-z0-9_]{1,64}")  # a pattern of a table must not admit a URL in the type


class Leaf(Enum):
    TEXT = auto()  # string that the model reads, also with URLs
    INPUT = auto()  # text of an embedding; a string that LiteLLM takes for a reference to a file is refused
    VALUE = auto()  # number, boolean, or a string that is no URL
    NUMBER = auto()  # number or boolean
    DATA = auto()  # base64, or a data: URL with base64
    JSON = auto()  # any value: JSON Schema, and arguments of tool calls
    EMPTY = auto()  # empty list: others would refer to files and URLs
    IGNORED = auto()  # known field that is never forwarded, and not counted
    REFUSED = auto()  # URL, or id of an object that the provider stores: null only
    PROVIDER_TOOL = auto()  # option that makes the provider execute a tool: null only


@dataclass(frozen=True)
class Constant:
    """The string `value`."""

    value: str


@dataclass(frozen=True)
class ListOf:
    items: "Shape"


@dataclass(frozen=True)
class TokenMap:
    """Object whose keys are token numbers."""

    values: "Shape"


@dataclass(frozen=True)
class Either:
    """Shapes by JSON type. None: values of this type are refused."""

    string: Leaf | None = None
    number: Leaf | None = None
    items: Union["Shape", None] = None  # of a list
    object: Union["Shape", None] = None


@dataclass(frozen=True)
class Record:
    """Object with known keys. `error_code` refuses unknown keys whose values are not scalars, and missing keys."""

    fields: Mapping[str, "Shape"]
    required: frozenset[str] = frozenset()
    error_code: str = INVALID_REQUEST

    def requiring(self, *names: str) -> "Record":
        return replace(self, required=frozenset(names))


@dataclass(frozen=True)
class Tagged:
    """Object whose `type` selects its shape. Patterns such as `bash_20*` select by prefix.

    `untyped` is the shape of an object without a type. None: the type is required."""

    records: Mapping[str, Record]
    untyped: Record | None = None
    error_code: str = INVALID_REQUEST

    def find(self, kind: str) -> Record | None:
        if not TYPE_PATTERN.fullmatch(kind):
            return None
        found = self.records.get(kind)
        return found or next((record for pattern, record in self.records.items() if fnmatchcase(kind, pattern)), None)


Shape = Leaf | Constant | ListOf | TokenMap | Either | Record | Tagged


@dataclass(frozen=True)
class RequestShape:
    """Body of a request. Unknown fields with any value are dropped and counted. `required` must not be empty."""

    fields: Mapping[str, Shape]
    required: str


def record(*values: str, **fields: Shape) -> Record:
    """Declare an object. Fields that are given by name alone are leaves of the kind VALUE."""
    return Record(dict.fromkeys(values, Leaf.VALUE) | fields)


def text_or(items: Shape) -> Either:
    """Declare content: a string, or a list of `items`."""
    return Either(string=Leaf.TEXT, items=items)
