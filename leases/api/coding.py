"""Coding tasks: create, read, check out, submit; webhooks of forges."""

from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.response import Response

from leases.api.base import schema
from leases.api.base.fields import (
    PatternField,
    StrictBooleanField,
    StrictCharField,
    StrictSerializer,
    build_agents_field,
    validate_url_value,
)
from leases.api.base.idempotency import StatusAndBody
from leases.api.base.views import ApiRequest, LeaseApiView
from leases.api.environment_rows import EnvironmentApiView
from leases.api.leases import ACQUIRE_SERIALIZER
from leases.coding import checkout, submissions, tasks
from leases.coding.git import GIT_TIMEOUT
from leases.coding.models import BRANCH_DESCRIPTION, BRANCH_PATTERN, CodingTask, CodingTaskStatus, CompletesOn
from sandboxes.claims import KILL_GRACE
from sandboxes.db.clock import format_optional_timestamp, format_timestamp
from sandboxes.redaction.texts import omit_answers

MAX_DESCRIPTION_LENGTH = 20_000  # characters
MAX_CHECKOUT = checkout.PROBE_TIMEOUT + 2 * checkout.CHECKOUT_TIMEOUT + 2 * GIT_TIMEOUT + 4 * KILL_GRACE


class NewCodingTaskSerializer(StrictSerializer):
    repository = PatternField(r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", help_text="Name of a repository.")
    title = StrictCharField(max_length=200)
    description = StrictCharField(max_length=MAX_DESCRIPTION_LENGTH, allow_blank=True, default="")
    test_command = StrictCharField(
        max_length=500, allow_blank=True, default="", help_text='Shell command that tests the result, such as "pytest -q".'
    )
    environment_type = PatternField(r"[-A-Za-z0-9_]{1,63}", "1 to 63 letters, digits and - _", default="coding")
    base_branch = PatternField(
        BRANCH_PATTERN, BRANCH_DESCRIPTION, max_length=200, required=False, help_text="Default: that of the repository."
    )
    completes_on = serializers.ChoiceField(
        CompletesOn.choices, default=CompletesOn.PULL_REQUEST,
        help_text="Event with which the condition `task.complete` is posted: the pull request is opened, or merged.",
    )  # fmt: skip
    agents = build_agents_field(default=list, help_text="Participants: agents that may enter the environment and see the task.")
    open_to_project = StrictBooleanField(
        required=False, help_text="Every agent of the repository's project may enter. Default: as the environment type says."
    )


class SubmissionSerializer(StrictSerializer):
    title = StrictCharField(max_length=200, help_text="Title of the pull request.")
    summary = StrictCharField(max_length=MAX_DESCRIPTION_LENGTH, allow_blank=True, default="", help_text="Its description.")


class CodingTaskSerializer(serializers.Serializer):
    environment_id = serializers.CharField()
    repository = serializers.CharField()
    title = serializers.CharField()
    description = serializers.CharField()
    test_command = serializers.CharField()
    completes_on = serializers.ChoiceField(CompletesOn.choices)
    path = serializers.CharField(help_text="Working copy in the sandbox, after a checkout.")
    base_branch = serializers.CharField()
    base_commit = serializers.CharField(help_text="Empty before the first checkout.")
    branch = serializers.CharField(help_text="Branch of the pull request.")
    status = serializers.ChoiceField(
        CodingTaskStatus.choices, help_text="open: not submitted; pushed: the pull request is to be opened; proposed: it is "
        "open; merged, closed, abandoned: ended.",
    )  # fmt: skip
    head_commit = serializers.CharField(help_text="Last commit that was pushed.")
    pull_request_number = serializers.IntegerField(allow_null=True)
    pull_request_url = serializers.CharField()
    submissions = serializers.IntegerField()
    refusals = serializers.ListField(
        child=serializers.CharField(), help_text="Reasons why the last submission was refused. Nothing of it was pushed."
    )
    created_at = serializers.DateTimeField()
    submitted_at = serializers.DateTimeField(allow_null=True)
    ended_at = serializers.DateTimeField(allow_null=True)


class CheckoutSerializer(CodingTaskSerializer):
    checked_out = serializers.BooleanField(help_text="False if the working copy existed.")


NEW_CODING_TASK_SERIALIZER = NewCodingTaskSerializer()
SUBMISSION_SERIALIZER = SubmissionSerializer()
EMPTY_SERIALIZER = StrictSerializer()


class CodingTaskView(EnvironmentApiView):
    @extend_schema(
        operation_id="environments_get_coding_task",
        summary="Get the coding task of an environment",
        responses=schema.build_responses(CodingTaskSerializer, 404),
    )
    def get(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        return Response(serialize_task(tasks.find(self.get_environment(environment_id).pk)))

    @extend_schema(
        operation_id="environments_create_coding_task",
        summary="Create the coding task of an environment",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=NewCodingTaskSerializer,
        responses=schema.build_responses(CodingTaskSerializer, 409, 413, 415, ok=(200, 201)),
    )
    def post(self, request: ApiRequest, environment_id: str) -> HttpResponse:
        """Create the task (201), and the environment unless it exists. The same task again is returned (200).

        Operator keys only. `manage.py repository` adds repositories."""
        data = self.validate_body(NEW_CODING_TASK_SERIALIZER)
        environment_id = validate_url_value(ACQUIRE_SERIALIZER, "environment_id", environment_id)

        def act(run_id: UUID) -> StatusAndBody:
            task, is_new = tasks.create(environment_id, **data, now=self.now, actor=self.actor)
            return 201 if is_new else 200, serialize_task(task)

        return self.execute_once(act)


class CheckoutView(LeaseApiView):
    @extend_schema(
        operation_id="leases_check_out",
        summary="Check out the repository of the coding task",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=None,
        responses=schema.build_responses(CheckoutSerializer, 402, 404, 409, 410, 413, 415, 429, 502),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Put the repository into /workspace/repo of the sandbox, without a remote and without credentials.

        A working copy that exists there stays as it is. Every checkout of a task has the same base commit."""
        self.validate_body(EMPTY_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            task, checked_out = checkout.check_out(pk, now=self.now, actor=self.actor)
            return 200, {**serialize_task(task), "checked_out": checked_out}

        return self.execute_once(act, max_duration=MAX_CHECKOUT + settings.SANDBOX_START_TIMEOUT)


class SubmissionListView(LeaseApiView):
    @extend_schema(
        operation_id="leases_submit",
        summary="Submit the commits of the coding task",
        parameters=[schema.IDEMPOTENCY_KEY_PARAMETER],
        request=SubmissionSerializer,
        responses=schema.build_responses(CodingTaskSerializer, 402, 404, 409, 410, 413, 415, 429, 502),
    )
    def post(self, request: ApiRequest, pk: UUID) -> HttpResponse:
        """Take the commits from the sandbox, check them, push them as a branch and open a pull request.

        The history after the base must be linear. Refused are: changes of protected paths, submodules, links that leave the
        repository, paths reserved by Git, secrets, commits above the size limit. Commits are made anew with the agent as
        author. A pull request that is open gets the new commits."""
        data = self.validate_body(SUBMISSION_SERIALIZER)

        def act(run_id: UUID) -> StatusAndBody:
            return 200, serialize_task(submissions.submit(pk, **data, now=self.now, actor=self.actor))

        return self.execute_once(act, max_duration=submissions.MAX_SUBMISSION + settings.SANDBOX_START_TIMEOUT)


def serialize_task(task: CodingTask) -> dict[str, Any]:
    return {
        "environment_id": task.environment_id,
        "repository": task.repository.name,
        "title": task.title,
        "description": task.description,
        "test_command": task.test_command,
        "completes_on": task.completes_on,
        "path": checkout.REPOSITORY_PATH,
        "base_branch": task.base_branch,
        "base_commit": task.base_commit,
        "branch": task.branch,
        "status": task.status,
        "head_commit": task.head_commit,
        "pull_request_number": task.pull_request_number,
        "pull_request_url": task.pull_request_url,
        "submissions": task.submissions,
        "refusals": [omit_answers(refusal) for refusal in task.refusals],
        "created_at": format_timestamp(task.created_at),
        "submitted_at": format_optional_timestamp(task.submitted_at),
        "ended_at": format_optional_timestamp(task.ended_at),
    }
