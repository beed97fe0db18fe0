"""What requests to a lease's stores say, and what answers show of them."""

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from leases.api.fields import Document, Text
from sandboxes.db.clock import iso
from sandboxes.stores.artifacts import Artifact
from sandboxes.stores.events import Event
from sandboxes.stores.lease_stores import Session


@extend_schema_field({})
class Json(serializers.Field):
    """Any JSON value, null too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_null": True, **options})

    def to_internal_value(self, data: Any) -> Any:
        return data


class Said(serializers.Serializer):
    """A document with some fields that are checked; what else is in it is kept as it is."""

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        super().to_internal_value(data)
        return dict(data)


class ChatMessage(Said):
    """Whatever else is in it is kept, too."""

    role = Text(max_length=64, help_text="Who speaks: user, assistant, tool, …")
    content = Json(help_text="Any JSON value.")


class AuditEntry(Said):
    """Whatever else is in it is kept, too."""

    action = Text(max_length=200, help_text="What was done.")


class EventShown(serializers.Serializer):
    id = serializers.CharField()
    at = serializers.DateTimeField()
    actor = serializers.CharField(help_text="Whose key wrote it.")


class ChatShown(EventShown):
    message = Document(help_text="As it was sent.")


class AuditShown(EventShown):
    entry = Document(help_text="As it was sent.")


class ArtifactShown(serializers.Serializer):
    name = serializers.CharField()
    media_type = serializers.CharField()
    size_bytes = serializers.IntegerField()
    sha256 = serializers.CharField()
    stored_at = serializers.DateTimeField()
    actor = serializers.CharField(help_text="Whose key stored it.")


class SessionShown(serializers.Serializer):
    session_id = serializers.CharField()
    updated_at = serializers.DateTimeField()
    actor = serializers.CharField(help_text="Whose key wrote it last.")
    session = Document(help_text="As it was sent.")


def chat_shown(event: Event) -> dict[str, Any]:
    return {"id": event.id, "at": iso(event.at), "actor": event.actor, "message": event.said}


def audit_shown(event: Event) -> dict[str, Any]:
    return {"id": event.id, "at": iso(event.at), "actor": event.actor, "entry": event.said}


def artifact_shown(artifact: Artifact) -> dict[str, Any]:
    return {
        "name": artifact.name,
        "media_type": artifact.media_type,
        "size_bytes": artifact.size,
        "sha256": artifact.sha256,
        "stored_at": iso(artifact.at),
        "actor": artifact.actor,
    }


def session_shown(session: Session) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "updated_at": iso(session.at),
        "actor": session.actor,
        "session": session.said,
    }
