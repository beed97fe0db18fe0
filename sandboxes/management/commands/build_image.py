"""manage.py build_image: builds the images of sandboxes and of the egress proxy."""

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from docker import APIClient
from docker.errors import APIError, DockerException, ImageNotFound
from docker.utils import kwargs_from_env
from requests.exceptions import RequestException

from sandboxes.egress import nginx

IMAGE_DIRECTORY = Path(__file__).resolve().parents[2] / "image"
CA_DIRECTORY = Path("/usr/local/share/ca-certificates")  # certificates installed by the host's administrator
DEFAULT_BASE_IMAGE, LOCAL_BASE_IMAGE = "python:3.12-slim-bookworm", "leasehold-base:bookworm"
BASE_PACKAGES = "python3,python3-pip,ca-certificates,git,bash,procps,curl"
CONTENTS_PATH = "/opt/leasehold/CONTENTS"
CONTEXT_LABEL = "leasehold.context"  # digest of build context and base image
NPM_DOCKERFILE = "npm.Dockerfile"
NPM_PACKAGE_PATTERN = re.compile(r"(@[a-z0-9._-]+/)?[a-z0-9][a-z0-9._-]*(@[A-Za-z0-9._^~-]+)?")  # words of a shell command
BUILD_TIMEOUT_SECONDS = 900  # without output from a build step


class Command(BaseCommand):
    help = "Build the images of sandboxes and of the egress proxy unless they are up to date."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--base", help=f"base image; default: {DEFAULT_BASE_IMAGE}, or a local Debian image if it cannot be pulled"
        )
        parser.add_argument("--tag", default=settings.SANDBOX_IMAGE, help="tag of the sandbox image; default: %(default)s")
        parser.add_argument(
            "--contents", action="store_true", help="print the tools and packages of the built sandbox image; build nothing"
        )
        parser.add_argument(
            "--npm", metavar="PACKAGE", action="append", default=[],
            help="build another image, with this npm package on top of the sandbox image; needs --tag; may be repeated",
        )  # fmt: skip
        parser.add_argument("--no-cache", action="store_true", help="rebuild every step even if nothing changed")

    def handle(
        self,
        *args: Any,
        base: str | None,
        tag: str,
        contents: bool,
        npm: list[str],
        no_cache: bool,
        verbosity: int,
        **options: Any,
    ) -> None:
        if npm and tag == settings.SANDBOX_IMAGE:
            raise CommandError("--npm needs --tag: the name of the other image.")
        if invalid := [name for name in npm if not NPM_PACKAGE_PATTERN.fullmatch(name)]:
            raise CommandError(f"not an npm package: {invalid[0]}")
        try:
            self.client = APIClient(**kwargs_from_env(), version="auto", timeout=BUILD_TIMEOUT_SECONDS)
        except (DockerException, RequestException) as error:
            raise CommandError(f"The Docker daemon is unavailable: {error}") from error
        try:
            if contents:
                self.stdout.write(self._read_contents(tag), ending="")
                return
            if npm:
                base = base or settings.SANDBOX_IMAGE
                self.client.inspect_image(base)  # raises ImageNotFound
                arguments = {"NPM_PACKAGES": " ".join(npm)}
                self.stdout.write(self._build(base, tag, _build_npm_context(npm), no_cache, verbosity, arguments))
                return
            base = self._find_base_image(base)
            self.stdout.write(self._build(base, tag, _build_context(), no_cache, verbosity))
            self.stdout.write(self._build(base, settings.EGRESS_IMAGE, nginx.build_image_context(base), no_cache, verbosity))
        except (DockerException, RequestException) as error:
            action = "read" if contents else "built"
            raise CommandError(f"{tag} could not be {action}: {error}") from error

    def _read_contents(self, tag: str) -> str:
        """Return the index that contents.py wrote at build. The image need not run: it may be of another architecture."""
        container = self.client.create_container(tag, network_disabled=True)["Id"]
        try:
            chunks, _ = self.client.get_archive(container, CONTENTS_PATH)
            with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
                file = tar.extractfile("CONTENTS")
                return file.read().decode() if file else ""
        finally:
            self.client.remove_container(container, force=True)

    def _build(
        self, base: str, tag: str, context: bytes, no_cache: bool, verbosity: int, arguments: Mapping[str, str] | None = None
    ) -> str:
        started = time.monotonic()
        digest = hashlib.sha256(context + self.client.inspect_image(base)["Id"].encode()).hexdigest()
        if not no_cache and self._get_digest(tag) == digest:
            return f"{tag}: up to date"
        self.stdout.write(f"building {tag} on {base}")
        output: list[str] = []
        for step in self.client.build(
            fileobj=io.BytesIO(context),
            custom_context=True,
            decode=True,
            tag=tag,
            nocache=no_cache,
            rm=True,
            forcerm=True,
            buildargs={"BASE_IMAGE": base, **(arguments or {})},
            labels={CONTEXT_LABEL: digest},
        ):
            output.append(step.get("stream", ""))
            if output[-1].startswith("Step ") or verbosity > 1:
                self.stdout.write(output[-1].rstrip())
            if "error" in step:
                raise CommandError(f"{''.join(output[-40:])}\n{tag} could not be built: {step['error'].strip()}")
        megabytes = self.client.inspect_image(tag)["Size"] / 1e6
        return f"{tag}: built on {base} in {time.monotonic() - started:.0f} s, {megabytes:.0f} MB"

    def _get_digest(self, tag: str) -> str | None:
        try:
            return (self.client.inspect_image(tag)["Config"].get("Labels") or {}).get(CONTEXT_LABEL)
        except ImageNotFound:
            return None

    def _find_base_image(self, requested: str | None) -> str:
        """Return a base image that exists locally, after pulling it or building it with mmdebstrap if necessary."""
        for name in [requested] if requested else [DEFAULT_BASE_IMAGE, LOCAL_BASE_IMAGE]:
            try:
                self.client.inspect_image(name)
                return name
            except ImageNotFound:
                pass
        name = requested or DEFAULT_BASE_IMAGE
        self.stdout.write(f"pulling {name}")
        try:
            self.client.pull(*_split_image_name(name))
            return name
        except APIError as error:
            reason = error.explanation or error
            if requested:
                raise CommandError(f"{requested} does not exist locally and cannot be pulled: {reason}") from error
            self.stdout.write(f"{name} cannot be pulled ({reason}); building {LOCAL_BASE_IMAGE} with mmdebstrap instead")
        return self._build_base_image()

    def _build_base_image(self) -> str:
        if not shutil.which("mmdebstrap"):
            if os.geteuid() != 0 or not shutil.which("apt-get"):
                raise CommandError("mmdebstrap is not installed. Install it, or pass an existing image as --base.")
            self.stdout.write("installing mmdebstrap")
            self._run(["apt-get", "install", "-y", "--no-install-recommends", "mmdebstrap"])
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory, "base.tar")
            output = self._run(["mmdebstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(root)])
            if not root.is_file():  # docker-py would take the path for a URL
                raise CommandError(f"mmdebstrap has written no archive:\n{output[-4000:]}")
            self.client.import_image_from_file(str(root), *_split_image_name(LOCAL_BASE_IMAGE))
        self.stdout.write(f"built {LOCAL_BASE_IMAGE}")
        return LOCAL_BASE_IMAGE

    def _run(self, argv: list[str]) -> str:
        """Return the text that the program writes to stderr. Raise CommandError if it fails."""
        result = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if result.returncode:
            raise CommandError(f"{argv[0]} failed:\n{result.stderr[-4000:]}")
        return result.stderr


def _split_image_name(name: str) -> tuple[str, str]:
    """Split an image name into (repository, tag). A colon before the last slash belongs to a port."""
    head, slash, last = name.rpartition("/")
    repository, _, tag = last.partition(":")
    return head + slash + repository, tag or "latest"


def _build_context() -> bytes:
    """Return the build context as a tar. Deterministic for given file contents."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        ca = tarfile.TarInfo("ca")  # always present: COPY fails without it
        ca.type, ca.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(ca)
        for name, path in sorted(_list_sources()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = path.stat().st_size, 0o644
            tar.addfile(member, io.BytesIO(path.read_bytes()))
    return archive.getvalue()


def _build_npm_context(packages: list[str]) -> bytes:
    """Return the build context of an image with npm packages. The packages are part of its digest."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in (
            ("Dockerfile", (IMAGE_DIRECTORY / NPM_DOCKERFILE).read_bytes()),
            ("packages", "\n".join(packages).encode()),
        ):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def _list_sources() -> Iterator[tuple[str, Path]]:
    for path in IMAGE_DIRECTORY.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.name not in ("__init__.py", NPM_DOCKERFILE):
            yield path.relative_to(IMAGE_DIRECTORY).as_posix(), path
    for path in CA_DIRECTORY.glob("*.crt"):
        yield f"ca/{path.name}", path
