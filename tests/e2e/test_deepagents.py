"""Adapters for deepagents with a running control plane: LangChain's suite for sandbox backends, unmodified, and own tests."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.commands.manage import MANAGE, run_manage
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.support.servers.services import require_environment

pytestmark = [pytest.mark.e2e, pytest.mark.docker, pytest.mark.matrix("suites of LangChain in environments of their own")]
CHECKOUT = MANAGE.parent
SUITE = CHECKOUT / "tests" / "support" / "deepagents_suite.py"
PROVIDER_SUITE = CHECKOUT / "tests" / "support" / "deepagents_code_suite.py"
DID = "did:web:deepagents.invalid"
PROVIDER_TESTS = 6
OWN_TESTS = 9  # of the file; the rest is LangChain's suite
STANDARD_TESTS = 86


def run_suite(fleet: Fleet, directory: Path, suite: Path, python: str, *options: str) -> str:  # noqa: F811
    """Execute a suite by the Python of another environment against a running control plane. Return its output."""
    fleet.update("UPDATE sandboxes_pool SET memory_mib = 512")  # a quarter of it for /tmp, into which the suite writes 50 MB
    copy = shutil.copy(suite, directory / "test_suite.py")  # away from the conftest.py of this checkout
    fleet.env |= {"LEASEHOLD_MAX_RUNS_PER_AGENT": "6"}  # all that its few threads execute at once: the suite has five at once
    fleet.up()
    created = run_manage(fleet.path, "create_key", "--agent", DID, "--json", **fleet.env)
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": f"{CHECKOUT}{os.pathsep}{directory}", "HOME": str(directory),
        "LEASEHOLD_URL": f"http://127.0.0.1:{fleet.port}", "LEASEHOLD_AGENT": DID,
        "LEASEHOLD_KEY": json.loads(created.stdout)["key"],
    }  # fmt: skip
    all_options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={directory}", *options]
    done = subprocess.run(
        [str(python), "-m", "pytest", *all_options, str(copy)], env=environment, cwd=directory, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_backend_passes_the_suite_of_langchain(fleet: Fleet, tmp_path: Path) -> None:  # noqa: F811
    [python] = require_environment("deepagents", "TEST_DEEPAGENTS_PYTHON")
    output = run_suite(fleet, tmp_path, SUITE, python, "--asyncio-mode=auto")
    assert re.search(rf"^{STANDARD_TESTS + OWN_TESTS} passed", output, re.MULTILINE), output


def test_deep_agents_code_leases_its_sandboxes(fleet: Fleet, tmp_path: Path) -> None:  # noqa: F811
    metadata = tmp_path / "leasehold-0.dist-info"  # as pip writes it for the package
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: leasehold\nVersion: 0\n")
    groups = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = (f"[{group}]\n" + "".join(f"{name} = {path}\n" for name, path in each.items()) for group, each in groups.items())
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    [python] = require_environment("deepagents-code", "TEST_DEEPAGENTS_CODE_PYTHON")
    output = run_suite(fleet, tmp_path, PROVIDER_SUITE, python)
    assert re.search(rf"^{PROVIDER_TESTS} passed", output, re.MULTILINE), output
