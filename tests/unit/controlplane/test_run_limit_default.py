"""Default limit of an agent's open runs: one agent leaves room for others, with any number of web processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxes.long_calls import compute_maximum

MANAGE = Path(__file__).resolve().parents[3] / "manage.py"


@pytest.mark.parametrize(("workers", "threads", "limit"), [(1, 16, 8), (2, 16, 16), (4, 32, 64), (1, 2, 1)])
def test_agent_may_have_two_thirds_of_the_commands_at_once(workers: int, threads: int, limit: int) -> None:
    variables = {"LEASEHOLD_WEB_WORKERS": str(workers), "LEASEHOLD_WEB_THREADS": str(threads)}
    program = "from django.conf import settings; print(settings.MAX_RUNS_PER_AGENT)"
    environment = os.environ | variables | {"DJANGO_SETTINGS_MODULE": "controlplane.settings"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=MANAGE.parent, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == limit
    assert limit < workers * compute_maximum(threads) or threads == 2
