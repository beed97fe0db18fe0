"""Serializer fields and query parameters of requests."""

import base64
import re
import uuid
from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal
from typing import Any, Protocol

from django.core.validators import RegexValidator
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.serializers import Serializer

from leases import run_ids
from leases.errors import InvalidRequest, RequestTooLarge
from leases.models import DID_DESCRIPTION, DID_PATTERN
from sandboxes.db import durations
from sandboxes.failed_by import FailedBy

MAX_TTL_SECONDS = int(durations.MAX_DURATION.total_seconds())
MAX_NAMED_AGENTS = 100  # in one request
MAX_COMMAND_BYTES = (
    128 << 10
)  # of argv and of env each: limit of Linux for a single string; both together fit into its limit for execve
MAX_REPORTED_FIELDS = 50  # unknown fields of one object: a response does not repeat megabytes of the request
FAILED_BY_HELP = (
    "Origin of the failure. task: the command, its input or the request; infrastructure: the control plane, a host, the "
    "provider or the store; limit: a budget, a quota, a policy or a clock of the lease; interruption: a client, an operator or "
    "the end of the environment. Null: not ended, or not failed."
)
ENCODINGS = ("utf-8", "base64")
ENV_NAME_RE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
RESERVED_ENV_PREFIXES = ("LEASEHOLD_", "LLM_SOCKET")  # set by the control plane


# Base of request bodies. Unknown fields are rejected: a misspelt option must not be taken for its default. Not a docstring,
# which would become the description of each subclass in the OpenAPI document.
class StrictSerializer(serializers.Serializer):
    def to_internal_value(self, data: Any) -> dict[str, Any]:
        unknown: dict[str, Any] = {}
        if isinstance(data, dict) and (names := data.keys() - self.fields.keys()):
            unknown = dict.fromkeys(sorted(names)[:MAX_REPORTED_FIELDS], "Unknown field.")
        try:
            value: dict[str, Any] = super().to_internal_value(data)
        except ValidationError as error:
            raise ValidationError({**error.detail, **unknown} if unknown else error.detail) from None  # type: ignore[dict-item]
        if unknown:
            raise ValidationError(unknown)
        return value


class StrictCharField(serializers.CharField):
    """JSON string, not trimmed. Numbers are not converted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"trim_whitespace": False, **options})

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class PatternField(StrictCharField):
    """JSON string that matches a pattern. The error message is "Not <description>."."""

    def __init__(self, pattern: str, description: str, **options: Any) -> None:
        message = f"Not {description}.".replace("%", "%%")  # DRF %-formats the message of a validator
        validators = [RegexValidator(rf"\A{pattern}\Z", message)]
        super().__init__(**{"validators": validators, **options})


class StrictIntegerField(serializers.IntegerField):
    """JSON integer. Rejects digit strings, booleans and 1.0."""

    def to_internal_value(self, data: Any) -> int:
        if isinstance(data, bool) or not isinstance(data, int):
            self.fail("invalid")
        return data


@extend_schema_field({"type": "string"})
class DecimalStringField(serializers.DecimalField):
    """Decimal number in a JSON string. JSON numbers are floats to many clients, and are rejected."""

    def to_internal_value(self, data: Any) -> Decimal:
        if not isinstance(data, str):
            raise serializers.ValidationError("Must be a decimal number in a string.")
        return super().to_internal_value(data)


@extend_schema_field({"type": "boolean"})
class StrictBooleanField(serializers.Field):
    """JSON true or false. Strings and numbers are not converted."""

    def to_internal_value(self, data: Any) -> bool:
        if not isinstance(data, bool):
            raise serializers.ValidationError("Must be true or false.")
        return data


class StrictUUIDField(serializers.UUIDField):
    """UUID in a JSON string. Numbers are not converted."""

    def to_internal_value(self, data: Any) -> uuid.UUID:
        if not isinstance(data, str):
            self.fail("invalid", value=data)
        return super().to_internal_value(data)


class RunIdField(StrictUUIDField):
    """Id that a caller chooses for its run."""

    def __init__(self, help_text: str = "", **options: Any) -> None:
        text = "Id of the run: a random UUID (version 4 or 7). Replaces an Idempotency-Key, for as long as the run is kept."
        super().__init__(required=False, allow_null=True, help_text=" ".join(filter(None, [text, help_text])), **options)

    def to_internal_value(self, data: Any) -> uuid.UUID:
        value = super().to_internal_value(data)
        if not run_ids.is_random(value):
            raise serializers.ValidationError("Must be a random UUID: version 4 or 7.")
        return value


@extend_schema_field({"oneOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": ["5m", "30s"]}]})
class DurationField(serializers.Field):
    def to_internal_value(self, data: Any) -> timedelta:
        try:
            return durations.parse_duration(data)
        except ValueError as error:
            raise serializers.ValidationError(f"{error}.") from None


@extend_schema_field({"type": "object", "additionalProperties": True})
class JsonObjectField(serializers.Field):
    def to_internal_value(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise serializers.ValidationError("Must be a JSON object.")
        return data


@extend_schema_field({})
class JsonField(serializers.Field):
    """Any JSON value, including null."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_null": True, **options})

    def to_internal_value(self, data: Any) -> Any:
        return data


@extend_schema_field({"type": "string"})
class AnyStringField(serializers.Field):
    """Any JSON string, without restrictions: the value is not stored in the database."""

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            raise serializers.ValidationError("Must be a string.")
        return data


@extend_schema_field({"type": "array", "items": {"type": "string"}, "minItems": 1})
class ArgvField(serializers.Field):
    """Argument vector for execve: strings without NUL, the program first, limited in total size."""

    def to_internal_value(self, data: Any) -> list[str]:
        if not isinstance(data, list) or not all(isinstance(word, str) and "\0" not in word for word in data):
            raise serializers.ValidationError("Must be a list of strings without NUL.")
        if not data or not data[0]:
            raise serializers.ValidationError("The first element must name a program.")
        _check_size("argv", data)
        return data


class FailedByField(serializers.ChoiceField):
    """Origin of a failure, in responses."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("choices", [origin.value for origin in FailedBy])
        options.setdefault("allow_null", True)
        options.setdefault("help_text", FAILED_BY_HELP)
        super().__init__(**options)


@extend_schema_field({"type": "object", "additionalProperties": {"type": "string"}})
class EnvField(serializers.Field):
    def to_internal_value(self, data: Any) -> dict[str, str]:
        if not isinstance(data, dict) or any(not isinstance(value, str) or "\0" in value for value in data.values()):
            raise serializers.ValidationError("Must be an object of strings without NUL.")
        for name in data:
            if not ENV_NAME_RE.fullmatch(name):
                raise serializers.ValidationError(
                    f"{name[:40]!r} must consist of letters, digits and _, and not begin with a digit."
                )
            if name.startswith(RESERVED_ENV_PREFIXES):
                raise serializers.ValidationError(f"{name[:40]} is reserved.")
        _check_size("env", [*data, *data.values()])
        return data


def _check_size(field: str, words: list[str]) -> None:
    if sum(len(word.encode()) + 1 for word in words) > MAX_COMMAND_BYTES:
        raise RequestTooLarge(f"{field} exceeds {MAX_COMMAND_BYTES} bytes.", field=field)


def build_did_field() -> PatternField:
    return PatternField(DID_PATTERN, DID_DESCRIPTION, max_length=255)


def build_project_field() -> PatternField:
    return PatternField(
        r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", required=False, help_text="Default: the default project."
    )


def build_agents_field(**options: Any) -> serializers.ListField:
    """Build the field of a list of at most MAX_NAMED_AGENTS DIDs. A repeated one counts once."""
    return serializers.ListField(child=build_did_field(), max_length=MAX_NAMED_AGENTS, **options)


def build_seconds_field(*, min_value: int = 1, **options: Any) -> StrictIntegerField:
    return StrictIntegerField(min_value=min_value, max_value=MAX_TTL_SECONDS, required=False, allow_null=True, **options)


def encode_output(output: bytes, encoding: str) -> str:
    return base64.b64encode(output).decode() if encoding == "base64" else output.decode("utf-8", "replace")


class OutputStreams(Protocol):
    """Output of a command, or its stored beginning."""

    @property
    def stdout(self) -> bytes: ...

    @property
    def stderr(self) -> bytes: ...


def encode_streams(output: OutputStreams, encoding: str) -> dict[str, str]:
    """Return the fields `stdout` and `stderr` of a document."""
    return {"stdout": encode_output(output.stdout, encoding), "stderr": encode_output(output.stderr, encoding)}


def decode_input(text: str, encoding: str, field: str) -> bytes:
    if encoding != "base64":
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise InvalidRequest(field, "Not base64.") from None


def seconds_to_timedelta(data: Mapping[str, Any], name: str) -> timedelta | None:
    """Return the duration that `data` gives in whole seconds under `name`, None if absent or null."""
    return timedelta(seconds=data[name]) if data.get(name) is not None else None


def parse_encoding(request: Request) -> str:
    encoding = request.GET.get("encoding", "utf-8")
    if encoding not in ENCODINGS:
        raise InvalidRequest("encoding", f"Must be one of {', '.join(ENCODINGS)}.")
    return encoding


def validate_url_value(serializer: Serializer, field: str, value: str) -> str:
    """Validate a value from the URL by the rules of a body field. ValidationError names the field."""
    try:
        return str(serializer.fields[field].run_validation(value))
    except ValidationError as error:
        raise ValidationError({field: error.detail}) from None
