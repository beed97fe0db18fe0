"""OpenAPI schema parts."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import build_bearer_security_scheme_object
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, inline_serializer
from rest_framework import serializers

from leases.api.fields import ENCODINGS
from leases.api.problems import ProblemSerializer
from leases.models import LeaseStatus

OCTET_STREAM, PROBLEM_JSON = "application/octet-stream", "application/problem+json"


TAR_MEDIA_TYPE = "application/x-tar"


BINARY_BODY, TAR_BODY = {OCTET_STREAM: OpenApiTypes.BINARY}, {TAR_MEDIA_TYPE: OpenApiTypes.BINARY}


COMMON_ERROR_STATUSES = (400, 401, 403, 405, 500, 503)


def _build_query_parameter(name: str, description: str, **options: Any) -> OpenApiParameter:
    return OpenApiParameter(name, options.pop("type", str), OpenApiParameter.QUERY, description=description, **options)


def _build_response_header(
    name: str, description: str, *, statuses: Sequence[int] = (200, 206), **options: Any
) -> OpenApiParameter:
    """A header of answers."""
    return OpenApiParameter(name, str, OpenApiParameter.HEADER, description=description, response=[*statuses], **options)


IDEMPOTENCY_KEY_PARAMETER = OpenApiParameter(
    "Idempotency-Key",
    str,
    OpenApiParameter.HEADER,
    description="1 to 255 visible ASCII characters. Sent again with the same request, it is answered as before, "
    "with the header `Idempotent-Replayed: true`. Only successes are kept; an error frees the key.",
)


PAGE_PARAMETERS = [
    _build_query_parameter("cursor", "Where the page starts; follow `next` rather than write it."),
    _build_query_parameter("limit", "1 to 200 results a page; 50 if it is not given.", type=int),
]


LEASE_FILTER_PARAMETERS = [
    _build_query_parameter("agent_did", "Of this agent only."),
    _build_query_parameter("environment_id", "In this environment only."),
    _build_query_parameter("status", "In this status only.", enum=LeaseStatus.values),
]


ENCODING_PARAMETER = _build_query_parameter(
    "encoding", "Of input and output: utf-8 replaces what is none, base64 is exact.", enum=ENCODINGS
)


QUOTA_AGENT_PARAMETER = _build_query_parameter(
    "agent_did", "Whose quotas are shown; if it is not given, those of all agents the key names."
)


LOG_PARAMETERS = [
    _build_query_parameter("start", "Offset of the first byte that is asked for; 0 if it is not given.", type=int),
    _build_query_parameter("length", "1 to 1048576 bytes; 65536 if it is not given.", type=int),
    _build_query_parameter(
        "wait_for", "Text: answer once it was printed at or after `start`, or when the time is up. No pattern."
    ),
    _build_query_parameter("wait_seconds", "How long to wait for that text: 1 to 300; 30 if it is not given.", type=int),
]


ROOT_PARAMETER = _build_query_parameter(
    "root", "What the path is relative to; workspace if it is not given.", enum=["workspace", "data"]
)


DIRECTORY_PARAMETER = _build_query_parameter("path", "Of a directory, relative to the root. Not given: the root itself.")


DEEP_PARAMETER = _build_query_parameter(
    "deep", "1: also what is in the directories below; 0, also if it is not given: only its own.", enum=["0", "1"]
)


SOURCE_HEADER = _build_response_header("Leasehold-Source", "Where the answer comes from.", enum=["sandbox", "snapshot"])


FILE_HEADERS = [
    SOURCE_HEADER,
    _build_response_header("Accept-Ranges", "Always bytes."),
    _build_response_header("Content-Range", "Which bytes of how many these are.", statuses=[206]),
]


def build_responses(body: Any, *errors: int, ok: tuple[int, ...] = (200,)) -> dict[Any, Any]:
    """The responses of one operation: its body when it succeeds, and a problem document for each error it may have."""
    kind = next(iter(body)) if isinstance(body, dict) else None  # BYTES or TAR
    good = {(status, kind) if kind else status: OpenApiTypes.BINARY if kind else body for status in ok}
    bad = {
        (status, PROBLEM_JSON): OpenApiResponse(ProblemSerializer, description=HTTPStatus(status).phrase)
        for status in sorted({*COMMON_ERROR_STATUSES, *errors})
    }
    return good | bad


def build_page_serializer(item: type[serializers.Serializer]) -> serializers.Serializer:
    return inline_serializer(
        f"PageOf{item.__name__}",
        {"results": item(many=True), "next": serializers.CharField(allow_null=True, help_text="URL of the next page.")},
    )


class ApiSchema(AutoSchema):
    def get_tags(self) -> list[str]:
        return [self.path.removeprefix("/api/v1/").split("/")[0]]


class KeyScheme(OpenApiAuthenticationExtension):
    target_class = "leases.api.authentication.KeyAuthentication"
    name = "key"

    def get_security_definition(self, auto_schema: AutoSchema) -> dict[str, Any]:
        return build_bearer_security_scheme_object(header_name="Authorization", token_prefix="Bearer")  # noqa: S106
