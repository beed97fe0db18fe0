"""Command line of the checks: python -m tests.lint. Prints a line for each finding, and exits with 1 if there is one."""

import os
import sys


def main() -> int:
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    import django

    django.setup()
    from tests.lint import base, migrations

    commit = base.find_base()
    if not commit:
        print(f"Migrations are not compared: {base.NO_BASE}")
        return 0
    findings = migrations.check(commit)
    for finding in findings:
        print(finding)
    if findings:
        print(f"{len(findings)} findings against {commit[:12]}. See docs/extending.md, section Migrations.")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
