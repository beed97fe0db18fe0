"""Image templates on a real Docker Engine: build, use by a pool, failures, crash, concurrent builds and removal."""

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from leases import sweeps, tasks
from sandboxes import lifecycle, providers
from sandboxes.errors import TemplateInUse
from sandboxes.hosts import registry
from sandboxes.models import Host, ImageTemplate, Pool, TemplateFailure, TemplateState
from sandboxes.templates import builds
from tests.conftest import MINUTE, SimulatedCrash, die
from tests.docker.test_provider import docker
from tests.support.actors import console_user
from tests.support.leases import run, update_pool

pytestmark = [pytest.mark.docker, pytest.mark.django_db, pytest.mark.usefixtures("docker_ready")]


@pytest.fixture
def host() -> Host:
    return registry.get_local_host("docker", now=timezone.now())


@pytest.fixture
def name() -> Iterator[str]:
    """Name of a template of this test. Afterwards its images are removed."""
    name, provider = f"test-{uuid.uuid4().hex[:12]}", providers.get_provider("docker")
    yield name
    lifecycle.CHECKPOINT_HOOKS.clear()
    for image in list_images(name):
        provider.remove_image(image)


def list_images(name: str) -> list[str]:
    """Return the names of the images of a template's versions."""
    return docker("images", "--format", "{{.Repository}}:{{.Tag}}", f"leasehold-template/{name}").split()


Request = Callable[..., ImageTemplate]


@pytest.fixture
def request_template(host: Host, name: str) -> Request:
    """Request a version: request_template(*commands), or with a Dockerfile."""

    def request(*commands: str, dockerfile: str = "", **options: Any) -> ImageTemplate:
        specification = builds.build_specification(host, base="", commands=commands, dockerfile=dockerfile)
        return builds.request(name, specification, host=host, now=timezone.now(), actor=console_user("test"), **options)[0]

    return request


def build(template: ImageTemplate) -> ImageTemplate:
    builds.build(template.pk, now=timezone.now())
    template.refresh_from_db()
    return template


def test_sandboxes_of_a_pool_run_on_a_built_image(request_template: Request, docker_pool: Pool, grant: Any) -> None:
    """The same specification is built once: a second request finds the version in progress, then ready."""
    printed: list[str] = []
    concurrent: set[bool] = set()
    template = request_template("echo built > /opt/greeting", "echo https://user:pw@example.org")

    def note_output(text: str) -> None:
        printed.append(text)
        same = request_template("echo built > /opt/greeting", "echo https://user:pw@example.org")
        concurrent.add(same != template or builds.build(same.pk, now=timezone.now()))

    assert builds.build(template.pk, now=timezone.now(), on_output=note_output)
    assert concurrent == {False}
    template.refresh_from_db()
    assert (template.state, template.image, template.failure) == (TemplateState.READY, template.tag, "")
    assert template.size_bytes and template.log == "".join(printed)
    assert "https://***@example.org" in template.log
    assert "user:pw" not in template.log
    assert request_template("echo built > /opt/greeting", "echo https://user:pw@example.org") == template
    assert not builds.build(template.pk, now=timezone.now())
    update_pool(docker_pool, image=template.image)
    assert (
        run(grant(pool=docker_pool.name, now=timezone.now()), "cat", "/opt/greeting", now=timezone.now()).stdout == b"built\n"
    )
    with pytest.raises(TemplateInUse):
        builds.remove(template, now=timezone.now())


@pytest.mark.parametrize(
    ("specification", "failure", "message"),
    [
        ({"commands": ["exit 3"]}, TemplateFailure.COMMAND_FAILED, "non-zero code: 3"),
        ({"dockerfile": "FROM scratch\nENV A=b\n"}, TemplateFailure.UNUSABLE_IMAGE, "python3 does not start"),
        (
            {"dockerfile": "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nUSER root\nRUN rm /opt/leasehold/shim && chown 0 /data\n"},
            TemplateFailure.UNUSABLE_IMAGE,
            "/opt/leasehold/shim is missing or not executable by the agent; /data does not belong to the agent",
        ),
        (
            {"dockerfile": "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nVOLUME /cache\n"}, TemplateFailure.UNUSABLE_IMAGE, "VOLUME",
        ),
        ({"dockerfile": "FROM scratch\nNONSENSE\n"}, TemplateFailure.BUILD_REFUSED, "unknown instruction"),
        ({"dockerfile": "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nCOPY secrets /\n"}, TemplateFailure.BUILD_REFUSED, "secrets"),
    ],
)  # fmt: skip
def test_failed_build_names_its_reason(request_template: Request, specification: Any, failure: str, message: str) -> None:
    template = build(request_template(*specification.pop("commands", ()), **specification))
    assert (template.state, template.failure, template.image) == (TemplateState.FAILED, failure, "")
    assert message in template.error
    assert list_images(template.name) == []


def test_build_with_endless_output_is_ended(request_template: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "MAX_OUTPUT_CHARS", 50_000)
    template = build(request_template("yes"))
    assert template.failure == TemplateFailure.OUTPUT_LIMIT
    assert len(template.log) < 70_000


def test_silent_build_is_given_up(request_template: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "BUILD_SILENCE", timedelta(seconds=0.5))
    assert build(request_template("sleep 60")).failure == TemplateFailure.NO_PROGRESS


@pytest.mark.parametrize("point", ["template built", "template named"])
def test_build_of_a_dead_worker_is_done_again(request_template: Request, point: str) -> None:
    """The sweep queues it at the deadline. The dead worker's claim keeps another one from building the version meanwhile."""
    template = request_template("true")
    lifecycle.CHECKPOINT_HOOKS.append(lambda at, subject: die() if at == point else None)
    with pytest.raises(SimulatedCrash):
        builds.build(template.pk, now=timezone.now())
    lifecycle.CHECKPOINT_HOOKS.clear()
    assert not builds.build(template.pk, now=timezone.now()), "claimed"
    assert sweeps.requeue_template_builds(now=timezone.now()).counts == {}
    due = timezone.now() + builds.BUILD_CLAIM_TTL + MINUTE
    assert sweeps.requeue_template_builds(now=due).counts == {"template builds queued again": 1}
    assert tasks.build_template(str(template.pk)) == "built"
    template.refresh_from_db()
    assert (template.state, template.attempts) == (TemplateState.READY, 2)
    assert tasks.build_template(str(template.pk)) == "nothing to build"
    builds.remove(template, now=timezone.now())
    assert list_images(template.name) == []
    assert not ImageTemplate.objects.filter(pk=template.pk).exists()


def test_rebuilt_version_replaces_its_image(request_template: Request) -> None:
    template = build(request_template("date +%N > /opt/built_at"))
    first = template.image_id
    assert build(request_template("date +%N > /opt/built_at", rebuild=True)).image_id != first
    assert not docker("images", "-q", "--no-trunc", first).strip()
