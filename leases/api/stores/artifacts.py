"""Artifacts of a lease: list, download, upload, delete."""

import re
import tempfile
from typing import Any
from uuid import UUID

from django.http import FileResponse, HttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.response import Response

from leases.api.base import schema
from leases.api.base.pagination import parse_limit
from leases.api.base.parsers import StreamParser
from leases.api.base.views import ApiRequest
from leases.api.stores.base import StoreApiView, parse_name_cursor, validate_name
from leases.errors import InvalidRequest
from sandboxes.db import database_time
from sandboxes.db.clock import format_timestamp
from sandboxes.state.uploads import ContentUploads
from sandboxes.stores.artifacts import Artifact
from sandboxes.stores.limits import DEFAULT_LIMITS, MEDIA_TYPE_PATTERN

MAX_IN_MEMORY_BYTES = 1 << 20  # size of an artifact; larger artifacts are spooled to a temporary file
ANY_MEDIA_TYPE = "*/*"


class ArtifactSerializer(serializers.Serializer):
    name = serializers.CharField()
    media_type = serializers.CharField()
    size_bytes = serializers.IntegerField()
    sha256 = serializers.CharField()
    stored_at = serializers.DateTimeField()
    actor = serializers.CharField(help_text="API key that stored the artifact.")


class ArtifactListView(StoreApiView):
    @extend_schema(
        operation_id="leases_artifacts_list",
        summary="List artifacts",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(ArtifactSerializer), 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return the artifacts of a lease, by name. The newest 1000 artifacts are kept, at most 1 GiB."""
        artifacts, more = self.open_for_reading().artifacts.page(after=parse_name_cursor(request), limit=parse_limit(request))
        return self.build_page(artifacts, more, serialize_artifact, "name")


class ArtifactView(StoreApiView):
    parser_classes = [StreamParser]
    max_body_bytes = DEFAULT_LIMITS.max_artifact_bytes

    @extend_schema(
        operation_id="leases_artifacts_get",
        summary="Download an artifact",
        responses={(200, ANY_MEDIA_TYPE): OpenApiTypes.BINARY} | schema.build_responses(None, 404, ok=()),
    )
    def get(self, request: ApiRequest, pk: UUID, name: str) -> FileResponse:
        """Return the content of one artifact with its stored media type. The ETag is its SHA-256."""
        content = tempfile.SpooledTemporaryFile(MAX_IN_MEMORY_BYTES)  # noqa: SIM115 - the response closes it
        try:
            artifact = self.open_for_reading().artifacts.fetch(validate_name(name), content)  # type: ignore[arg-type]
            if artifact is None:
                raise NotFound("There is no such artifact.")
        except BaseException:
            content.close()
            raise
        headers = {"X-Content-Type-Options": "nosniff", "ETag": f'"{artifact.sha256}"'}
        return FileResponse(content, as_attachment=True, filename=name, content_type=artifact.media_type, headers=headers)

    @extend_schema(
        operation_id="leases_artifacts_put",
        summary="Upload an artifact",
        request={ANY_MEDIA_TYPE: OpenApiTypes.BINARY},
        responses=schema.build_responses(ArtifactSerializer, 404, 410, 411, 413, 415, ok=(200, 201)),
    )
    def put(self, request: ApiRequest, pk: UUID, name: str) -> HttpResponse:
        """Create an artifact of at most 64 MiB (201), or replace the artifact with this name (200)."""
        self.require_active()
        media_type = request.META.get("CONTENT_TYPE") or schema.OCTET_STREAM
        if not re.fullmatch(MEDIA_TYPE_PATTERN, media_type, re.ASCII):
            raise InvalidRequest("Content-Type", "Not a media type.")
        with tempfile.SpooledTemporaryFile(MAX_IN_MEMORY_BYTES) as content:
            for chunk in request.data:
                content.write(chunk)
            content.seek(0)
            stored, replaced = self.open_for_writing().artifacts.put(
                validate_name(name),
                content,  # type: ignore[arg-type]
                claims=ContentUploads(database_time.now),
                media_type=media_type,
                now=database_time.now(),  # the body may have taken long
                actor=self.actor,
            )
        return Response(serialize_artifact(stored), status=200 if replaced else 201)

    @extend_schema(
        operation_id="leases_artifacts_delete",
        summary="Delete an artifact",
        responses=schema.build_responses(None, 404, 410, ok=(204,)),
    )
    def delete(self, request: ApiRequest, pk: UUID, name: str) -> HttpResponse:
        """Delete one artifact."""
        if not self.open_for_writing().artifacts.remove(validate_name(name), now=self.now):
            raise NotFound("There is no such artifact.")
        return HttpResponse(status=204)


def serialize_artifact(artifact: Artifact) -> dict[str, Any]:
    return {
        "name": artifact.name,
        "media_type": artifact.media_type,
        "size_bytes": artifact.size,
        "sha256": artifact.sha256,
        "stored_at": format_timestamp(artifact.at),
        "actor": artifact.actor,
    }
