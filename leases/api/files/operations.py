"""Changes of a lease's file tree that transfer no content: create a directory, move an entry.

Their URLs are not below /files/, whose every name is that of a file."""

from typing import Any
from uuid import UUID

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers

from leases.api.base import schema
from leases.api.base.fields import AnyStringField, StrictBooleanField, StrictSerializer
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.views import ApiRequest
from leases.api.files.base import ROOTS, FileApiView, build_command
from leases.errors import InvalidRequest
from sandboxes.models import Run, RunOutcome, Sandbox
from sandboxes.providers.arguments import split_sandbox_path
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import BadPath


class RootField(serializers.ChoiceField):
    def __init__(self, **options: Any) -> None:
        options = {"default": "workspace", "help_text": "Base directory of the paths.", **options}
        super().__init__(**{"choices": list(ROOTS), **options})


class NewDirectorySerializer(StrictSerializer):
    root = RootField()  # type: ignore[assignment]
    path = AnyStringField(help_text="Path of the directory, relative to the root.")


class MoveSerializer(StrictSerializer):
    root = RootField()  # type: ignore[assignment]
    path = AnyStringField(help_text="Path of the file, link or directory, relative to the root.")
    target_root = RootField(required=False, default=None, help_text="Only the value of `root`, which is the default.")
    target = AnyStringField(help_text="New path, relative to the root. Missing parent directories are created.")
    overwrite = StrictBooleanField(
        default=False,
        help_text="Replace an existing target: a file or link by a file or link, an empty directory by a directory.",
    )


class PathSerializer(serializers.Serializer):
    root = serializers.ChoiceField(list(ROOTS))  # type: ignore[assignment]
    path = serializers.CharField(help_text="Path of the created or moved entry, relative to the root.")


NEW_DIRECTORY_SERIALIZER, MOVE_SERIALIZER = NewDirectorySerializer(), MoveSerializer()


class DirectoryView(FileApiView):
    @extend_schema(
        operation_id="leases_files_mkdir",
        summary="Create a directory",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewDirectorySerializer,
        responses=schema.build_responses(PathSerializer, 402, 404, 409, 410, 413, 415, 429, ok=(201,)),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Create a directory and its missing parents. An existing directory is success."""
        data = self.validate_body(NEW_DIRECTORY_SERIALIZER)
        root = ROOTS[data["root"]]
        path = resolve_path("path", root, data["path"])

        def make(provider: Provider, sandbox: Sandbox) -> None:
            provider.make_directory(sandbox.ref, path)

        def act(run_id: UUID) -> StatusAndBody:
            self.change_tree(pk, root, build_command("mkdir", path, root=root, run_id=run_id), make)
            return 201, {"root": data["root"], "path": data["path"]}

        return self.execute_once(act)


class MoveView(FileApiView):
    @extend_schema(
        operation_id="leases_files_move",
        summary="Move or rename a file or directory",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=MoveSerializer,
        responses=schema.build_responses(PathSerializer, 402, 404, 409, 410, 413, 415, 429),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Rename a file, link or directory within /workspace or within /data. Atomic; a link is moved, not its target.

        An existing target is answered 409 `file_exists` without `overwrite`. A move between the roots is refused: their
        contents have different rules of storage. Download and upload the files instead."""
        data = self.validate_body(MOVE_SERIALIZER)
        if data["target_root"] not in (None, data["root"]):
            raise InvalidRequest("target_root", "Must be the value of root: files are not moved between /workspace and /data.")
        root = ROOTS[data["root"]]
        source, target = resolve_path("path", root, data["path"]), resolve_path("target", root, data["target"])

        answer = 200, {"root": data["root"], "path": data["target"]}

        def move(provider: Provider, sandbox: Sandbox) -> None:
            provider.move_file(sandbox.ref, source, target, overwrite=data["overwrite"])

        def act(run_id: UUID) -> StatusAndBody:
            self.change_tree(pk, root, build_command("move", source, target, root=root, run_id=run_id), move)
            return answer

        def rebuild(run: Run) -> StatusAndBody | None:
            return answer if run.outcome == RunOutcome.OK else None

        return self.execute_once(act, repeatable=False, rebuild=rebuild)


def resolve_path(field: str, root: str, path: str) -> str:
    """Return the absolute path of a file below a root. Raise InvalidRequest with the name of the field."""
    try:
        split_sandbox_path(f"{root}/{path}")
    except BadPath as error:
        raise InvalidRequest(field, str(error)) from None
    return f"{root}/{path}"
