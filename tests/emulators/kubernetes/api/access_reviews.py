"""SelfSubjectAccessReview, in JSON and in the protobuf encoding that kubectl uses for it."""

import json

from tests.emulators.kubernetes.api import protobuf
from tests.emulators.kubernetes.api.authorization import Attributes, Authorizer
from tests.emulators.kubernetes.api.resources import ACCESS_REVIEWS
from tests.emulators.kubernetes.api.server import Request, Response, as_json
from tests.emulators.kubernetes.api.status import ApiError


def review(authorizer: Authorizer, user: str, request: Request) -> Response:
    """Answer with the permission of the user."""
    is_protobuf = request.body.startswith(protobuf.MAGIC)
    spec = (
        {"resourceAttributes": protobuf.parse_resource_attributes(request.body)}
        if is_protobuf
        else json.loads(request.body)["spec"]
    )
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
