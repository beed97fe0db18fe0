"""SelfSubjectAccessReview, in JSON and in the protobuf encoding that kubectl uses for it."""

import json
from collections.abc import Iterator
from typing import Any

from tests.emulators.kubernetes.api.authorization import Attributes, Authorizer
from tests.emulators.kubernetes.api.resources import ACCESS_REVIEWS
from tests.emulators.kubernetes.api.server import Request, Response, as_json
from tests.emulators.kubernetes.api.status import ApiError

PROTOBUF_MAGIC = b"k8s\0"
# Field numbers: runtime.Unknown.raw, SelfSubjectAccessReview.spec, its resourceAttributes, and those of ResourceAttributes
RAW_FIELD, SPEC_FIELD, ATTRIBUTES_FIELD = 2, 2, 1
ATTRIBUTE_FIELDS = {1: "namespace", 2: "verb", 3: "group", 4: "version", 5: "resource", 6: "subresource", 7: "name"}


def review(authorizer: Authorizer, user: str, request: Request) -> Response:
    """Answer with the permission of the user."""
    is_protobuf = request.body.startswith(PROTOBUF_MAGIC)
    spec = {"resourceAttributes": _parse_protobuf(request.body)} if is_protobuf else json.loads(request.body)["spec"]
    asked = spec.get("resourceAttributes")
    if asked is None:
        raise ApiError(422, "spec.resourceAttributes: Required value")
    attributes = Attributes(
        asked.get("namespace", ""), asked.get("verb", ""), asked.get("group", ""), asked.get("resource", ""),
        asked.get("subresource", ""), asked.get("name", ""),
    )  # fmt: skip
    status = {"allowed": authorizer.is_allowed(user, attributes)}
    head = {"kind": ACCESS_REVIEWS.kind, "apiVersion": ACCESS_REVIEWS.api_version, "metadata": {}}
    return as_json({**head, "spec": spec, "status": status}, 201)


def _parse_protobuf(body: bytes) -> dict[str, str]:
    """Return the resource attributes of an encoded review."""
    content = body.removeprefix(PROTOBUF_MAGIC)
    for number in (RAW_FIELD, SPEC_FIELD, ATTRIBUTES_FIELD):
        content = dict(_iterate_fields(content)).get(number, b"")
    fields = dict(_iterate_fields(content))
    return {name: fields[number].decode() for number, name in ATTRIBUTE_FIELDS.items() if fields.get(number)}


def _iterate_fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, bytes) of the length-delimited fields of a message. Others are skipped."""
    position = 0
    while position < len(content):
        tag, position = _read_number(content, position)
        length, position = _read_number(content, position)
        if tag & 7 == 2:
            yield tag >> 3, content[position : position + length]
            position += length


def _read_number(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
