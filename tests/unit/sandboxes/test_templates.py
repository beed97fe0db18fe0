"""Image templates: specifications, versions, Dockerfiles and the build log. The builds: tests/docker/test_templates.py."""

import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from leases import sweeps
from sandboxes.errors import InvalidTemplate, TemplateBusy, TemplatesNotSupported
from sandboxes.hosts import registry
from sandboxes.models import ImageTemplate, TemplateFailure, TemplateState
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweep_log import SweepResult
from sandboxes.templates import builds
from sandboxes.templates.build_log import HEAD_CHARS, TAIL_CHARS, BuildLog
from sandboxes.templates.specifications import (
    MAX_COMMAND_CHARS,
    MAX_COMMANDS,
    MAX_DOCKERFILE_CHARS,
    TemplateSpecification,
    validate_name,
)
from tests.conftest import MINUTE, NOW, SimulatedCrash
from tests.support.actors import console_user

DOCKERFILE = "FROM debian\n"


@pytest.mark.parametrize(
    ("specification", "field"),
    [
        (TemplateSpecification(commands=["true"]), "base"),
        (TemplateSpecification("debian\nUSER root", ["true"]), "base"),
        (TemplateSpecification("debian"), "commands"),
        (TemplateSpecification("debian", ["true"] * (MAX_COMMANDS + 1)), "commands"),
        (TemplateSpecification("debian", [" "]), "commands"),
        (TemplateSpecification("debian", ["x" * (MAX_COMMAND_CHARS + 1)]), "commands"),
        (TemplateSpecification("debian", ["a\0b"]), "commands"),
        (TemplateSpecification("debian", dockerfile=DOCKERFILE), "dockerfile"),
        (TemplateSpecification(commands=["true"], dockerfile=DOCKERFILE), "dockerfile"),
        (TemplateSpecification(dockerfile="RUN true"), "dockerfile"),
        (TemplateSpecification(dockerfile=DOCKERFILE + "#" * MAX_DOCKERFILE_CHARS), "dockerfile"),
    ],
)
def test_invalid_specification_names_its_field(specification: TemplateSpecification, field: str) -> None:
    with pytest.raises(InvalidTemplate) as refused:
        specification.validate()
    assert refused.value.extra == {"field": field}


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "a/b", "a" * 64, "a\n"])
def test_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidTemplate):
        validate_name(name)


def test_version_depends_on_the_whole_specification() -> None:
    """The order of commands counts, and a boundary between commands does, too."""
    specifications = [
        TemplateSpecification("a", ["b", "c"]), TemplateSpecification("a", ["c", "b"]), TemplateSpecification("a", ["b c"]),
        TemplateSpecification("b", ["b", "c"]), TemplateSpecification(dockerfile="FROM a"),
    ]  # fmt: skip
    assert len({each.compute_version() for each in specifications}) == len(specifications)
    assert TemplateSpecification("a", ("b", "c")).compute_version() == specifications[0].compute_version()


def test_command_cannot_add_an_instruction() -> None:
    dockerfile = TemplateSpecification("debian", ["echo 'a\nFROM scratch\n\"b'"]).render_dockerfile("agent")
    assert [line.split()[0] for line in dockerfile.splitlines()] == ["FROM", "USER", "RUN", "USER"]


def test_long_log_keeps_its_ends() -> None:
    """Also in a reasonable time: the patterns of credentials are matched in lines of any length."""
    log = BuildLog()
    log.append("first\n" + "x" * HEAD_CHARS)
    log.append("y" * TAIL_CHARS * 2 + "\nlast")
    log.end()
    text = log.render()
    assert text.startswith("first\n")
    assert text.endswith("\nlast")
    assert f"[{log.total_chars - HEAD_CHARS - TAIL_CHARS} characters omitted]" in text


@pytest.mark.parametrize(
    ("printed", "kept"),
    [
        ("GET https://user:pa55@example.org/x", "GET https://***@example.org/x"),
        ("export OPENAI_API_KEY=abc; next", "export OPENAI_API_KEY=***"),
        ("password: 'two words' end", "password: *** end"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("key sk-abcdefghijkl here", "key *** here"),
        ("the secret-of-installation here", "the *** here"),
        ("Collecting tokenizers==0.21", "Collecting tokenizers==0.21"),
        ("a\0b", "a\N{REPLACEMENT CHARACTER}b"),
    ],
)
def test_log_contains_no_credentials(printed: str, kept: str) -> None:
    """Also in output that arrives in parts."""
    log = BuildLog(["secret-of-installation"])
    for character in printed:
        log.append(character)
    log.end()
    assert log.render().startswith(kept)


@pytest.mark.django_db
def test_provider_without_builds_is_refused(memory: MemoryProvider) -> None:
    with pytest.raises(TemplatesNotSupported):
        builds.get_build_host(now=timezone.now())


@pytest.fixture
def template(memory: MemoryProvider, db: None) -> ImageTemplate:
    """Template that waits for a build since NOW."""
    host = registry.get_local_host("memory", now=NOW)
    return builds.request("t", TemplateSpecification("a", ["b"]), host=host, now=NOW, actor=console_user("test"))[0]


def test_template_is_built_by_one_process_at_a_time(template: ImageTemplate, at_checkpoint: Callable[..., None]) -> None:
    def build_too() -> None:
        assert not builds.build(template.pk, now=NOW)
        raise SimulatedCrash

    at_checkpoint("template claimed", build_too)
    with pytest.raises(SimulatedCrash):
        builds.build(template.pk, now=NOW)
    template.refresh_from_db()
    assert template.attempts == 1


def test_build_that_goes_on_while_a_sweep_looks_at_it_keeps_its_claim(
    template: ImageTemplate, crash_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with crash_at("template claimed"):
        builds.build(template.pk, now=NOW)
    due, find_due = NOW + builds.BUILD_CLAIM_TTL, builds.find_due

    def find_and_extend(*, now: datetime) -> list[ImageTemplate]:
        found = [*find_due(now=now)]
        ImageTemplate.objects.update(deadline_at=now + MINUTE)
        return found

    monkeypatch.setattr(builds, "find_due", find_and_extend)
    assert builds.release_due(now=due) == (SweepResult(), [])
    assert ImageTemplate.objects.get().claim


def test_template_that_is_being_removed_is_neither_rebuilt_nor_removed_by_another_process(template: ImageTemplate) -> None:
    """The claim of a removal whose process has died ends at its deadline."""
    deadline = NOW + MINUTE
    ImageTemplate.objects.update(
        state=TemplateState.READY, image="t", image_id="i", finished_at=NOW, claim=uuid.uuid4(), deadline_at=deadline
    )
    specification = TemplateSpecification("a", ["b"])
    with pytest.raises(TemplateBusy):
        builds.remove(template, now=NOW)
    for now, is_waiting in ((NOW, False), (deadline, True)):
        assert (
            builds.request("t", specification, host=template.host, now=now, actor=console_user("test"), rebuild=True)[1]
            == is_waiting
        )


@pytest.mark.django_db
def test_build_fails_after_three_dead_workers(memory: MemoryProvider) -> None:
    now = timezone.now()
    host = registry.get_local_host("memory", now=now)
    template, is_waiting = builds.request(
        "t", TemplateSpecification("a", ["b"]), host=host, now=now, actor=console_user("test")
    )
    assert is_waiting
    for attempt in range(builds.MAX_ATTEMPTS):
        now += builds.QUEUE_GRACE + timedelta(seconds=1)
        assert sweeps.requeue_template_builds(now=now).counts == {"template builds queued again": 1}, attempt
        ImageTemplate.objects.update(attempts=attempt + 1)
    now += builds.QUEUE_GRACE + timedelta(seconds=1)
    assert sweeps.requeue_template_builds(now=now).counts == {"template builds failed": 1}
    template.refresh_from_db()
    assert (template.state, template.failure, template.deadline_at) == (TemplateState.FAILED, TemplateFailure.ABANDONED, None)
    again, is_waiting = builds.request("t", TemplateSpecification("a", ["b"]), host=host, now=now, actor=console_user("test"))
    assert (again, is_waiting, again.attempts, again.failure) == (template, True, 0, "")
