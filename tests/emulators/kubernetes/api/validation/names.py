"""Names, labels and quantities."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from tests.emulators.kubernetes.api.status import cause

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # RFC 1123
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035
SUBDOMAIN = re.compile(rf"{LABEL.pattern}(\.{LABEL.pattern})*")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
QUALIFIED_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
FINALIZER_LIKE = re.compile(rf"{SUBDOMAIN.pattern}/{QUALIFIED_NAME.pattern}")
QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([EPTGMk]|[EPTGMK]i|m|u|n)|[eE]([+-]?\d+))?")
SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(10**3),
    **{letter: Decimal(10 ** (3 * power)) for power, letter in enumerate("MGTPE", 2)},
    **{f"{letter}i": Decimal(2 ** (10 * power)) for power, letter in enumerate("KMGTPE", 1)},
}  # fmt: skip
SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end "
    "with an alphanumeric character (e.g. 'example.com'"
)
MAX_ANNOTATIONS_BYTES = 256 << 10

Causes = list[dict[str, str]]


def parse_quantity(text: Any) -> Decimal:
    """Return the value of a quantity such as 250m, 1.5 or 512Mi. Raise ValueError."""
    match = QUANTITY.fullmatch(str(text))
    if match is None:
        raise ValueError(f"quantities must match the regular expression {QUANTITY.pattern!r}: {text!r}")
    number, suffix, exponent = match.groups()
    if exponent:
        return Decimal(number) * Decimal(10) ** int(exponent)
    return Decimal(number) * SUFFIXES.get(suffix, Decimal(1))


def check_name(pattern: re.Pattern[str], limit: int, value: Any, field: str, rule: str = "") -> Causes:
    text = str(value)
    if len(text) > limit:
        return [cause(field, f'Invalid value: "{text}": must be no more than {limit} bytes')]
    if not pattern.fullmatch(text):
        regex = f"regex used for validation is '{pattern.pattern}'"
        return [cause(field, f'Invalid value: "{text}": ' + (f"{rule}, {regex})" if rule else regex))]
    return []


def check_label(value: Any, field: str) -> Causes:
    return check_name(LABEL, 63, value, field)


def check_subdomain(value: Any, field: str) -> Causes:
    return check_name(SUBDOMAIN, 253, value, field, SUBDOMAIN_RULE)


def check_qualified_key(key: str, field: str) -> Causes:
    """Return the causes for a key of a label or annotation: an optional DNS name and a slash, and a name of at most 63."""
    prefix, slash, name = key.rpartition("/")
    return [*(check_subdomain(prefix, field) if slash else ()), *check_name(QUALIFIED_NAME, 63, name, field)]


def check_labels(labels: Mapping[str, Any] | None, field: str) -> Causes:
    found = []
    for key, value in (labels or {}).items():
        found += [*check_qualified_key(key, field), *check_name(LABEL_VALUE, 63, value, field)]
    return found


def check_annotations(annotations: Mapping[str, Any] | None, field: str) -> Causes:
    found = [one for key in annotations or {} for one in check_qualified_key(key.lower(), field)]
    size = sum(len(key.encode()) + len(str(value).encode()) for key, value in (annotations or {}).items())
    if size > MAX_ANNOTATIONS_BYTES:
        found.append(cause(field, f"Too long: may not be more than {MAX_ANNOTATIONS_BYTES} bytes", "FieldValueTooLong"))
    return found


def check_enum(value: Any, allowed: tuple[str, ...], field: str) -> Causes:
    """Return the cause for a value that is neither absent nor one of the allowed ones."""
    if value in {None, ""} or value in allowed:
        return []
    listed = ", ".join(f'"{one}"' for one in allowed)
    return [cause(field, f'Unsupported value: "{value}": supported values: {listed}', "FieldValueNotSupported")]


def check_quantity(value: Any, field: str) -> Causes:
    try:
        negative = parse_quantity(value) < 0
    except ValueError as failed:
        return [cause(field, str(failed))]
    return [cause(field, f'Invalid value: "{value}": must be greater than or equal to 0')] if negative else []


def check_integer(value: Any, low: int, high: int, field: str) -> Causes:
    """Return the cause for an integer outside of its range. An absent one is valid."""
    if value is None or low <= value <= high:
        return []
    return [cause(field, f"Invalid value: {value}: must be between {low} and {high}, inclusive")]


def check_duplicates(values: list[str], field: str) -> Causes:
    """Return the causes for values that occur before. `field` has a place for the index: spec.volumes[{}].name."""
    return [
        cause(field.format(index), f'Duplicate value: "{value}"', "FieldValueDuplicate")
        for index, value in enumerate(values)
        if value in values[:index]
    ]
