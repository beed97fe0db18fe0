"""Image templates at vendors: builds that are executed by the emulators, and sandboxes on the images that come of them."""

import re
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.utils import timezone

from leases import sweeps, tasks
from sandboxes import lifecycle
from sandboxes.errors import InvalidTemplate, TemplatesNotSupported
from sandboxes.models import ImageTemplate, Pool, Sandbox, TemplateFailure, TemplateState
from sandboxes.providers.remote.images import set_arguments
from sandboxes.templates import builds
from tests.conftest import MINUTE, SimulatedCrash, die
from tests.emulators.base import CUT_AFTER, Emulator, Fault
from tests.emulators.images import MISSING_REGISTRY
from tests.support.actors import console_user
from tests.support.leases import run, update_pool
from tests.support.remote import GetEmulator
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
BUILDERS = ["daytona", "langsmith", "modal", "runloop"]
START = {
    "daytona": "POST /api/snapshots$", "langsmith": "POST .*/snapshot$", "modal": "RPC /ImageGetOrCreate",
    "runloop": "POST /v1/blueprints$",
}  # fmt: skip
MARKER = "echo built >/opt/marker"
MovePool = Callable[[str], Pool]


@pytest.fixture(autouse=True)
def forget_checkpoints() -> Any:
    yield
    lifecycle.CHECKPOINT_HOOKS.clear()


def request_build(*commands: str, base: str = "python:3.12", dockerfile: str = "", rebuild: bool = False) -> ImageTemplate:
    """Request a version of the template `tools` from the default provider."""
    now = timezone.now()
    host = builds.get_build_host(now=now)
    base = "" if dockerfile else base
    specification = builds.build_specification(host, base=base, commands=commands, dockerfile=dockerfile)
    return builds.request("tools", specification, host=host, now=now, actor=console_user("test"), rebuild=rebuild)[0]


def build(template: ImageTemplate) -> ImageTemplate:
    builds.build(template.pk, now=timezone.now())
    template.refresh_from_db()
    return template


def read(grant: Any, pool: Pool, path: str, agent: str = "did:plc:ada") -> bytes:
    """Return the content of a file in a new sandbox of a pool."""
    lease, now = grant(agent, pool=pool.name, now=timezone.now()), timezone.now()
    return bytes(run(lease, "cat", path, now=now).stdout)


def remove_all() -> None:
    """Remove the templates. Their images remain in use by no sandbox of this test."""
    Pool.objects.update(image="")
    Sandbox.objects.update(image="")
    for template in ImageTemplate.objects.select_related("host"):
        builds.remove(template, now=timezone.now())


def assert_no_image_is_left(emulator: Emulator) -> None:
    """Wait until the removals that the vendor has accepted are done. Assert that no image is left.

    The next test may use the name of an image again: until the end of its removal the vendor answers that it exists."""
    wait_until(lambda: not emulator.is_removing_images, "the vendor has removed its images")
    assert emulator.builds == {}


def assert_nothing_is_left(emulator: Emulator) -> None:
    """Assert that no image and no running sandbox is left."""
    assert_no_image_is_left(emulator)
    assert [machine for machine in emulator.list_machines() if machine.is_running] == []


@pytest.mark.smoke
@pytest.mark.parametrize("vendor", BUILDERS)
def test_file_of_a_build_is_in_the_sandboxes_although_the_answer_to_the_create_was_lost(
    vendor: str, move_pool: MovePool, emulators: GetEmulator, grant: Any
) -> None:
    pool, emulator = move_pool(vendor), emulators(vendor)
    before, heard = emulator.build_count, len(emulator.requests)
    emulator.faults.append(Fault(START[vendor], CUT_AFTER))
    template = build(request_build(MARKER, "echo secret https://user:pw@example.org"))
    assert (template.error, template.state, template.image) == ("", TemplateState.READY, template.tag)
    assert "secret https://***@example.org" in template.log and "user:pw" not in template.log
    assert emulator.build_count == before + 1 and len(emulator.builds) == 1
    starts = [line for line in emulator.requests[heard:] if re.search(START[vendor], line)]
    assert len(starts) == 1 or vendor == "modal"  # whose client repeats a request, which names the same image
    update_pool(pool, image=template.image)
    assert read(grant, pool, "/opt/marker") == b"built\n"
    remove_all()
    assert_no_image_is_left(emulator)


def test_build_arguments_have_values_in_the_dockerfile_itself() -> None:
    dockerfile = "ARG BASE_IMAGE\nARG OTHER\nFROM ${BASE_IMAGE}\narg BASE_IMAGE=a\nRUN echo ARG BASE_IMAGE\n"
    with_value = set_arguments(dockerfile, {"BASE_IMAGE": "python:3"})
    assert with_value.splitlines() == [
        "ARG BASE_IMAGE=python:3", "ARG OTHER", "FROM ${BASE_IMAGE}", "arg BASE_IMAGE=python:3", "RUN echo ARG BASE_IMAGE",
    ]  # fmt: skip


@pytest.mark.parametrize("vendor", BUILDERS)
def test_failed_build_keeps_its_log_and_leaves_nothing_at_the_vendor(
    vendor: str, move_pool: MovePool, emulators: GetEmulator
) -> None:
    move_pool(vendor)
    template = build(request_build("echo before the failure", "true API_KEY=hidden-value; exit 3"))
    assert (template.state, template.failure, template.image) == (TemplateState.FAILED, TemplateFailure.COMMAND_FAILED, "")
    assert "before the failure\n" in template.log and "hidden-value" not in template.log + template.error
    assert_nothing_is_left(emulators(vendor))


def test_build_of_a_dead_worker_is_found_again(move_pool: MovePool, emulators: GetEmulator) -> None:
    move_pool("daytona")
    emulator = emulators("daytona")
    template, before = request_build(MARKER), emulator.build_count
    lifecycle.CHECKPOINT_HOOKS.append(lambda at, subject: die() if at == "template built" else None)
    for on_output in (lambda text: die(), None):  # while the build runs, and when it has ended
        with pytest.raises(SimulatedCrash):
            builds.build(template.pk, now=timezone.now(), on_output=on_output)
        due = timezone.now() + builds.BUILD_CLAIM_TTL + MINUTE
        assert sweeps.requeue_template_builds(now=due).counts == {"template builds queued again": 1}
    lifecycle.CHECKPOINT_HOOKS.clear()
    assert tasks.build_template(str(template.pk)) == "built"
    template.refresh_from_db()
    assert (template.state, template.attempts, emulator.build_count) == (TemplateState.READY, 3, before + 1)
    assert MARKER in template.log
    builds.remove(template, now=timezone.now())
    assert_nothing_is_left(emulator)


@pytest.mark.parametrize("step", ["template built", "template named"])
def test_build_that_outlasts_its_claim_records_nothing_over_its_successor(
    step: str, move_pool: MovePool, emulators: GetEmulator, at_checkpoint: Callable[..., None]
) -> None:
    move_pool("daytona")
    template, due = request_build(MARKER), timezone.now() + builds.BUILD_CLAIM_TTL + MINUTE

    def be_taken_over() -> None:
        assert builds.release_due(now=due)[0].counts == {"template builds queued again": 1}
        at_checkpoint("template claimed")
        with pytest.raises(SimulatedCrash):
            builds.build(template.pk, now=due)
        ImageTemplate.objects.update(claimed_by="successor")

    at_checkpoint(step, be_taken_over)
    assert not builds.build(template.pk, now=timezone.now())
    template.refresh_from_db()
    assert (template.state, template.claimed_by, template.image, template.log) == (TemplateState.BUILDING, "successor", "", "")
    builds.release_due(now=due + builds.BUILD_CLAIM_TTL)
    assert build(template).state == TemplateState.READY
    remove_all()
    assert_nothing_is_left(emulators("daytona"))


def test_rebuild_replaces_the_image_behind_the_name_and_a_failed_one_does_not(
    move_pool: MovePool, emulators: GetEmulator, grant: Any
) -> None:
    pool, emulator = move_pool("daytona"), emulators("daytona")
    command = "date +%N >/opt/marker"
    out = StringIO()
    call_command("template", "build", "tools", "--provider=daytona", "--base=python:3.12", "--run", command, stdout=out)
    first = ImageTemplate.objects.get()
    assert f"built: {first}  ready  {first.image}" in out.getvalue()
    update_pool(pool, image=first.image)
    content = read(grant, pool, "/opt/marker")
    second = build(request_build(command, rebuild=True))
    assert (second.pk, second.build_number) == (first.pk, 2) and second.image_id != first.image_id
    assert list(emulator.builds) == [second.image_id]
    emulator.faults.append(Fault("POST /api/snapshots$", 400))
    failed = build(request_build(command, rebuild=True))
    assert (failed.failure, failed.image_id) == (TemplateFailure.BUILD_REFUSED, second.image_id)
    assert read(grant, pool, "/opt/marker", "did:plc:bob") != content
    remove_all()
    assert_no_image_is_left(emulator)


@pytest.mark.parametrize(
    ("dockerfile", "failure", "message"),
    [
        (f"FROM {MISSING_REGISTRY}base\nRUN true\n", TemplateFailure.COMMAND_FAILED, "pull access denied"),
        ("FROM python:3.12\nRUN touch /workspace/.home\n", TemplateFailure.UNUSABLE_IMAGE, "cannot be used"),
    ],
)
def test_image_that_cannot_be_used_names_its_reason(
    dockerfile: str, failure: str, message: str, move_pool: MovePool, emulators: GetEmulator
) -> None:
    move_pool("daytona")
    template = build(request_build(dockerfile=dockerfile))
    assert template.failure == failure and message in template.error
    assert_nothing_is_left(emulators("daytona"))


def test_build_without_a_base_and_at_a_vendor_without_builds_is_refused(move_pool: MovePool, emulators: GetEmulator) -> None:
    move_pool("daytona")
    before = {kind: len(emulators(kind).requests) for kind in ("daytona", "cloudflare")}
    with pytest.raises(InvalidTemplate) as error:
        request_build(MARKER, base="")
    assert error.value.extra == {"field": "base"}
    for provider in ("nowhere", "memory"):
        with pytest.raises(InvalidTemplate) as error:
            builds.get_build_host(provider, now=timezone.now())
        assert error.value.extra == {"field": "provider"}
    move_pool("cloudflare")
    with pytest.raises(TemplatesNotSupported, match="deployment of the worker"):
        request_build(MARKER)
    assert {kind: len(emulators(kind).requests) for kind in before} == before
