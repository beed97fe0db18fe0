"""manage.py pack: list, check, add and upgrade environment packs."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from leases.management.base import report_errors
from leases.packs import installation
from leases.packs.check import check_pack
from leases.packs.folder import SHIPPED_DIRECTORY, PackFolder, read_folder
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.models import PackAssignment, PackVersion


class Command(BaseCommand):
    help = "List, check, add or upgrade environment packs. Prints one line per version or environment type."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("list", help="print the stored versions and the environment types that use them")
        check = actions.add_parser("check", help="play the pack's examples; executes its turn script as the current user")
        check.add_argument("folder", help="folder of a pack, or the name of a shipped pack")
        add = actions.add_parser("add", help="store a version; an environment type without a pack uses it at once")
        add.add_argument("folder", help="folder of a pack")
        add.add_argument("--type", metavar="NAME", help="environment type; default: the name of the pack")
        upgrade = actions.add_parser("upgrade", help="let the environment types of a pack use its newest version")
        upgrade.add_argument("pack", help="name of a pack")
        upgrade.add_argument("--to", metavar="VERSION", default="", help="another version, also an older one")
        upgrade.add_argument("--type", metavar="NAME", help="only this environment type")
        for subparser in (add, upgrade):
            subparser.add_argument("--dry-run", action="store_true", help="print the changes without making them")

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        with report_errors(options["verbosity"]):
            if action == "list":
                self._list()
            elif action == "check":
                self._check(_read(options["folder"]))
            elif action == "add":
                self._add(_read(options["folder"]), options["type"], options["dry_run"])
            else:
                version = installation.find_version(options["pack"], options["to"])
                types = [options["type"]] if options["type"] else installation.list_environment_types(options["pack"])
                for name in types or [options["pack"]]:
                    self._assign(version, name, options["dry_run"])

    def _list(self) -> None:
        types: dict[int, list[str]] = {}
        for assignment in PackAssignment.objects.all():
            types.setdefault(assignment.version_id, []).append(assignment.environment_type)
        for version in PackVersion.objects.defer("archive", "schemas"):
            used = ", ".join(types.get(version.pk, [])) or "not used"
            self.stdout.write(f"{version}  {version.origin}  {version.digest[:12]}  {used}  {version.description}")

    def _check(self, folder: PackFolder) -> None:
        result = check_pack(folder)
        for problem in result.problems:
            self.stderr.write(problem)
        if result.problems:
            raise CommandError(f"{folder.name} {folder.version}: {len(result.problems)} problems in {result.turns} turns.")
        self.stdout.write(f"{folder.name} {folder.version}: {result.turns} turns played, no problems")

    def _add(self, folder: PackFolder, environment_type: str | None, dry_run: bool) -> None:
        if dry_run:
            self.stdout.write(f"would store {folder.name} {folder.version}, {len(folder.skill)} files")
            return
        now = database_time.now()
        version, is_new = installation.add_version(folder, now=now, actor=COMMAND_LINE)
        self.stdout.write(f"{'stored' if is_new else 'already stored'}: {version}, {len(version.files)} files")
        name = environment_type or folder.name
        assignment = PackAssignment.objects.filter(environment_type=name).select_related("version").first()
        if assignment is None:
            self._assign(version, name, dry_run)
        elif assignment.version_id != version.pk:
            self.stdout.write(f"{name} uses {assignment.version}. To change it: manage.py pack upgrade {folder.name}")

    def _assign(self, version: PackVersion, environment_type: str, dry_run: bool) -> None:
        now = database_time.now()
        assigned = installation.assign(version, environment_type, now=now, dry_run=dry_run, actor=COMMAND_LINE)
        changes = [f"{name}={value}" for name, value in assigned.changed.items()]
        kept = [f"kept {name}" for name in assigned.kept]
        was = assigned.was or "no pack"
        self.stdout.write(
            f"{'would assign' if dry_run else 'assigned'}: {environment_type}: {was} -> {version}"
            + "".join(f"; {each}" for each in [*changes, *kept])
        )


def _read(folder: str) -> PackFolder:
    path = Path(folder)
    if not path.is_dir() and "/" not in folder and (SHIPPED_DIRECTORY / folder).is_dir():
        path = SHIPPED_DIRECTORY / folder
    return read_folder(path)
