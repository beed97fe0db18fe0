"""The deepagents backend against a running control plane: LangChain's suite for sandbox backends, unmodified, and own tests."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands.manage import MANAGE, run_manage
from tests.conftest import skip_or_fail
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture

pytestmark = [pytest.mark.e2e, pytest.mark.docker]
CHECKOUT = MANAGE.parent
SUITE = CHECKOUT / "tests" / "support" / "deepagents_suite.py"
OWN_TESTS = 8  # of the file; the rest is LangChain's suite
STANDARD_TESTS = 86


def test_backend_passes_the_suite_of_langchain(fleet: Fleet, tmp_path: Path) -> None:  # noqa: F811
    python = os.environ.get("TEST_DEEPAGENTS_PYTHON")
    if not python:
        skip_or_fail("No deepagents: TEST_DEEPAGENTS_PYTHON is not set; .ci/services installs it.")
    fleet.update("UPDATE sandboxes_pool SET memory_mib = 512")  # a quarter of it for /tmp, into which the suite writes 50 MB
    suite = shutil.copy(SUITE, tmp_path / "test_suite.py")  # away from the conftest.py of this checkout
    fleet.up()
    created = run_manage(fleet.path, "create_key", "--agent", "did:web:deepagents.invalid", "--json", **fleet.env)
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path),
        "LEASEHOLD_URL": f"http://127.0.0.1:{fleet.port}", "LEASEHOLD_KEY": json.loads(created.stdout)["key"],
    }  # fmt: skip
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}", "--asyncio-mode=auto"]
    done = subprocess.run(
        [str(python), "-m", "pytest", *options, str(suite)], env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert re.search(rf"^{STANDARD_TESTS + OWN_TESTS} passed", done.stdout, re.MULTILINE), done.stdout + done.stderr
