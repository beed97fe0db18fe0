"""manage.py demo, run to the end of a short game."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.manage import MANAGE, build_environment
from tests.e2e.conftest import Home

pytestmark = pytest.mark.e2e


def test_every_turn_of_the_demo_has_an_action_and_a_logged_model_call(home: Home) -> None:
    output = demo(home.path, "--points", "3", "--seed", "7", "--exit", "--port", str(home.port))
    assert re.search(r"^did:web:(ada|brook)\.demo\.invalid wins\.$", output, re.MULTILINE), output
    seats = re.findall(r"destroyed \(condition:game\.finished\)  process +(\d+) +(\d+) ", output)
    turns = sum(int(turns) for turns, _ in seats)
    assert (len(seats), [skipped for _, skipped in seats]) == (2, ["0", "0"]) and turns > 4
    assert len(re.findall(r"^turn +\d+ +(?:RED|BLUE) +\w+", output, re.MULTILINE)) == turns
    condition = "kind = 'llm' AND outcome = 'ok' AND cost = 0 AND ended_at IS NOT NULL AND run_id IS NOT NULL"
    assert home.query_value(f"SELECT count(*) FROM sandboxes_llmcall WHERE {condition}") == turns
    assert home.query_value("SELECT count(*) FROM sandboxes_llmcall") == turns
    assert home.find_processes() == set()


def test_campaign_is_played_to_its_end_and_the_dead_lose_their_lease_first(home: Home) -> None:
    output = demo(home.path, "--pack", "rpg", "--seed", "4", "--exit", "--port", str(home.port))
    assert "The campaign ends in victory. Alive: Brook (level 3), Cleo (level 3)." in output, output
    seats = re.findall(r"destroyed \(condition:([a-z.]+)\)  +process +(\d+) +(\d+) ", output)
    assert [(reason, skipped) for reason, _, skipped in seats] == [
        ("agent.death", "0"), ("campaign.ended", "0"), ("campaign.ended", "0"),
    ]  # fmt: skip
    assert len(re.findall(r"^turn +\d+ ", output, re.MULTILINE)) == sum(int(turns) for _, turns, _ in seats) == 25
    assert "(fallback)" not in output
    assert re.search(r"^agent +hours +USD\ndid:web:ada\.demo\.invalid +\S+ +\S+$", output, re.MULTILINE), output
    assert home.find_processes() == set()


def demo(path: Path, *args: str) -> str:
    argv = [sys.executable, str(MANAGE), "demo", *args]
    process = subprocess.run(argv, env=build_environment(path), capture_output=True, text=True, timeout=180)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout
