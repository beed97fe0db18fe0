"""OpenAPI parts shared by the operations: parameters, headers, responses, security scheme."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension, OpenApiSerializerExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import build_bearer_security_scheme_object
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, inline_serializer
from rest_framework import serializers
from rest_framework.views import APIView

from leases.api.base.fields import ENCODINGS
from leases.api.base.problems import ProblemSerializer
from leases.models import LeaseStatus
from sandboxes.inventory.entries import Finding

OCTET_STREAM, PROBLEM_JSON = "application/octet-stream", "application/problem+json"
TAR_MEDIA_TYPE = "application/x-tar"
BINARY_BODY, TAR_BODY = {OCTET_STREAM: OpenApiTypes.BINARY}, {TAR_MEDIA_TYPE: OpenApiTypes.BINARY}
COMMON_ERROR_STATUSES = (400, 401, 403, 405, 500, 503)


def _build_query_parameter(name: str, description: str, **options: Any) -> OpenApiParameter:
    return OpenApiParameter(name, options.pop("type", str), OpenApiParameter.QUERY, description=description, **options)


def _build_response_header(
    name: str, description: str, *, statuses: Sequence[int] = (200, 206), **options: Any
) -> OpenApiParameter:
    return OpenApiParameter(name, str, OpenApiParameter.HEADER, description=description, response=[*statuses], **options)


IDEMPOTENCY_KEY_PARAMETER = OpenApiParameter(
    "Idempotency-Key",
    str,
    OpenApiParameter.HEADER,
    description="1 to 255 visible ASCII characters. A repeated request with the same key receives the stored response, "
    "with the header `Idempotent-Replayed: true`. Only successful responses are stored. An error frees the key, unless a "
    "command may have started: the repeated request is then answered 409 `outcome_unknown`.",
)
PAGE_PARAMETERS = [
    _build_query_parameter("cursor", "Cursor of the page. Contained in the URL in `next`."),
    _build_query_parameter("limit", "Results per page, 1 to 200. Default: 50.", type=int),
]
LEASE_FILTER_PARAMETERS = [
    _build_query_parameter("agent_did", "Only leases of this agent."),
    _build_query_parameter("environment_id", "Only leases in this environment."),
    _build_query_parameter("status", "Only leases with this status.", enum=LeaseStatus.values),
]
ENVIRONMENT_FILTER_PARAMETERS = [
    _build_query_parameter("type", "Only environments of this type."),
    _build_query_parameter("open", "1: only environments that have not ended; 0: only ended ones.", enum=["0", "1"]),
]
ENCODING_PARAMETER = _build_query_parameter(
    "encoding", "Encoding of input and output. utf-8 replaces invalid bytes, base64 is exact. Default: utf-8.", enum=ENCODINGS
)
FINDING_PARAMETER = _build_query_parameter(
    "finding", "Only sandboxes with this finding.", enum=[finding.value for finding in Finding]
)
RATED_MODEL_PARAMETER = _build_query_parameter("model", "Name of a model: only the rates that price it now.")
QUOTA_AGENT_PARAMETER = _build_query_parameter("agent_did", "Only the quotas of this agent. Default: all agents of the key.")
QUEUED_AGENT_PARAMETER = _build_query_parameter("agent_did", "Agent of the join.", required=True)
LOG_PARAMETERS = [
    _build_query_parameter("start", "Offset of the first byte to return. Default: 0.", type=int),
    _build_query_parameter("length", "Maximum number of bytes, 1 to 1048576. Default: 65536.", type=int),
    _build_query_parameter(
        "wait_for", "Literal text: respond once it has been printed at or after `start`, or after `wait_seconds`."
    ),
    _build_query_parameter("wait_seconds", "Maximum time to wait for `wait_for`, 1 to 300. Default: 30.", type=int),
]
ROOT_PARAMETER = _build_query_parameter(
    "root", "Base directory of the path: /workspace or /data. Default: workspace.", enum=["workspace", "data"]
)
DIRECTORY_PARAMETER = _build_query_parameter("path", "Path of a directory, relative to the root. Default: the root.")
WATCHED_PARAMETER = _build_query_parameter(
    "path", "Path of the watched directory, relative to the root. Default: the root itself."
)
DEEP_PARAMETER = _build_query_parameter("deep", "1: recursive; 0: only the directory itself. Default: 0.", enum=["0", "1"])
COMPRESSION_PARAMETER = _build_query_parameter(
    "compression", "Compression of the archive. Default: gzip if `Accept` names application/gzip, else none.",
    enum=["none", "gzip"],
)  # fmt: skip
SOURCE_HEADER = _build_response_header(
    "Leasehold-Source", "Origin of the response: the awake sandbox or stored state.", enum=["sandbox", "snapshot"]
)
FILE_HEADERS = [
    SOURCE_HEADER,
    _build_response_header("Accept-Ranges", "Always `bytes`."),
    _build_response_header("Content-Range", "Range of the returned bytes and size of the file.", statuses=[206]),
]


def build_responses(body: Any, *errors: int, ok: tuple[int, ...] = (200,)) -> dict[Any, Any]:
    """Return the responses of one operation: `body` for each status in `ok`, a problem document for each error."""
    media_type = next(iter(body)) if isinstance(body, dict) else None  # BINARY_BODY or TAR_BODY
    successes = {(status, media_type) if media_type else status: OpenApiTypes.BINARY if media_type else body for status in ok}
    problems = {
        (status, PROBLEM_JSON): OpenApiResponse(ProblemSerializer, description=HTTPStatus(status).phrase)
        for status in sorted({*COMMON_ERROR_STATUSES, *errors})
    }
    return successes | problems


def build_page_serializer(item: type[serializers.Serializer]) -> serializers.Serializer:
    return inline_serializer(
        f"PageOf{item.__name__}",
        {"results": item(many=True), "next": serializers.CharField(allow_null=True, help_text="URL of the next page.")},
    )


def find_operation_id(view: APIView, method: str) -> str:
    """Return the id of the operation that serves requests of a method, "" if the view has none."""
    handler = getattr(view, method.lower(), None)
    decorated = getattr(handler, "kwargs", {}).get("schema")  # set by extend_schema
    if decorated is None:
        return ""
    operation: AutoSchema = decorated()
    operation.view = view
    return str(operation.get_operation_id())


class ApiSchema(AutoSchema):
    """OpenAPI generator that tags operations by the first segment of their path."""

    def get_tags(self) -> list[str]:
        return [self.path.removeprefix("/api/v1/").split("/")[0]]


class StrictSerializerExtension(OpenApiSerializerExtension):
    target_class = "leases.api.base.fields.StrictSerializer"
    match_subclasses = True

    def map_serializer(self, auto_schema: AutoSchema, direction: Any) -> dict[str, Any]:
        mapped = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
        return {**mapped, "additionalProperties": False}


class KeyScheme(OpenApiAuthenticationExtension):
    target_class = "leases.api.base.authentication.KeyAuthentication"
    name = "key"

    def get_security_definition(self, auto_schema: AutoSchema) -> dict[str, Any]:
        return build_bearer_security_scheme_object(header_name="Authorization", token_prefix="Bearer")  # noqa: S106
