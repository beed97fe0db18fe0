"""What requests to a lease's stores say, and what answers show of them."""

from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from leases.api.fields import JsonObjectField, StrictCharField
from sandboxes.db.clock import format_timestamp
from sandboxes.stores.artifacts import Artifact
from sandboxes.stores.events import Event
from sandboxes.stores.lease_stores import Session


@extend_schema_field({})
class JsonField(serializers.Field):
    """Any JSON value, null too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_null": True, **options})

    def to_internal_value(self, data: Any) -> Any:
        return data


class OpenDocumentSerializer(serializers.Serializer):
    """A document with some fields that are checked; what else is in it is kept as it is."""

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        super().to_internal_value(data)
        return dict(data)


class ChatMessageSerializer(OpenDocumentSerializer):
    """Whatever else is in it is kept, too."""

    role = StrictCharField(max_length=64, help_text="Who speaks: user, assistant, tool, …")
    content = JsonField(help_text="Any JSON value.")


class AuditEntrySerializer(OpenDocumentSerializer):
    """Whatever else is in it is kept, too."""

    action = StrictCharField(max_length=200, help_text="What was done.")


class EventSerializer(serializers.Serializer):
    id = serializers.CharField()
    at = serializers.DateTimeField()
    actor = serializers.CharField(help_text="Whose key wrote it.")


class ChatEventSerializer(EventSerializer):
    message = JsonObjectField(help_text="As it was sent.")


class AuditEventSerializer(EventSerializer):
    entry = JsonObjectField(help_text="As it was sent.")


class ArtifactSerializer(serializers.Serializer):
    name = serializers.CharField()
    media_type = serializers.CharField()
    size_bytes = serializers.IntegerField()
    sha256 = serializers.CharField()
    stored_at = serializers.DateTimeField()
    actor = serializers.CharField(help_text="Whose key stored it.")


class SessionSerializer(serializers.Serializer):
    session_id = serializers.CharField()
    updated_at = serializers.DateTimeField()
    actor = serializers.CharField(help_text="Whose key wrote it last.")
    session = JsonObjectField(help_text="As it was sent.")


def serialize_chat_event(event: Event) -> dict[str, Any]:
    return {"id": event.id, "at": format_timestamp(event.at), "actor": event.actor, "message": event.document}


def serialize_audit_event(event: Event) -> dict[str, Any]:
    return {"id": event.id, "at": format_timestamp(event.at), "actor": event.actor, "entry": event.document}


def serialize_artifact(artifact: Artifact) -> dict[str, Any]:
    return {
        "name": artifact.name,
        "media_type": artifact.media_type,
        "size_bytes": artifact.size,
        "sha256": artifact.sha256,
        "stored_at": format_timestamp(artifact.at),
        "actor": artifact.actor,
    }


def serialize_session(session: Session) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "updated_at": format_timestamp(session.at),
        "actor": session.actor,
        "session": session.document,
    }
