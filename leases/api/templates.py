"""Image templates: list, build, get, remove."""

from typing import Any
from uuid import UUID

from django.db import transaction
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases import tasks
from leases.api.base import schema
from leases.api.base.fields import StrictBooleanField, StrictCharField, StrictSerializer
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.pagination import paginate
from leases.api.base.permissions import HasKey, ManagesTemplates
from leases.api.base.views import ApiRequest, ApiView
from sandboxes.db.clock import format_optional_timestamp, format_timestamp
from sandboxes.errors import TemplateNotFound
from sandboxes.models import ImageTemplate, TemplateFailure, TemplateState
from sandboxes.templates import builds
from sandboxes.templates.specifications import MAX_COMMAND_CHARS, MAX_COMMANDS, MAX_DOCKERFILE_CHARS

MAX_BODY_BYTES = 4 * (MAX_COMMANDS * MAX_COMMAND_CHARS + MAX_DOCKERFILE_CHARS)  # UTF-8 and JSON escapes


class NewTemplateSerializer(StrictSerializer):
    name = StrictCharField(max_length=63, help_text="Lower-case letters, digits and hyphens.")
    base = StrictCharField(
        required=False, max_length=255, help_text="Image that the commands extend. Default: the sandbox image."
    )
    commands = serializers.ListField(
        required=False, child=StrictCharField(max_length=MAX_COMMAND_CHARS), max_length=MAX_COMMANDS, allow_empty=False,
        help_text="Shell commands, run as root in this order.",
    )  # fmt: skip
    provider = StrictCharField(
        required=False, max_length=32, help_text="Provider that builds the image, for its pools. Default: that of this server."
    )
    dockerfile = StrictCharField(
        required=False, max_length=MAX_DOCKERFILE_CHARS,
        help_text="Dockerfile, instead of base and commands. It has the build argument BASE_IMAGE, the sandbox image, and no "
        "other files.",
    )  # fmt: skip
    rebuild = StrictBooleanField(
        required=False, default=False, help_text="Build a version again that is ready, such as on a newer base."
    )


class TemplateSerializer(serializers.Serializer):
    """Template. With the key of an agent it has its name, version, state and times, and the other fields are null."""

    id = serializers.UUIDField()
    name = serializers.CharField()
    version = serializers.CharField(help_text="SHA-256 of the specification: equal specifications have equal versions.")
    host = serializers.CharField(allow_null=True, help_text="Host whose engine, or vendor's account, has the image.")
    provider = serializers.CharField(allow_null=True, help_text="Provider of the host.")
    state = serializers.ChoiceField(TemplateState.values)
    failure = serializers.ChoiceField(TemplateFailure.values, allow_null=True, help_text="Reason of a failed build.")
    error = serializers.CharField(allow_null=True, help_text="Message of a failed build; empty otherwise.")
    image = serializers.CharField(allow_null=True, help_text="Image for a pool; null: never built.")
    size_bytes = serializers.IntegerField(
        allow_null=True, help_text="Size of the image with its base; null: never built, or not stated by the vendor."
    )
    created_at = serializers.DateTimeField()
    started_at = serializers.DateTimeField(allow_null=True, help_text="Start of the last attempt.")
    finished_at = serializers.DateTimeField(allow_null=True, help_text="End of the last build.")


class TemplateDetailSerializer(TemplateSerializer):
    """Template with its specification and its build log, which are null with the key of an agent: commands may have tokens."""

    base = serializers.CharField(allow_null=True)
    commands = serializers.ListField(child=serializers.CharField(), allow_null=True)
    dockerfile = serializers.CharField(allow_null=True)
    log = serializers.CharField(allow_null=True, help_text="Redacted output of the last build.")


NEW_TEMPLATE_SERIALIZER = NewTemplateSerializer()


class TemplateListView(ApiView):
    permission_classes = [HasKey, ManagesTemplates]
    max_body_bytes = MAX_BODY_BYTES

    @extend_schema(
        operation_id="templates_list",
        summary="List image templates",
        parameters=schema.PAGE_PARAMETERS,
        responses=schema.build_responses(schema.build_page_serializer(TemplateSerializer)),
    )
    def get(self, request: ApiRequest) -> HttpResponse:
        """Return the versions of all templates, newest first."""
        page, next_url = paginate(ImageTemplate.objects.select_related("host").defer("log"), "created_at", request)
        complete = self.caller.key.operator
        return Response({"results": [serialize_template(template, complete=complete) for template in page], "next": next_url})

    @extend_schema(
        operation_id="templates_create",
        summary="Build an image template",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewTemplateSerializer,
        responses=schema.build_responses(TemplateDetailSerializer, 409, 413, 415, ok=(200, 202)),
    )
    def post(self, request: ApiRequest) -> HttpResponse:
        """Build an image (202), or return the version that has this specification already (200).

        Needs an operator's key with the scope `templates`. The build runs in the background: `state` and `log` show its
        progress. A version that failed is built again."""
        data = self.validate_body(NEW_TEMPLATE_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            host = builds.get_build_host(data.get("provider", ""), now=self.now)
            specification = builds.build_specification(
                host, base=data.get("base", ""), commands=data.get("commands", ()), dockerfile=data.get("dockerfile", "")
            )
            with transaction.atomic():  # the row and the task commit together
                template, is_waiting = builds.request(
                    data["name"], specification, host=host, now=self.now, actor=self.actor, rebuild=data["rebuild"]
                )
                if is_waiting:
                    tasks.enqueue_template_build(template)
            return 202 if template.state == TemplateState.BUILDING else 200, serialize_template_detail(template, complete=True)

        return self.execute_once(act)


class TemplateView(ApiView):
    permission_classes = [HasKey, ManagesTemplates]

    @extend_schema(
        operation_id="templates_get",
        summary="Get an image template with its build log",
        responses=schema.build_responses(TemplateDetailSerializer, 404),
    )
    def get(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Return one version of a template. The log grows while the image is built."""
        return Response(serialize_template_detail(find_template(pk), complete=self.caller.key.operator))

    @extend_schema(
        operation_id="templates_delete",
        summary="Remove an image template",
        responses=schema.build_responses(None, 404, 409, ok=(204,)),
    )
    def delete(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Remove one version of a template and its image, unless a pool or a sandbox uses it.

        Needs an operator's key with the scope `templates`."""
        builds.remove(find_template(pk), now=self.now, actor=self.actor)
        return Response(status=204)


def find_template(pk: UUID) -> ImageTemplate:
    """Return a template with its host. Raise TemplateNotFound."""
    template = ImageTemplate.objects.select_related("host").filter(pk=pk).first()
    if template is None:
        raise TemplateNotFound()
    return template


def serialize_template(template: ImageTemplate, *, complete: bool) -> dict[str, Any]:
    """Return the document of a template. `complete`: for an operator."""
    document = {
        "id": str(template.pk),
        "name": template.name,
        "version": template.version,
        "state": template.state,
        "created_at": format_timestamp(template.created_at),
        "started_at": format_optional_timestamp(template.started_at),
        "finished_at": format_optional_timestamp(template.finished_at),
    }
    private = {
        "host": template.host.name,
        "provider": template.host.provider,
        "failure": template.failure or None,
        "error": template.error,
        "image": template.image or None,
        "size_bytes": template.size_bytes,
    }
    return document | (private if complete else dict.fromkeys(private))


def serialize_template_detail(template: ImageTemplate, *, complete: bool) -> dict[str, Any]:
    private = {"base": template.base, "commands": template.commands, "dockerfile": template.dockerfile, "log": template.log}
    return serialize_template(template, complete=complete) | (private if complete else dict.fromkeys(private))
