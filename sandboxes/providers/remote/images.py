"""Builds of images at vendors: the common part of looking a build up, following its log and checking its image.

A build has a name, which its vendor stores. A build whose process has died, or whose create has no known outcome, is therefore
found again by its name. A vendor's own name of a build has letters, digits and hyphens alone, which all vendors accept."""

import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from django.conf import settings

from sandboxes.providers.base import TEMPLATE_TAG_PREFIX, BuiltImage, SandboxSpec, VendorIntervals
from sandboxes.providers.errors import (
    BuildCommandFailed,
    FailureCause,
    ImageInUse,
    ProviderError,
    Rejected,
    Unavailable,
)
from sandboxes.providers.remote.errors import Conflict, NotFound
from sandboxes.providers.remote.provider import TRANSIENT_CAUSES, RemoteProvider

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 3.0  # between two looks at a build
MAX_LOOK_FAILURES = 5  # in succession, before the build is left to the next attempt
CHECK_LIFETIME = timedelta(minutes=10)  # after which the vendor stops, and deletes, the sandbox of a check that has died
CHECK_MEMORY_MIB, CHECK_MILLICPUS = 1024, 1000


class BuildState(StrEnum):
    RUNNING = "running"
    READY = "ready"
    COMMAND_FAILED = "command_failed"
    REFUSED = "refused"


@dataclass
class VendorBuild:
    """Build at a vendor, as of the last look. `position` is the end of the part of its log that was read, in its unit."""

    id: str
    state: BuildState
    note: str = ""  # the vendor's own state, shown in the log
    error: str = ""
    size_bytes: int | None = None
    position: int = 0
    cursor: str = ""  # the same, of a vendor whose unit is no number


class _NoOutput(Exception):
    """A build printed nothing for too long."""


class VendorBuilds(ABC):
    """Calls of one vendor's API for builds. All raise Unavailable, and Rejected for a request that the vendor refuses."""

    @abstractmethod
    def find(self, name: str) -> VendorBuild | None:
        """Return the newest build of this name, in any state."""

    @abstractmethod
    def start(self, name: str, dockerfile: str) -> VendorBuild:
        """Request a build. The outcome is not known after Unavailable."""

    @abstractmethod
    def look(self, build: VendorBuild) -> str:
        """Update the state of a build, and return the part of its log after `position`. Raise Missing, NotFound.

        The log is complete when the state is final."""

    @abstractmethod
    def remove(self, build_id: str) -> None:
        """Remove an image, or a build in any state. Raise NotFound."""


class ImageBuildingProvider(RemoteProvider):
    """Image verbs of a provider whose vendor builds images."""

    builds_images = True
    no_builds_reason = ""

    @property
    @abstractmethod
    def _builds(self) -> VendorBuilds: ...

    def pull_image(self, image: str) -> Generator[str, None, None]:
        yield from ()  # the vendor fetches the base

    def build_image(
        self,
        dockerfile: str,
        build: str,
        *,
        arguments: Mapping[str, str],
        labels: Mapping[str, str],
        silence: timedelta,
        use_cache: bool = True,
    ) -> Generator[str, None, BuiltImage]:
        """Build, or follow a build of this name. The name is new for each request, so `use_cache` is the vendor's decision."""
        name, builds = to_vendor_name(build), self._builds
        with _translate_call_timeouts():
            followed = self._retry(lambda: builds.find(name)) or _start(builds, name, set_arguments(dockerfile, arguments))
        try:
            yield from _follow(builds, followed, silence)
        except _NoOutput as error:
            self._discard(followed)
            raise Unavailable(f"no output of the build {followed.id}", cause=FailureCause.TIMEOUT) from error
        if followed.state == BuildState.READY:
            return BuiltImage(followed.id, followed.size_bytes)
        self._discard(followed)
        raise (BuildCommandFailed if followed.state == BuildState.COMMAND_FAILED else Rejected)(followed.error)

    def _discard(self, build: VendorBuild) -> None:
        with suppress(ProviderError):
            self.remove_image(build.id)

    def check_image(self, image: BuiltImage) -> list[str]:
        """Start a sandbox of the image, and destroy it. Sandboxes of a check that has died are destroyed before."""
        owner = f"template-check-{image.id}"[:63]
        self._remove_checks(owner)
        spec = SandboxSpec(
            name=f"leasehold-check-{uuid.uuid4().hex[:16]}", owner=owner, image_id=image.id,
            memory_mib=CHECK_MEMORY_MIB, millicpus=CHECK_MILLICPUS, intervals=VendorIntervals(CHECK_LIFETIME, CHECK_LIFETIME),
        )  # fmt: skip
        try:
            ref = self.create(spec)
            self.wait_ready(ref, timeout=settings.SANDBOX_START_TIMEOUT)
        except Rejected as error:
            return [str(error)]
        finally:
            with suppress(ProviderError):
                self.destroy(spec.name)
        return []

    def _remove_checks(self, owner: str) -> None:
        for found in self.list(owner):
            self.destroy(found.ref)

    def tag_image(self, build: str, tag: str) -> None:
        return

    def remove_build(self, build: str) -> None:
        if found := self._builds.find(to_vendor_name(build)):
            self.remove_image(found.id)

    def remove_image(self, image: str) -> None:
        try:
            self._builds.remove(image)
        except NotFound:
            with suppress(NotFound):  # the vendor's own document says so twice
                self._builds.remove(image)
        except (Conflict, Rejected) as error:
            raise ImageInUse(str(error)) from error


def to_vendor_name(build: str) -> str:
    """Return the name of a build at a vendor."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", build)


def set_arguments(dockerfile: str, arguments: Mapping[str, str]) -> str:
    """Return a Dockerfile in which build arguments have values, because not every vendor accepts build arguments."""
    for name, value in arguments.items():
        pattern = rf"(?im)^([ \t]*ARG[ \t]+{re.escape(name)})(?:=\S*)?[ \t]*$"
        dockerfile = re.sub(pattern, lambda found, value=value: f"{found[1]}={value}", dockerfile)  # type: ignore[misc]
    return dockerfile


def require_image(spec: SandboxSpec, default: str) -> str:
    """Return the vendor's name of the image of a sandbox that is not a template's. Raise Rejected without the template."""
    if spec.image.startswith(TEMPLATE_TAG_PREFIX) and not spec.image_id:
        raise Rejected(f"{spec.image} is not an image template of this account. Build it with the provider of the pool.")
    return spec.image or default


def _start(builds: VendorBuilds, name: str, dockerfile: str) -> VendorBuild:
    """Request a build. Its name settles an unknown outcome."""
    try:
        return builds.start(name, dockerfile)
    except Unavailable as error:
        if found := builds.find(name):
            return found
        raise error from None


def _follow(builds: VendorBuilds, build: VendorBuild, silence: timedelta) -> Generator[str, None, None]:
    """Yield the log of a build until its end. Raise _NoOutput after `silence` without output, Unavailable, Missing."""
    heard_at, pause, failures, note = time.monotonic(), MIN_PAUSE_SECONDS, 0, ""
    while True:
        try:
            with _translate_call_timeouts():
                text, failures = builds.look(build), 0
        except Unavailable as error:
            failures += 1
            if error.cause not in TRANSIENT_CAUSES or failures >= MAX_LOOK_FAILURES:
                raise
            text = ""
        if build.note not in ("", note):
            note = build.note
            text = f"[{note}]\n{text}"
        if text:
            heard_at, pause = time.monotonic(), MIN_PAUSE_SECONDS
            yield text
        if build.state != BuildState.RUNNING and not failures:
            return
        if time.monotonic() > heard_at + silence.total_seconds():
            raise _NoOutput
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)


@contextmanager
def _translate_call_timeouts() -> Iterator[None]:
    """Raise a call of the API that was not answered in time with another cause than a build without output has."""
    try:
        yield
    except Unavailable as error:
        if error.cause != FailureCause.TIMEOUT:
            raise
        raise Unavailable(str(error), cause=FailureCause.ENGINE_UNREACHABLE) from error


def cut_log(log: str, build: VendorBuild) -> str:
    """Return the part of a complete log after the position of a build, and move the position to its end."""
    text, build.position = log[build.position :], max(len(log), build.position)
    return text
