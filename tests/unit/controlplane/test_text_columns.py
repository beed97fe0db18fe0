"""Length of texts against their columns: SQLite stores any length, and PostgreSQL refuses the statement.

Each column with a maximal length is a message field, which stores what fits, or BOUNDS says what bounds its values."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import connection
from django.db.models import CharField, TextField
from rest_framework import serializers

from leases import api_keys, leasing
from leases.admin.references import AgentReference
from leases.agent_runs.models import SESSION_PATTERN
from leases.api.agent_runs import NewAgentRunSerializer
from leases.api.base.fields import StrictSerializer, build_did_field
from leases.api.coding import NewCodingTaskSerializer, SubmissionSerializer
from leases.api.environment_rows import NewEnvironmentSerializer
from leases.api.identity import MintServiceTokenSerializer
from leases.api.leases import AcquireSerializer, ResourcesSerializer
from leases.api.process_fields import NewProcessSerializer
from leases.api.shells import NewShellSerializer
from leases.api.snapshots import NewSnapshotSerializer
from leases.atproto import records, service
from leases.coding.forges.base import MAX_URL_CHARS
from leases.environments import lifecycle
from leases.environments.entry import add_participants
from leases.environments.models import Environment, Participant
from leases.errors import InvalidRequest
from leases.guard import LeaseGuard
from leases.management.base import parse_did
from leases.models import CONDITION_PATTERN, Lease, LeaseEvent
from leases.packs import folder
from sandboxes import audit
from sandboxes.audit import Actor, ActorKind
from sandboxes.db.message_fields import LongMessageField, MessageField, fit_column
from sandboxes.egress.request_filter.requests import MAX_MODEL_CHARACTERS
from sandboxes.models import OperatorAction, Sweep
from sandboxes.models.webhooks import EventType
from sandboxes.providers.errors import FailureCause
from sandboxes.providers.registry import PROVIDERS, RUNTIME_PATTERN
from sandboxes.state import changes, vendor_snapshots
from sandboxes.sweep_log import SweepResult, run_recorded
from sandboxes.templates import builds, specifications
from tests.conftest import MINUTE, NOW

pytestmark = pytest.mark.postgres("lengths of columns")
APPS = ("sandboxes", "leases", "billing")
HOSTILE = "\0\udc80é" + "x" * 10_000  # such as the text of an error that quotes an output


def list_columns() -> dict[str, "CharField[Any, Any]"]:
    """Return the columns with a maximal length and without choices, by model and name."""
    return {
        f"{model.__name__}.{field.name}": field
        for app in APPS
        for model in apps.get_app_config(app).get_models()
        for field in model._meta.local_fields
        if isinstance(field, CharField) and not field.choices and not isinstance(field, MessageField)
    }


def list_message_fields() -> list[MessageField | LongMessageField]:
    fields = [field for app in APPS for model in apps.get_app_config(app).get_models() for field in model._meta.local_fields]
    return [field for field in fields if isinstance(field, MessageField | LongMessageField)]


COLUMNS = list_columns()


@dataclass(frozen=True)
class Copy:
    """Value of another column."""

    of: str

    def check(self, max_length: int) -> None:
        assert COLUMNS[self.of].max_length <= max_length  # type: ignore[operator]


@dataclass(frozen=True)
class Limit:
    """At most a number of characters, for a reason."""

    chars: int
    reason: str

    def check(self, max_length: int) -> None:
        assert self.chars <= max_length and self.reason


@dataclass(frozen=True)
class Words:
    """One of the words that code has."""

    words: Iterable[str]

    def check(self, max_length: int) -> None:
        assert 0 < max(map(len, self.words)) <= max_length


@dataclass(frozen=True)
class Pattern:
    """A pattern that no longer text matches. `sample` matches in the length of the column."""

    pattern: str
    sample: str = "a"

    def check(self, max_length: int) -> None:
        assert re.fullmatch(self.pattern, self.sample)
        assert not re.fullmatch(self.pattern, self.sample + self.sample[-1] * max_length)


@dataclass(frozen=True)
class Requested:
    """Field of a request, which the HTTP API and the commands validate."""

    serializer: type[serializers.Serializer[Any]]
    name: str
    sample: str = "a"

    def check(self, max_length: int) -> None:
        field = self.serializer().fields[self.name]
        assert field.run_validation(self.sample) == self.sample
        with pytest.raises(serializers.ValidationError):
            field.run_validation(self.sample + self.sample[-1] * max_length)


class Agents(StrictSerializer):
    did = build_did_field()


SHA256 = Limit(64, "SHA-256 in hexadecimal digits")
CLEANED = "full_clean before each write: forms of the console, validate_row of commands, save() or the saving verb"
OBJECT_KEY = Limit(512, "a prefix, ids and a digest")
COMMIT = Limit(64, "SHA-1 or SHA-256 that the control plane's Git states")
INSTANCE = Limit(64, "pattern of LEASEHOLD_INSTANCE")
MODEL = Limit(MAX_MODEL_CHARACTERS, "requests with longer names are refused; names in answers: TokenUsage")
BY_NAME = {
    "agent_did": Copy("Agent.did"),
    "environment_id": Copy("Environment.id"),
    "provider": Words(PROVIDERS),
    "cwd": Requested(NewShellSerializer, "cwd", "/a"),
    "claimed_by": INSTANCE,
    "start_error_code": Limit(64, "codes of error classes"),
    "gpu_type": Requested(ResourcesSerializer, "gpu_type"),
}
BOUNDS: dict[str, Copy | Limit | Words | Pattern | Requested | str] = {
    "Account.name": CLEANED, "Account.title": CLEANED, "CatalogAgent.description": CLEANED, "CatalogAgent.model": CLEANED,
    "CatalogAgent.name": CLEANED, "CatalogAgent.title": CLEANED, "EgressCredential.domain": CLEANED,
    "EnvironmentType.name": CLEANED, "EnvironmentType.sleep_after": CLEANED, "EnvironmentType.turn_collection": CLEANED,
    "Policy.description": CLEANED, "Policy.name": CLEANED, "Pool.image": CLEANED, "Pool.name": CLEANED, "Pool.runtime": CLEANED,
    "Project.name": CLEANED,
    "Rate.instance_type": CLEANED, "Repository.api_url": CLEANED, "Repository.base_branch": CLEANED,
    "Repository.clone_url": CLEANED, "Repository.forge_project": CLEANED, "Repository.name": CLEANED,
    "Repository.ssh_key_path": CLEANED, "TokenRate.pattern": CLEANED, "TokenRate.tier": CLEANED, "Webhook.description": CLEANED,
    "Webhook.url": CLEANED, "Budget.model": CLEANED, "Budget.subject": CLEANED, "Budget.time_zone": CLEANED,
    "Agent.did": Requested(Agents, "did", "did:plc:a"),
    "Agent.name": "full_clean of the console's form; NewAgentSerializer",
    "AgentKey.name": "require_fits in api_keys.issue_key; full_clean of the console's form",
    "AgentKey.digest": SHA256, "AgentKey.first_digest": SHA256, "AgentKey.previous_digest": SHA256,
    "AgentKey.prefix": Limit(8, "secrets.token_hex(4)"),
    "AgentRoute.address": Limit(80, "address and port of the gateway, an IP address"),
    "AgentRoute.ref": Copy("Sandbox.ref"),
    "AgentRun.cli": Requested(NewAgentRunSerializer, "cli", "claude-code"),
    "AgentRun.model": Requested(NewAgentRunSerializer, "model"),
    "AgentRun.requested_session": Requested(NewAgentRunSerializer, "session_id"),
    "AgentRun.session_id": Pattern(SESSION_PATTERN),
    "AtprotoAccount.service_did": Limit(320, "require_match"),
    "AtprotoAccount.service_url": Limit(500, "check_service_url"),
    "AtprotoRecord.cid": Limit(service.MAX_CID_CHARS, "longer ones are refused"),
    "AtprotoRecord.uri": Limit(service.MAX_URI_CHARS, "longer ones are refused"),
    "AtprotoRecord.collection": Copy("EnvironmentType.turn_collection"),
    "AtprotoRecord.record_key": Pattern(records.KEY_PATTERN),
    "Attachment.look": SHA256, "Attachment.skill": Copy("EnvironmentType.name"),
    "CodingTask.base_branch": Copy("Repository.base_branch"),
    "CodingTask.base_commit": COMMIT, "CodingTask.head_commit": COMMIT, "CodingTask.pushing_commit": COMMIT,
    "CodingTask.branch": Limit(128, "prefix, 100 characters of the environment's id, 8 of a digest"),
    "CodingTask.proposal_title": Requested(SubmissionSerializer, "title"),
    "CodingTask.pull_request_url": Limit(MAX_URL_CHARS, "checked by the forge; of a bare repository a path and a branch"),
    "CodingTask.test_command": Requested(NewCodingTaskSerializer, "test_command"),
    "CodingTask.title": Requested(NewCodingTaskSerializer, "title"),
    "CostRecord.whole": Limit(40, "quantity of a usage record: two numbers of 64 bits multiplied"),
    "DataFile.digest": SHA256, "DataFile.path": Limit(changes.MAX_PATH_BYTES, "longer paths are not stored"),
    "DataObject.key": OBJECT_KEY, "ObjectUpload.key": OBJECT_KEY, "OutputObject.key": OBJECT_KEY,
    "EgressConnection.connection_id": Limit(32, "UUID in hexadecimal digits"),
    "EgressConnection.domain": Limit(253, "TARGET_PATTERN and URL_PATTERN of request_head.py"),
    "Sandbox.runtime": Pattern(RUNTIME_PATTERN),  # of the pool's column and of the variables
    "Environment.id": Requested(AcquireSerializer, "environment_id"),
    "Environment.phase": Requested(NewEnvironmentSerializer, "phase"),
    "Environment.end_reason": Pattern(f"condition:{CONDITION_PATTERN}", "condition:a"),
    "Event.key": Limit(255, "ids; that of a budget's event is cut after its ids"), "Event.kind": Words(EventType.values),
    "GatewayToken.session_sha256": SHA256, "GatewayToken.sha256": SHA256,
    "Host.engine_id": Limit(200, "a UUID, or the address and account of a vendor, cut before the id is derived from it"),
    "Host.name": "full_clean of the console's form; 80 characters of the host's name", "Host.queue": Limit(40, "host-, UUID"),
    "Host.version": Limit(32, "version of the package"),
    "IdempotentRequest.fingerprint": SHA256, "IdempotentRequest.key": Pattern(r"[\x21-\x7e]{1,255}"),
    "ImageTemplate.base": Pattern(specifications.BASE_PATTERN.pattern),
    "ImageTemplate.image": Limit(160, "tag: a prefix, the template's name and version"),
    "ImageTemplate.image_id": Limit(builds.MAX_IMAGE_ID_CHARS, "longer ones fail the build"),
    "ImageTemplate.name": Pattern(specifications.NAME_PATTERN), "ImageTemplate.version": SHA256,
    "Lease.end_reason": Pattern(f"condition:{CONDITION_PATTERN}", "condition:a"),
    "Lease.image": Requested(ResourcesSerializer, "image"), "Lease.size": Requested(ResourcesSerializer, "size"),
    "LeaseEvent.kind": Limit(32, "constants"),
    "LlmCall.call_id": Limit(32, "UUID in hexadecimal digits"),
    "LlmCall.model": MODEL, "LlmCall.requested_model": MODEL,
    "LlmCall.server": Limit(96, "name of the host, at most 64 on Linux, process id and ticks"),
    "LlmCall.service_tier": Limit(32, "TokenUsage"),
    "LogPosition.head": SHA256, "LogPosition.inode": Limit(41, "two numbers of 64 bits"),
    "LogPosition.name": Limit(320, "name of the host, and a path in LEASEHOLD_RUNTIME_DIR or beside it"),
    "MintedToken.aud": Requested(MintServiceTokenSerializer, "aud", "did:web:a"),
    "MintedToken.lxm": Requested(MintServiceTokenSerializer, "lxm", "org.example.move"),
    "ModelTotal.model": MODEL, "StatementLine.model": MODEL, "UsageRecord.model": MODEL,
    "OperatorAction.kind": Words(model._meta.label_lower for model in apps.get_models()),
    "OperatorAction.object_id": Limit(64, "primary keys of the audited tables: numbers and UUIDs"),
    "PackAssignment.environment_type": Copy("EnvironmentType.name"),
    "PackVersion.description": Pattern(folder.DESCRIPTION_PATTERN.pattern), "PackVersion.digest": SHA256,
    "PackVersion.marker_digest": SHA256, "PackVersion.pack": Pattern(folder.NAME_PATTERN.pattern),
    "PackVersion.version": Limit(folder.MAX_VERSION_LENGTH + 9, "with a part of its digest"),
    "Process.name": Requested(NewProcessSerializer, "name"),
    "QueuedRun.runner": Limit(64 + 9, "instance and 8 digits"),
    "Run.error_code": Limit(64, "codes of error classes"),
    "Sandbox.image": Copy("Lease.image"), "Sandbox.pod_end_cause": Words(cause.value for cause in FailureCause),
    "Sandbox.pod_uid": Limit(36, "UUID of the API server"), "Sandbox.ref": Limit(70, "build_name: a prefix, UUID and number"),
    "Shell.name": Requested(NewShellSerializer, "name"),
    "SigningKey.public_key": Limit(50, "did:key of 33 bytes, multibase"),
    "Snapshot.key": Limit(255, "a prefix, two UUIDs"), "Snapshot.name": Requested(NewSnapshotSerializer, "name"),
    "Snapshot.vendor_digest": SHA256,
    "Snapshot.vendor_snapshot": Limit(vendor_snapshots.MAX_NAME_CHARS, "longer ones are not recorded"),
    "StatementLine.item": Limit(8, "Item"), "Sweep.name": Limit(32, "constants"), "Watermark.name": Limit(32, "constants"),
    "StatementCharge.environment_type": Copy("Tab.environment_type"), "StatementCharge.project": Copy("Tab.project"),
    "Tab.environment_type": Copy("EnvironmentType.name"), "Tab.key_id": Limit(20, "a number of 64 bits"),
    "Tab.project": Copy("Project.name"), "Transition.was": Limit(16, "SandboxState"),
    "UsageRecord.source": Limit(320, "words and two ids"), "UsageRecord.state": Limit(16, "SandboxState"),
}  # fmt: skip


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_with_a_maximal_length_stores_messages_or_has_bounded_values(column: str) -> None:
    bound = BOUNDS.get(column) or BY_NAME[column.partition(".")[2]]
    max_length = COLUMNS[column].max_length
    assert max_length
    if not isinstance(bound, str):
        bound.check(max_length)


def test_the_table_has_no_column_that_does_not_exist() -> None:
    assert BOUNDS.keys() <= COLUMNS.keys()


@pytest.mark.django_db
@pytest.mark.parametrize("field", list_message_fields(), ids=str)
def test_the_database_accepts_a_message_of_any_length_and_characters(field: MessageField | LongMessageField) -> None:
    value = field.get_db_prep_save(HOSTILE, connection)
    with connection.cursor() as cursor:
        cursor.execute("SELECT %s", [value])
        assert cursor.fetchone() == (value,)
    assert len(value) == field.max_chars and value.startswith("\ufffd?é") and value.endswith("x…")
    assert isinstance(field.clone(), CharField | TextField)


@pytest.mark.django_db
def test_each_way_to_write_a_message_stores_the_same_text() -> None:
    stored = fit_column(OperatorAction, "detail", HOSTILE)

    def build() -> OperatorAction:
        return OperatorAction(kind="a", object_id="1", object_text="b", action="c", detail=HOSTILE, actor="d", at=NOW)

    def save_again(row: OperatorAction) -> None:
        row.detail = HOSTILE
        row.save(update_fields=["detail"])

    row = build()
    row.save()
    assert row.detail == stored  # also in memory
    OperatorAction.objects.bulk_create([build()])
    for write in (
        save_again,
        lambda row: OperatorAction.objects.filter(pk=row.pk).update(detail=HOSTILE),
        lambda row: OperatorAction.objects.bulk_update([row], ["detail"]),
        lambda row: OperatorAction.objects.update_or_create(pk=row.pk, defaults={"detail": HOSTILE}),
    ):
        changed = build()
        changed.detail = ""
        changed.save()
        changed.detail = HOSTILE
        write(changed)
    assert {*OperatorAction.objects.values_list("detail", flat=True)} == {stored}
    assert OperatorAction.objects.filter(detail=HOSTILE).count() == 6


# --- the verbs that compose messages --------------------------------------------------------------------------------


def note_recovery(lease: Lease) -> Iterator[str]:
    LeaseGuard(lease.pk, lambda: NOW).note_recovery(HOSTILE, now=NOW)
    yield LeaseEvent.objects.get(kind="recovered").reason


def end_lease(lease: Lease) -> Iterator[str]:
    leasing.end(lease.pk, reason="lost", now=NOW, actor=HOSTILE, detail=HOSTILE)
    lease.refresh_from_db()
    yield lease.end_detail
    event = LeaseEvent.objects.get(kind="ended")
    yield from (event.actor, event.reason.removeprefix("lost: "))


def change_audited_row(lease: Lease) -> Iterator[str]:
    audit.record(lease, "Change lease", HOSTILE, actor=Actor(HOSTILE, ActorKind.KEY), now=NOW)
    action = OperatorAction.objects.get(action="Change lease")
    yield from (action.detail, action.actor)


def admit_participant(lease: Lease) -> Iterator[str]:
    add_participants(lease.environment_id, ["did:plc:bob"], now=NOW, actor=HOSTILE)
    yield Participant.objects.get(agent_did="did:plc:bob").added_by


def fail_sweep(lease: Lease) -> Iterator[str]:
    run_recorded("reclaim", lambda: SweepResult(failures=[HOSTILE]), now=NOW, every=MINUTE)
    yield Sweep.objects.get(name="reclaim").last_error


@pytest.mark.django_db
@pytest.mark.parametrize("verb", [note_recovery, end_lease, change_audited_row, admit_participant, fail_sweep])
def test_a_verb_stores_the_beginning_of_an_overlong_message(verb: Callable[[Lease], Iterator[str]], lease: Lease) -> None:
    for stored in verb(lease):
        assert stored.startswith("\ufffd?éxxx") and stored.endswith("x…")


# --- the verbs that refuse identifiers ------------------------------------------------------------------------------


def issue_named_key() -> None:
    api_keys.issue_key(["did:plc:ada"], name="n" * 101, now=NOW)


def create_in_phase() -> None:
    lifecycle.create(lifecycle.NewEnvironment("game-2", "catan", phase="p" * 65), now=NOW)


def change_phase() -> None:
    Environment.objects.create(pk="game-3", type_id="catan")
    lifecycle.set_phase("game-3", "p" * 65, now=NOW)


def parse_overlong_did() -> None:
    parse_did("did:plc:" + "a" * 248)


def clean_overlong_did() -> None:
    AgentReference("agent").clean("did:plc:" + "a" * 248)


@pytest.mark.django_db
@pytest.mark.parametrize("verb", [issue_named_key, create_in_phase, change_phase, parse_overlong_did, clean_overlong_did])
def test_an_identifier_that_is_too_long_is_refused_where_it_is_received(verb: Callable[[], None]) -> None:
    with pytest.raises((InvalidRequest, ValidationError)):
        verb()
