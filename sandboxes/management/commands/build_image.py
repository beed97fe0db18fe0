"""manage.py build_image: the image that new sandboxes are made from."""

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
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
CA_DIRECTORY = Path("/usr/local/share/ca-certificates")  # this machine's own, beside those that its system brings
DEFAULT_BASE_IMAGE, LOCAL_BASE_IMAGE = "python:3.12-slim-bookworm", "leasehold-base:bookworm"
BASE_PACKAGES = "python3,python3-pip,ca-certificates,git,bash,procps,curl"
CONTEXT_LABEL = "leasehold.context"  # hash of everything that went into an image
BUILD_TIMEOUT_SECONDS = 900  # seconds in which a step of the build may print nothing


class Command(BaseCommand):
    help = "Build the image of sandboxes, and the one of the egress proxy, unless they are up to date."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--base", help=f"image to build on; default: {DEFAULT_BASE_IMAGE}, else a Debian made here")
        parser.add_argument("--tag", default=settings.SANDBOX_IMAGE, help="name of the result; default: %(default)s")
        parser.add_argument("--no-cache", action="store_true", help="build every step again, even if nothing changed")

    def handle(self, *args: Any, base: str | None, tag: str, no_cache: bool, verbosity: int, **options: Any) -> None:
        try:
            self.client = APIClient(**kwargs_from_env(), version="auto", timeout=BUILD_TIMEOUT_SECONDS)
        except (DockerException, RequestException) as error:
            raise CommandError(f"No Docker daemon answers: {error}") from error
        try:
            found = self._base(base)
            self.stdout.write(self._build(found, tag, _build_context(), no_cache, verbosity))
            self.stdout.write(self._build(found, settings.EGRESS_IMAGE, nginx.build_image_context(found), no_cache, verbosity))
        except (DockerException, RequestException) as error:
            raise CommandError(f"{tag} could not be built: {error}") from error

    def _build(self, base: str, tag: str, context: bytes, no_cache: bool, verbosity: int) -> str:
        started = time.monotonic()
        stamp = hashlib.sha256(context + self.client.inspect_image(base)["Id"].encode()).hexdigest()
        if not no_cache and self._stamp(tag) == stamp:
            return f"{tag}: up to date"
        self.stdout.write(f"building {tag} on {base}")
        said: list[str] = []
        for step in self.client.build(
            fileobj=io.BytesIO(context),
            custom_context=True,
            decode=True,
            tag=tag,
            nocache=no_cache,
            rm=True,
            forcerm=True,
            buildargs={"BASE_IMAGE": base},
            labels={CONTEXT_LABEL: stamp},
        ):
            said.append(step.get("stream", ""))
            if said[-1].startswith("Step ") or verbosity > 1:
                self.stdout.write(said[-1].rstrip())
            if "error" in step:
                raise CommandError(f"{''.join(said[-40:])}\n{tag} could not be built: {step['error'].strip()}")
        megabytes = self.client.inspect_image(tag)["Size"] / 1e6
        return f"{tag}: built on {base} in {time.monotonic() - started:.0f} s, {megabytes:.0f} MB"

    def _stamp(self, tag: str) -> str | None:
        try:
            return (self.client.inspect_image(tag)["Config"].get("Labels") or {}).get(CONTEXT_LABEL)
        except ImageNotFound:
            return None

    def _base(self, wanted: str | None) -> str:
        """The image to build on, which exists afterwards: what is here before what must be fetched."""
        for name in [wanted] if wanted else [DEFAULT_BASE_IMAGE, LOCAL_BASE_IMAGE]:
            try:
                self.client.inspect_image(name)
                return name
            except ImageNotFound:
                pass
        name = wanted or DEFAULT_BASE_IMAGE
        self.stdout.write(f"pulling {name}")
        try:
            self.client.pull(*_split_image_name(name))
            return name
        except APIError as error:
            why = error.explanation or error
            if wanted:
                raise CommandError(f"{wanted} is not here and cannot be pulled: {why}") from error
            self.stdout.write(f"it cannot be pulled ({why}); making {LOCAL_BASE_IMAGE} with mmdebstrap instead")
        return self._make_base()

    def _make_base(self) -> str:
        if not shutil.which("mmdebstrap"):
            if os.geteuid() != 0 or not shutil.which("apt-get"):
                raise CommandError("mmdebstrap is not installed. Install it, or give --base an image that is here.")
            self.stdout.write("installing mmdebstrap")
            self._run(["apt-get", "install", "-y", "--no-install-recommends", "mmdebstrap"])
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory, "base.tar")
            self._run(["mmdebstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(root)])
            self.client.import_image_from_file(str(root), *_split_image_name(LOCAL_BASE_IMAGE))
        self.stdout.write(f"made {LOCAL_BASE_IMAGE}")
        return LOCAL_BASE_IMAGE

    def _run(self, argv: list[str]) -> None:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise CommandError(f"{argv[0]} failed:\n{done.stderr[-4000:]}")


def _split_image_name(name: str) -> tuple[str, str]:
    """(repository, tag) of an image's name; a colon before the last slash belongs to a port."""
    head, slash, last = name.rpartition("/")
    repository, _, tag = last.partition(":")
    return head + slash + repository, tag or "latest"


def _build_context() -> bytes:
    """The build context as a tar, byte for byte the same for the same files."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        ca = tarfile.TarInfo("ca")  # there even when empty: COPY insists on it
        ca.type, ca.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(ca)
        for name, path in sorted(_list_sources()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = path.stat().st_size, 0o644
            tar.addfile(member, io.BytesIO(path.read_bytes()))
    return whole.getvalue()


def _list_sources() -> Iterator[tuple[str, Path]]:
    for path in IMAGE_DIRECTORY.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.name != "__init__.py":
            yield path.relative_to(IMAGE_DIRECTORY).as_posix(), path
    for path in CA_DIRECTORY.glob("*.crt"):
        yield f"ca/{path.name}", path
