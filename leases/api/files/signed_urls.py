"""Signed URLs of files: creation, and the requests that they permit."""

from datetime import timedelta
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import NotAuthenticated
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response

from leases.api.base import schema
from leases.api.base.authentication import Caller
from leases.api.base.fields import AnyStringField, StrictIntegerField, StrictSerializer
from leases.api.base.permissions import HasKey
from leases.api.base.views import ApiRequest
from leases.api.files.base import ROOTS, FileApiView
from leases.api.files.content import MAX_FILE_BYTES, FileView
from leases.api.files.operations import RootField, resolve_path
from leases.grants import file_urls
from leases.grants.file_urls import MAX_LIFETIME, METHODS, FileGrant
from sandboxes.db import database_time
from sandboxes.db.clock import format_timestamp

SIGNED_FILES_PATH = "/api/v1/signed-files"
TOKEN_PARAMETER = "token"  # noqa: S105 - the name of a query parameter
RESPONSE_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
MAX_LIFETIME_SECONDS = int(MAX_LIFETIME.total_seconds())


class NewFileUrlSerializer(StrictSerializer):
    root = RootField()  # type: ignore[assignment]
    path = AnyStringField(help_text="Path of the file, relative to the root.")
    method = serializers.ChoiceField(METHODS, help_text="GET downloads the file, PUT creates or replaces it.")
    expires_seconds = StrictIntegerField(min_value=1, max_value=MAX_LIFETIME_SECONDS, default=3600)
    max_bytes = StrictIntegerField(
        min_value=0, max_value=MAX_FILE_BYTES, default=MAX_FILE_BYTES, help_text="Maximum size of the body of a PUT."
    )


class FileUrlSerializer(serializers.Serializer):
    url = serializers.CharField(help_text="Secret: permits the request without an API key.")
    method = serializers.ChoiceField(METHODS)
    expires_at = serializers.DateTimeField(help_text="Latest time of use. The URL ends earlier with its lease or key.")


NEW_FILE_URL_SERIALIZER = NewFileUrlSerializer()


class FileUrlListView(FileApiView):
    @extend_schema(
        operation_id="leases_files_urls",
        summary="Create a signed URL of a file",
        request=NewFileUrlSerializer,
        responses=schema.build_responses(FileUrlSerializer, 404, 410, 413, 415, ok=(201,)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Create a URL with which one file is downloaded or uploaded without an API key, for at most a day.

        The URL is bound to the lease, the path, the method and `max_bytes`. It ends with the lease, or when the key that
        created it is revoked or expires. Each call creates a new URL: an Idempotency-Key has no effect, since URLs are not
        stored. The lease is not renewed, and no sandbox is started."""
        data = self.validate_body(NEW_FILE_URL_SERIALIZER)
        root = ROOTS[data["root"]]
        resolve_path("path", root, data["path"])
        expires_at = (self.now + timedelta(seconds=data["expires_seconds"])).replace(microsecond=0)
        issuer = self.caller.issuer
        grant = FileGrant(
            pk, root, data["path"], data["method"], data["max_bytes"], issuer.pk, issuer.secret, expires_at
        )  # fmt: skip
        query = urlencode({TOKEN_PARAMETER: file_urls.sign_grant(grant, now=self.now)})
        url = request.build_absolute_uri(f"{SIGNED_FILES_PATH}?{query}")
        document = {"url": url, "method": grant.method, "expires_at": format_timestamp(expires_at)}
        return Response(document, status=201, headers={"Cache-Control": "no-store"})


class SignedUrlAuthentication(BaseAuthentication):
    """Authentication by the token of a signed URL. `request.user` is the Caller of its key, `request.auth` the FileGrant."""

    def authenticate(self, request: Request) -> tuple[Caller, FileGrant]:
        token = request.GET.get(TOKEN_PARAMETER)
        if token is None:
            raise NotAuthenticated("Use the URL as it was created, with its token.")
        grant, key = file_urls.verify_token(token, request.method or "", now=database_time.now())
        return Caller(key, grant.issuer), grant

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="leasehold"'


class SignedUrlScheme(OpenApiAuthenticationExtension):
    target_class = "leases.api.files.signed_urls.SignedUrlAuthentication"
    name = "signedUrl"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        return {"type": "apiKey", "in": "query", "name": TOKEN_PARAMETER}


class CanAccessGrantedLease(BasePermission):
    """The key may still act for the agent of the lease. Sets `view.lease` and the body limit. Raises NotFound otherwise."""

    def has_permission(self, request: Any, view: Any) -> bool:
        view.lease = request.user.get_lease(request.auth.lease_id)
        view.max_body_bytes = request.auth.max_bytes
        return True


class SignedFileView(FileView):
    authentication_classes = [SignedUrlAuthentication]
    permission_classes = [HasKey, CanAccessGrantedLease]

    http_method_names = ["get", "head", "put"]

    @property
    def default_response_headers(self) -> dict[str, str]:
        return RESPONSE_HEADERS

    @property
    def grant(self) -> FileGrant:
        return self.request.auth  # type: ignore[return-value]

    def require_key(self) -> None:
        """Also raise SignedUrlExpired if the URL has expired since the request arrived."""
        file_urls.require_current(self.grant, now=database_time.now())
        super().require_key()

    @extend_schema(
        operation_id="signed_files_get",
        summary="Download a file by a signed URL",
        parameters=schema.FILE_HEADERS,
        responses=schema.build_responses(schema.BINARY_BODY, 402, 404, 409, 410, 413, 416, 429, ok=(200, 206)),
    )
    def get(self, request: ApiRequest, pk: Any = None, path: str = "") -> HttpResponse:
        """Like `GET /leases/{id}/files/{path}` for the file of the URL. The lease is renewed and metered in the same way."""
        return self.send_file(request, self.grant.lease_id, self.grant.root, self.grant.path)

    def head(self, request: ApiRequest, pk: Any = None, path: str = "") -> HttpResponse:
        return self.send_size(self.grant.lease_id, self.grant.root, self.grant.path)

    @extend_schema(
        operation_id="signed_files_put",
        summary="Upload a file by a signed URL",
        request=schema.BINARY_BODY,
        responses=schema.build_responses(None, 402, 404, 409, 410, 411, 413, 415, 429, ok=(204,)),
    )
    def put(self, request: ApiRequest, pk: Any = None, path: str = "") -> HttpResponse:
        """Create or replace the file of the URL, with at most its `max_bytes`."""
        return self.receive_file(request, self.grant.lease_id, self.grant.root, self.grant.path)
