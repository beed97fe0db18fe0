"""manage.py template: build, list, show and remove image templates."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from leases.management.base import report_errors
from sandboxes import audit
from sandboxes.db import database_time
from sandboxes.errors import TemplateNotFound
from sandboxes.models import ImageTemplate, TemplateState
from sandboxes.templates import builds


class Command(BaseCommand):
    help = "Build, list, show or remove image templates: sandbox images from a base and commands, or from a Dockerfile."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        build = actions.add_parser("build", help="build an image in this process, unless this version exists")
        build.add_argument("name", help="lower-case letters, digits and hyphens")
        build.add_argument(
            "--base", default="", metavar="IMAGE", help="image that the commands extend; default: the sandbox image"
        )
        build.add_argument(
            "--run", action="append", default=[], metavar="COMMAND", help="shell command, run as root; repeatable"
        )
        build.add_argument("--provider", default="", help="provider that builds the image; default: SANDBOX_PROVIDER")
        build.add_argument("--dockerfile", metavar="PATH", help="Dockerfile, instead of --base and --run")
        build.add_argument("--rebuild", action="store_true", help="build a version again that is ready")
        actions.add_parser("list", help="print the versions of all templates")
        for name, description in (
            ("show", "print the specification and the state of a version"),
            ("log", "print the build log of a version"),
            ("remove", "remove a version and its image"),
        ):
            action = actions.add_parser(name, help=description)
            action.add_argument("template", help="NAME for the newest version, or NAME:VERSION with the beginning of a version")

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        with report_errors(options["verbosity"]):
            if action == "build":
                self._build(options)
            elif action == "list":
                for template in ImageTemplate.objects.select_related("host").defer("log"):
                    self.stdout.write(_describe(template))
            elif action == "show":
                self._show(_find(options["template"]))
            elif action == "log":
                self.stdout.write(_find(options["template"]).log, ending="")
            else:
                template = _find(options["template"])
                builds.remove(template, now=database_time.now(), actor=audit.COMMAND_LINE)
                self.stdout.write(f"removed: {template}")

    def _build(self, options: dict[str, Any]) -> None:
        now = database_time.now()
        host = builds.get_build_host(options["provider"], now=now)
        dockerfile = _read_dockerfile(options["dockerfile"]) if options["dockerfile"] else ""
        specification = builds.build_specification(host, base=options["base"], commands=options["run"], dockerfile=dockerfile)
        template, _ = builds.request(
            options["name"], specification, host=host, now=now, actor=audit.COMMAND_LINE, rebuild=options["rebuild"]
        )
        if template.state == TemplateState.READY:
            self.stdout.write(f"up to date: {_describe(template)}")
            return
        builds.build(template.pk, now=now, on_output=lambda text: self.stdout.write(text, ending=""))
        template.refresh_from_db()
        if template.state == TemplateState.FAILED:
            raise CommandError(f"{template}: {template.get_failure_display()}: {template.error}")
        if template.state == TemplateState.BUILDING:
            reason = template.error or "another process builds it"
            raise CommandError(f"{template} is not built yet: {reason}. See: manage.py template show {template}")
        self.stdout.write(f"built: {_describe(template)}")

    def _show(self, template: ImageTemplate) -> None:
        self.stdout.write(_describe(template))
        self.stdout.write(f"version: {template.version}\nhost: {template.host}\nprovider: {template.host.provider}")
        if template.error:
            self.stdout.write(f"error: {template.get_failure_display()}: {template.error}")
        if template.dockerfile:
            self.stdout.write(template.dockerfile)
            return
        self.stdout.write("\n".join([f"base: {template.base}", *(f"run: {command}" for command in template.commands)]))


def _read_dockerfile(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--dockerfile: {error}") from None


def _find(text: str) -> ImageTemplate:
    """Return the newest version of a template whose version begins as stated. Raise TemplateNotFound."""
    name, _, version = text.partition(":")
    found = ImageTemplate.objects.filter(name=name, version__startswith=version).select_related("host")
    template = found.order_by("-created_at").first()
    if template is None:
        raise TemplateNotFound(f"There is no image template {text[:80]}.")
    return template


def _describe(template: ImageTemplate) -> str:
    size = (
        f"{template.size_bytes / 1e6:.0f} MB"
        if template.size_bytes is not None
        else "no size"
        if template.image
        else "no image"
    )
    return f"{template}  {template.state}  {template.image or '-'}  {size}  {template.host}"
