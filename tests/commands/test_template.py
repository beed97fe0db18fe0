"""manage.py template: options, output and errors. The builds themselves: tests/docker/test_templates.py."""

from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from sandboxes.hosts import registry
from sandboxes.models import ImageTemplate
from sandboxes.providers.memory import MemoryProvider

pytestmark = pytest.mark.django_db


def run(*args: str) -> str:
    out = StringIO()
    call_command(*args, stdout=out)
    return out.getvalue()


@pytest.fixture
def template(memory: MemoryProvider) -> ImageTemplate:
    return ImageTemplate.objects.create(
        host=registry.get_local_host("memory", now=timezone.now()), name="tools", version="ab" * 32, base="debian",
        commands=["true"], state="failed", failure="command_failed", error="code 1", log="Step 1/3\n",
    )  # fmt: skip


def test_a_version_is_listed_and_shown(template: ImageTemplate) -> None:
    line = f"tools:abababababab  failed  -  no image  {template.host}\n"
    assert run("template", "list") == line
    shown = run("template", "show", "tools")
    assert shown.startswith(line)
    assert shown.endswith("error: a command failed: code 1\nbase: debian\nrun: true\n")
    assert run("template", "log", "tools:abab") == "Step 1/3\n"


def test_unknown_template_invalid_name_and_unreadable_file_are_errors(
    template: ImageTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["log", "other"], ["show", "tools:cd"]):
        with pytest.raises(CommandError, match="There is no image template"):
            run("template", *command)
    with pytest.raises(CommandError, match="builds no images"):
        run("template", "build", "tools", "--run", "true")
    monkeypatch.setattr(MemoryProvider, "builds_images", True)
    with pytest.raises(CommandError, match=r"--dockerfile: .*No such file"):
        run("template", "build", "tools", "--dockerfile", str(tmp_path / "none"))
    with pytest.raises(CommandError, match="Lower-case letters"):
        run("template", "build", "Tools", "--run", "true")
