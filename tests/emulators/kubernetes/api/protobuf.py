"""The little protobuf that kubectl sends: access reviews, evictions, deletions, and namespaces and service accounts by name.

Other bodies in protobuf are refused with 415."""

from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\0"
MEDIA_TYPE = "application/vnd.kubernetes.protobuf"
RAW_FIELD = 2  # of runtime.Unknown
METADATA_FIELD = 1  # of all objects
METADATA_FIELDS = {1: "name", 3: "namespace"}
SPEC_FIELD, ATTRIBUTES_FIELD = 2, 1  # of SelfSubjectAccessReview, and of its specification
GRACE_FIELD, PRECONDITIONS_FIELD, UID_FIELD = 1, 2, 1  # of DeleteOptions
ATTRIBUTE_FIELDS = {1: "namespace", 2: "verb", 3: "group", 4: "version", 5: "resource", 6: "subresource", 7: "name"}


def parse_metadata(body: bytes) -> dict[str, str]:
    """Return name and namespace of an encoded object."""
    return _parse(body, (RAW_FIELD, METADATA_FIELD), METADATA_FIELDS)


def parse_resource_attributes(body: bytes) -> dict[str, str]:
    """Return the resource attributes of an encoded SelfSubjectAccessReview."""
    return _parse(body, (RAW_FIELD, SPEC_FIELD, ATTRIBUTES_FIELD), ATTRIBUTE_FIELDS)


def parse_delete_options(body: bytes) -> dict[str, Any]:
    """Return the grace period and the uid precondition of encoded DeleteOptions."""
    options = dict(_iterate_fields(dict(_iterate_fields(body.removeprefix(MAGIC))).get(RAW_FIELD, b"")))
    found: dict[str, Any] = {"gracePeriodSeconds": options[GRACE_FIELD]} if GRACE_FIELD in options else {}
    uid = dict(_iterate_fields(options.get(PRECONDITIONS_FIELD, b""))).get(UID_FIELD, b"")
    return found | ({"preconditions": {"uid": uid.decode()}} if uid else {})


def _parse(body: bytes, path: tuple[int, ...], names: dict[int, str]) -> dict[str, str]:
    content = body.removeprefix(MAGIC)
    for number in path:
        content = dict(_iterate_fields(content)).get(number, b"")
    fields = dict(_iterate_fields(content))
    return {name: fields[number].decode() for number, name in names.items() if fields.get(number)}


def _iterate_fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, bytes or number) of the fields of a message, which are of variable length."""
    position = 0
    while position < len(content):
        tag, position = _read_number(content, position)
        number, position = _read_number(content, position)
        if tag & 7 == 2:
            yield tag >> 3, content[position : position + number]
            position += number
        else:
            yield tag >> 3, number


def _read_number(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
