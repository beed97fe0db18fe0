"""`manage.py demo` as newcomers run it, to the end of a short game."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.manage import MANAGE, build_environment, run_manage
from tests.e2e.test_up import Home, home  # noqa: F401 - a fixture

pytestmark = pytest.mark.e2e


def test_every_turn_of_the_demo_is_an_answer_and_a_call_that_is_written_down(home: Home) -> None:  # noqa: F811
    assert run_manage(home.path, "quickstart").returncode == 0
    said = demo(home.path, "--points", "3", "--seed", "7", "--exit", "--port", str(home.port))
    assert re.search(r"^did:web:(ada|brook)\.demo\.invalid wins\.$", said, re.MULTILINE), said
    seats = re.findall(r"destroyed \(condition:game\.finished\)  process +(\d+) +(\d+) ", said)
    turns = sum(int(turns) for turns, _ in seats)
    assert (len(seats), [skipped for _, skipped in seats]) == (2, ["0", "0"]) and turns > 4
    assert len(re.findall(r"^turn +\d+ +(?:RED|BLUE) +\w+", said, re.MULTILINE)) == turns
    ours = "kind = 'llm' AND outcome = 'ok' AND cost = 0 AND ended_at IS NOT NULL AND run_id IS NOT NULL"
    assert home.ask(f"SELECT count(*) FROM sandboxes_llmcall WHERE {ours}") == turns
    assert home.ask("SELECT count(*) FROM sandboxes_llmcall") == turns
    assert home.processes() == set()


def demo(path: Path, *args: str) -> str:
    argv = [sys.executable, str(MANAGE), "demo", *args]
    done = subprocess.run(argv, env=build_environment(path), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
