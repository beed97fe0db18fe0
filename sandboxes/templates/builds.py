"""Builds of image templates: request, build, recovery after a crash, removal.

1. `request` writes the row, or finds it: a version is built once.
2. `build` claims the row, builds under a name of its own, checks the image, and then moves the template's name to it. Sandboxes
   that start meanwhile use the previous image of that name. A vendor's images have no names that can be moved: there the row's
   `image_id` is the image of the name, and the name of the build is derived from the number of the request, so that the next
   attempt finds a build whose process has died.
3. A build has no time limit. Its claim is extended while the engine prints output, and a build is given up BUILD_SILENCE after
   its last output.
4. The image of a failed build is removed. That of a build that was given up after MAX_ATTEMPTS is removed by the next build.
5. `release_due` takes rows whose claim has ended, for another attempt, or records the failure after MAX_ATTEMPTS."""

import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar, cast

import structlog
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import F, Q, QuerySet

from sandboxes import audit, providers
from sandboxes.claims import CLAIM_TTL, Claim, note_progress
from sandboxes.db.clock import Clock, clock_from
from sandboxes.deferred_writes import end_if_unanswered, hold_in_flight
from sandboxes.errors import ClaimLost, InvalidTemplate, TemplateBusy, TemplateInUse, TemplatesNotSupported, WrongHost
from sandboxes.hosts import registry
from sandboxes.hosts.bound_provider import require_engine
from sandboxes.lifecycle import checkpoint
from sandboxes.models import Host, ImageTemplate, Pool, Sandbox, SandboxState, TemplateFailure, TemplateState
from sandboxes.providers.base import BuiltImage, Provider
from sandboxes.providers.errors import BuildCommandFailed, FailureCause, ImageInUse, ProviderError, Rejected, Unavailable
from sandboxes.providers.registry import PROVIDERS
from sandboxes.sweep_log import SweepResult
from sandboxes.templates.build_log import BuildLog
from sandboxes.templates.specifications import BASE_ARGUMENT, TemplateSpecification, validate_name

log = structlog.get_logger(__name__)
BUILD_SILENCE = timedelta(minutes=10)  # without output, after which a build is given up
BUILD_CLAIM_TTL = BUILD_SILENCE + timedelta(minutes=2)
QUEUE_GRACE = timedelta(minutes=2)  # for a queued build to begin, before a sweep queues it again
MAX_ATTEMPTS = 3
MAX_IMAGE_ID_CHARS = 100  # as in its column
MAX_REMOVED_BUILDS = 10  # looked up at a vendor when a template is removed
MAX_OUTPUT_CHARS = 16_000_000
LOG_INTERVAL = timedelta(seconds=2)  # between two UPDATEs of the log
OnOutput = Callable[[str], object]
ResultT = TypeVar("ResultT")


class BuildFailed(Exception):
    """The build ends with this reason. Another attempt would end in the same way."""

    def __init__(self, failure: TemplateFailure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


def get_build_host(provider_name: str = "", *, now: datetime) -> Host:
    """Return the host, or the vendor's account, on which this process builds images with a provider; empty: the default one.

    Raise TemplatesNotSupported, InvalidTemplate, HostLost, Unavailable."""
    name = provider_name or providers.get_default_provider_name()
    if name not in PROVIDERS:
        raise InvalidTemplate("provider", f"Not a provider. Known: {', '.join(PROVIDERS)}.")
    try:
        provider = providers.get_provider(name)
    except ImproperlyConfigured as error:
        raise InvalidTemplate("provider", str(error)) from error
    if not provider.builds_images:
        message = f"The {name} provider builds no images. {provider.no_builds_reason}".strip()
        raise InvalidTemplate("provider", message) if provider_name else TemplatesNotSupported(message)
    return registry.get_placement_host(name, now=now)


def build_specification(host: Host, *, base: str, commands: Sequence[str], dockerfile: str) -> TemplateSpecification:
    """Return a specification whose base, if none is stated, is the sandbox image of the host's provider.

    Raise InvalidTemplate if that image cannot be the base of a build."""
    default = _get_default_base(host.provider)
    if not base and not dockerfile and not default:
        raise InvalidTemplate("base", f"Required: the default image of {host.provider} cannot be the base of a build.")
    if BASE_ARGUMENT in dockerfile and not default:
        message = f"{BASE_ARGUMENT} has no value: the default image of {host.provider} cannot be the base of a build."
        raise InvalidTemplate("dockerfile", message)
    return TemplateSpecification(base or ("" if dockerfile else default), tuple(commands), dockerfile)


def _get_default_base(provider_name: str) -> str:
    """Return the sandbox image of a provider, if it can be the base of a build."""
    return providers.get_default_image(provider_name) if providers.get_provider(provider_name).has_image_bases else ""


def request(
    name: str, specification: TemplateSpecification, *, host: Host, now: datetime, actor: audit.Actor, rebuild: bool = False
) -> tuple[ImageTemplate, bool]:
    """Return the template of this name and specification on a host, and whether it now waits for a build.

    A version that is ready or being built is returned unchanged, unless `rebuild` asks for a build of a ready version, for
    example on a newer base. A failed version is built again. Raise InvalidTemplate."""
    validate_name(name)
    specification.validate()
    content = {
        "base": specification.base, "commands": [*specification.commands], "dockerfile": specification.dockerfile,
    }  # fmt: skip
    waiting = {"state": TemplateState.BUILDING, "deadline_at": now + QUEUE_GRACE, "requested_by": actor}
    key: dict[str, Any] = {"host": host, "name": name, "version": specification.compute_version()}
    with _end_wait_if_unanswered(ImageTemplate.objects.filter(**key), now=now), transaction.atomic():
        template, is_new = ImageTemplate.objects.get_or_create(**key, defaults={**content, **waiting, "created_at": now})
        is_waiting = is_new or _begin_again(template, waiting, rebuild=rebuild, now=now)
        if is_waiting:
            audit.record(template, "Build template", "" if is_new else "again", actor=actor, now=now)
    if not is_new:
        template.refresh_from_db()
    return template, is_waiting


@contextmanager
def _end_wait_if_unanswered(rows: QuerySet[ImageTemplate], *, now: datetime) -> Iterator[None]:
    """Let the body queue a build. After a connection error the next sweep queues the build, without waiting for QUEUE_GRACE."""
    waiting = rows.filter(state=TemplateState.BUILDING, claim__isnull=True, deadline_at=now + QUEUE_GRACE)
    with end_if_unanswered(partial(waiting.update, deadline_at=now), "queued build"):
        yield


def _begin_again(template: ImageTemplate, waiting: Mapping[str, Any], *, rebuild: bool, now: datetime) -> bool:
    ended = [TemplateState.FAILED, TemplateState.READY] if rebuild else [TemplateState.FAILED]
    idle = ImageTemplate.objects.filter(_build_idle_filter(now), pk=template.pk, state__in=ended)
    begun = idle.update(
        **waiting, failure="", error="", log="", attempts=0, claim=None, claimed_by="", started_at=None, finished_at=None,
        build_number=F("build_number") + 1,
    )  # fmt: skip
    return bool(begun)


def build(pk: uuid.UUID, *, now: datetime, on_output: OnOutput | None = None) -> bool:
    """Build a waiting template, and record the result. Return False if it does not wait, or if the claim was lost.

    `on_output` receives the redacted output. Raise WrongHost if this process does not reach the template's engine."""
    template = ImageTemplate.objects.select_related("host").get(pk=pk)
    provider = _get_provider(template)
    clock, token, deadline = clock_from(now), uuid.uuid4(), now + BUILD_CLAIM_TTL
    rows = ImageTemplate.objects.filter(pk=pk, claim=token)
    claim = Claim(rows, deadline=deadline, clock=clock, ttl=BUILD_CLAIM_TTL)
    with end_if_unanswered(claim.end, claim):
        claimed = ImageTemplate.objects.filter(pk=pk, state=TemplateState.BUILDING, claim__isnull=True).update(
            claim=token, claimed_by=settings.INSTANCE, deadline_at=deadline, attempts=F("attempts") + 1, started_at=now
        )
    if not claimed:
        return False
    try:
        with hold_in_flight(claim):
            checkpoint("template claimed", template)
            _build_claimed(template, provider, claim, rows, clock, on_output)
    except ClaimLost:
        log.warning("template build taken over", template=str(template))
        return False
    return True


def find_due(*, now: datetime) -> QuerySet[ImageTemplate]:
    """Select the overdue builds on hosts that this process reaches: not begun in time, or of a worker that has died."""
    local = ImageTemplate.objects.filter(host__in=registry.find_local_host_ids())
    due = local.filter(state=TemplateState.BUILDING, deadline_at__lte=now)
    return due.select_related("host").order_by("deadline_at")


def release_due(*, now: datetime, limit: int = 50) -> tuple[SweepResult, list[ImageTemplate]]:
    """Release the claims of overdue builds, and return the templates that have to be queued again.

    After MAX_ATTEMPTS the build has failed."""
    result, released = SweepResult(), list[ImageTemplate]()
    for template in find_due(now=now)[:limit]:
        due = ImageTemplate.objects.filter(pk=template.pk, state=TemplateState.BUILDING, deadline_at__lte=now)
        if template.attempts >= MAX_ATTEMPTS:
            message = template.error or "The process that built the image ended."
            result.note("template builds failed", _record_failure(due, TemplateFailure.ABANDONED, message, now=now))
            continue
        with _end_wait_if_unanswered(ImageTemplate.objects.filter(pk=template.pk), now=now):
            is_released = due.update(claim=None, claimed_by="", deadline_at=now + QUEUE_GRACE)
        if is_released:
            released.append(template)
            result.note("template builds queued again")
    return result, released


def remove(template: ImageTemplate, *, now: datetime, actor: audit.Actor = audit.CONTROL_PLANE) -> None:
    """Remove a template and its image. Idempotent: an image that is gone already is success.

    Raise TemplateInUse if a pool names the image or a sandbox was started from it, TemplateBusy during a build, WrongHost."""
    provider = _get_provider(template)
    if Pool.objects.filter(image=template.tag).exists():
        raise TemplateInUse(f"A pool uses the image {template.tag}. Set another image first.")
    if Sandbox.objects.filter(image=template.tag).exclude(state=SandboxState.DESTROYED).exists():
        raise TemplateInUse(f"A sandbox was started from the image {template.tag}. End its lease first.")
    token = uuid.uuid4()
    idle = ImageTemplate.objects.filter(_build_idle_filter(now), pk=template.pk).exclude(state=TemplateState.BUILDING)
    claimed = ImageTemplate.objects.filter(pk=template.pk, claim=token)
    end = partial(claimed.update, claim=None, claimed_by="", deadline_at=None)
    with end_if_unanswered(end, template):
        if not idle.update(claim=token, claimed_by=settings.INSTANCE, deadline_at=now + CLAIM_TTL):
            raise TemplateBusy()
    try:
        require_engine(provider, template.host_id)
        _remove_images(template, provider)
    except ProviderError as error:
        end()
        if isinstance(error, ImageInUse):
            raise TemplateInUse(str(error)) from error
        raise
    with transaction.atomic():
        audit.record(template, "Remove template", actor=actor, now=now)
        claimed.delete()


def _remove_images(template: ImageTemplate, provider: Provider) -> None:
    """Remove the image of a template, and what its last builds have left. Raise ImageInUse, Unavailable."""
    if not _is_vendor(template):
        provider.remove_image(template.tag)
        provider.remove_build(_get_build_name(template))
        return
    if template.image_id:
        provider.remove_image(template.image_id)
    for number in range(max(template.build_number - MAX_REMOVED_BUILDS, 0), template.build_number):
        provider.remove_build(_get_build_name(template, number + 1))


def _is_vendor(template: ImageTemplate) -> bool:
    return template.host.provider in settings.REMOTE_PROVIDERS


def _get_provider(template: ImageTemplate) -> Provider:
    """Return the provider of the template's host. Raise WrongHost if this process does not reach that host."""
    if registry.get_local_host_id(template.host.provider) != template.host_id:
        raise WrongHost(f'The template is on the host "{template.host}", which this process does not reach.')
    return providers.get_provider(template.host.provider)


def _build_idle_filter(now: datetime) -> Q:
    """Match rows that no process is building or removing. The claim of a removal whose process died ends at its deadline."""
    return Q(claim__isnull=True) | Q(deadline_at__lte=now)


def _build_claimed(
    template: ImageTemplate,
    provider: Provider,
    claim: Claim,
    rows: QuerySet[ImageTemplate],
    clock: Clock,
    on_output: OnOutput | None,
) -> None:
    """Run the build under the claim, and record its result. An engine that fails leaves the row to the next attempt."""
    vendor_keys = [configuration.api_key for configuration in settings.REMOTE_PROVIDERS.values()]
    output = _Output(BuildLog([settings.LLM_API_KEY, settings.SECRET_KEY, *vendor_keys]), claim, clock, on_output)
    try:
        require_engine(provider, template.host_id)
        _build_image(template, provider, claim, rows, output)
    except BuildFailed as failed:
        output.end()
        _record_failure(rows, failed.failure, output.log.redact(str(failed)), now=clock(), log=output.log.render())
    except ProviderError as error:
        output.end()
        claim.update(error=output.log.redact(str(error)), log=output.log.render())
        claim.end()


def _build_image(
    template: ImageTemplate, provider: Provider, claim: Claim, rows: QuerySet[ImageTemplate], output: "_Output"
) -> None:
    """Build and check an image, then move the template's name to it. Raise BuildFailed, ProviderError, ClaimLost."""
    specification = TemplateSpecification(template.base, template.commands, template.dockerfile)
    build_name, built = _get_build_name(template), None
    try:
        if specification.base:
            with _translate_failures(TemplateFailure.BASE_UNAVAILABLE):
                output.follow(provider.pull_image(specification.base))
        arguments = {BASE_ARGUMENT: _get_default_base(provider.name)} if BASE_ARGUMENT in specification.dockerfile else {}
        labels = {"leasehold.template": template.name, "leasehold.template_version": template.version}
        with _translate_failures(TemplateFailure.BUILD_REFUSED):
            built = output.follow(
                provider.build_image(
                    specification.render_dockerfile(provider.build_user),
                    build_name,
                    arguments=arguments,
                    labels=labels,
                    silence=BUILD_SILENCE,
                    use_cache=not template.image_id,  # a ready version is built again for newer packages
                )
            )
        checkpoint("template built", template)
        claim.keep()
        oversized = ["The image's identity is too long."] if len(built.id) > MAX_IMAGE_ID_CHARS else []
        if problems := oversized or provider.check_image(built):
            raise BuildFailed(TemplateFailure.UNUSABLE_IMAGE, "; ".join(problems))
        claim.keep()
        provider.tag_image(build_name, template.tag)
        checkpoint("template named", template)
        output.end()
        _record_success(template, rows, built, output.log.render(), now=output.clock())
    except BuildFailed:
        with suppress(ProviderError):
            provider.remove_build(build_name)
            if built and _is_vendor(template):
                provider.remove_image(built.id)
        raise
    with suppress(ProviderError):  # a build before that was given up
        _remove_earlier_build(template, provider)
    if template.image_id not in ("", built.id):
        with suppress(ProviderError):  # the previous image of a rebuilt template, unless a container uses it
            provider.remove_image(template.image_id)


def _get_build_name(template: ImageTemplate, number: int | None = None) -> str:
    """Return the name of a build, by default of the last one. With Docker each attempt replaces what a dead one has left."""
    return f"{template.tag}-{number or template.build_number}" if _is_vendor(template) else f"{template.tag}-candidate"


def _remove_earlier_build(template: ImageTemplate, provider: Provider) -> None:
    if _is_vendor(template) and template.build_number > 1:
        provider.remove_build(_get_build_name(template, template.build_number - 1))


def _record_success(
    template: ImageTemplate, rows: QuerySet[ImageTemplate], built: BuiltImage, log_text: str, *, now: datetime
) -> None:
    """Raise ClaimLost if another process has taken over."""
    recorded = rows.update(
        state=TemplateState.READY, image=template.tag, image_id=built.id, size_bytes=built.size_bytes, log=log_text,
        finished_at=now, failure="", error="", claim=None, claimed_by="", deadline_at=None,
    )  # fmt: skip
    if not recorded:
        raise ClaimLost()


def _record_failure(
    rows: QuerySet[ImageTemplate], failure: TemplateFailure, message: str, *, now: datetime, **changes: str
) -> int:
    with transaction.atomic():
        return rows.update(
            state=TemplateState.FAILED, failure=failure, error=message, finished_at=now, claim=None, claimed_by="",
            deadline_at=None, **changes,
        )  # fmt: skip


@contextmanager
def _translate_failures(refused: TemplateFailure) -> Iterator[None]:
    """Raise BuildFailed for what another attempt cannot change: a refusal of the engine, or a build without progress."""
    try:
        yield
    except BuildCommandFailed as error:
        raise BuildFailed(TemplateFailure.COMMAND_FAILED, str(error)) from error
    except Rejected as error:
        raise BuildFailed(refused, str(error)) from error
    except Unavailable as error:
        if error.cause != FailureCause.TIMEOUT:
            raise
        minutes = int(BUILD_SILENCE.total_seconds() // 60)
        raise BuildFailed(TemplateFailure.NO_PROGRESS, f"The build printed nothing for {minutes} minutes.") from error


class _Output:
    """Output of one build: counted as progress of the claim, kept in the log, written to the row and passed on."""

    def __init__(self, log: BuildLog, claim: Claim, clock: Clock, on_output: OnOutput | None) -> None:
        self.log, self.clock, self._claim, self._on_output = log, clock, claim, on_output
        self._written_at = clock()

    def follow(self, chunks: Generator[str, None, ResultT]) -> ResultT:
        """Read all output, and return the result of the generator.

        Raise BuildFailed above MAX_OUTPUT_CHARS, ClaimLost once another process has taken over."""
        try:
            while True:
                try:
                    chunk = next(chunks)
                except StopIteration as stop:
                    return cast(ResultT, stop.value)
                note_progress()
                self._pass_on(self.log.append(chunk))
                if self.log.total_chars > MAX_OUTPUT_CHARS:
                    raise BuildFailed(TemplateFailure.OUTPUT_LIMIT, f"More than {MAX_OUTPUT_CHARS:,} characters of output.")
                if self.clock() >= self._written_at + LOG_INTERVAL:
                    self._write()
        finally:
            chunks.close()  # ends the build at the engine

    def end(self) -> None:
        self._pass_on(self.log.end())

    def _write(self) -> None:
        if not self._claim.update(log=self.log.render()):
            raise ClaimLost()
        self._written_at = self.clock()

    def _pass_on(self, text: str) -> None:
        if text and self._on_output:
            self._on_output(text)
