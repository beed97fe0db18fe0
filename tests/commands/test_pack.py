"""manage.py pack: versions and assignments on the command line."""

import io
import re
import shutil
from pathlib import Path
from shutil import ignore_patterns

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from leases.packs.folder import SHIPPED_DIRECTORY

pytestmark = pytest.mark.django_db


def pack(*args: str) -> list[str]:
    output = io.StringIO()
    call_command("pack", *args, stdout=output, stderr=io.StringIO())
    return output.getvalue().splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy of a shipped pack, with another version."""
    path = Path(shutil.copytree(SHIPPED_DIRECTORY / "coding", tmp_path / "coding", ignore=ignore_patterns("__pycache__")))
    (path / "pack.toml").write_text((path / "pack.toml").read_text().replace('version = "', 'version = "9.'))
    return path


def test_pack_is_checked_added_and_upgraded(folder: Path) -> None:
    assert re.fullmatch(r"catan 1.0.0: \d+ turns played, no problems", pack("check", "catan")[0])
    assert pack("add", str(folder), "--dry-run")[0].startswith("would store coding 9.1.0.0")
    assert pack("add", str(folder)) == [
        f"stored: coding 9.1.0.0, {len(list((folder / 'skill').iterdir()))} files",
        "coding uses coding 1.0.0. To change it: manage.py pack upgrade coding",
    ]
    assert pack("upgrade", "coding", "--dry-run") == ["would assign: coding: coding 1.0.0 -> coding 9.1.0.0"]
    assert pack("upgrade", "coding") == ["assigned: coding: coding 1.0.0 -> coding 9.1.0.0"]
    assert pack("add", str(folder), "--type", "review")[1].startswith("assigned: review: no pack -> coding 9.1.0.0")
    assert pack("upgrade", "coding", "--to", "1.0.0", "--type", "review")[0].startswith("assigned: review: coding 9.1.0.0")
    listed = {line.split("  ")[0]: line for line in pack("list")}
    assert "coding  " in listed["coding 9.1.0.0"] and "review" in listed["coding 1.0.0"]


def test_unusable_packs_fail_with_a_message(folder: Path) -> None:
    with pytest.raises(CommandError, match=r"There is no pack chess\."):
        pack("upgrade", "chess")
    (folder / "skill/prompt.md").write_text('{"action": "fly"}')
    with pytest.raises(CommandError, match="problems in"):
        pack("check", str(folder))
    (folder / "skill/prompt.md").unlink()
    with pytest.raises(CommandError, match=r"skill/prompt\.md: is required"):
        pack("add", str(folder))
