"""Fields of requests: what they take, and what is wrong with the rest."""

import base64
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.core.validators import RegexValidator
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from leases.errors import Invalid, TooLarge
from leases.models import DID, DID_ACCEPTS
from sandboxes.db import durations

LONGEST_TTL = int(durations.LONGEST.total_seconds())
LARGEST_COMMAND = 128 << 10  # bytes of argv, and of env: Linux takes no longer string, and twice this always fits
ENCODINGS = ("utf-8", "base64")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
RESERVED = ("LEASEHOLD_", "LLM_SOCKET")  # what tells programs in a sandbox where they are


class Text(serializers.CharField):
    """A JSON string as it is: nothing is trimmed, and a number is none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"trim_whitespace": False, **options})

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class Matching(Text):
    def __init__(self, pattern: str, accepts: str, **options: Any) -> None:
        validators = [RegexValidator(rf"\A{pattern}\Z", f"Not {accepts}.")]
        super().__init__(**{"validators": validators, **options})


class Whole(serializers.IntegerField):
    """A JSON integer: not a string of digits, not true, not 1.0."""

    def to_internal_value(self, data: Any) -> int:
        if isinstance(data, bool) or not isinstance(data, int):
            self.fail("invalid")
        return data


@extend_schema_field({"oneOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": ["5m", "30s"]}]})
class Duration(serializers.Field):
    def to_internal_value(self, data: Any) -> timedelta:
        try:
            return durations.parse(data)
        except ValueError as wrong:
            raise serializers.ValidationError(f"{wrong}.") from None


@extend_schema_field({"type": "object", "additionalProperties": True})
class Document(serializers.Field):
    def to_internal_value(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise serializers.ValidationError("A JSON object.")
        return data


@extend_schema_field({"type": "string"})
class Input(serializers.Field):
    """Any string at all: it is not stored."""

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            raise serializers.ValidationError("A string.")
        return data


@extend_schema_field({"type": "array", "items": {"type": "string"}, "minItems": 1})
class Words(serializers.Field):
    """What execve takes: strings without NUL, not too long, the first being the program."""

    def to_internal_value(self, data: Any) -> list[str]:
        if not isinstance(data, list) or not all(isinstance(word, str) and "\0" not in word for word in data):
            raise serializers.ValidationError("A list of strings without NUL.")
        if not data or not data[0]:
            raise serializers.ValidationError("The first element names a program.")
        _fits("argv", data)
        return data


@extend_schema_field({"type": "object", "additionalProperties": {"type": "string"}})
class Variables(serializers.Field):
    def to_internal_value(self, data: Any) -> dict[str, str]:
        if not isinstance(data, dict) or any(not isinstance(value, str) or "\0" in value for value in data.values()):
            raise serializers.ValidationError("An object of strings without NUL.")
        for name in data:
            if not ENV_NAME.fullmatch(name):
                raise serializers.ValidationError(f"{name[:40]!r} is not a name of letters, digits and _.")
            if name.startswith(RESERVED):
                raise serializers.ValidationError(f"{name[:40]} is reserved.")
        _fits("env", [*data, *data.values()])
        return data


def _fits(field: str, words: list[str]) -> None:
    if sum(len(word.encode()) + 1 for word in words) > LARGEST_COMMAND:
        raise TooLarge(f"{field} has at most {LARGEST_COMMAND} bytes.", field=field)


def did() -> Matching:
    return Matching(DID, DID_ACCEPTS, max_length=255)


def seconds(**options: Any) -> Whole:
    return Whole(min_value=1, max_value=LONGEST_TTL, required=False, allow_null=True, **options)


def encoded(output: bytes, encoding: str) -> str:
    return base64.b64encode(output).decode() if encoding == "base64" else output.decode("utf-8", "replace")


def decoded(text: str, encoding: str, field: str) -> bytes:
    if encoding != "base64":
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise Invalid(field, "Not base64.") from None


def span(said: Mapping[str, Any], name: str) -> timedelta | None:
    """A duration given in whole seconds, None if it was not."""
    return timedelta(seconds=said[name]) if said.get(name) else None
