"""Host of a coding task: an agent in a leased sandbox fixes a failing test, and its commits become a pull request."""

import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from django.core.management import call_command

from controlplane.games import DemoOptions
from controlplane.games.client import ApiError, Client, Player

CONDITION = "task.complete"
MAX_TURNS = 5
LEGAL_ACTIONS = [{"type": "COMPLETE"}, {"type": "CONTINUE"}, {"type": "GIVE_UP"}]
TITLE = "Fix the failing test of the Roman numerals"
TEST_COMMAND = "python3 -m unittest -q"
PROJECT = {
    "roman.py": """NUMERALS = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def parse(text):
    total, last = 0, 0
    for letter in reversed(text):
        value = NUMERALS[letter]
        if value > last:
            total -= value
        else:
            total += value
        last = value
    return total
""",
    "test_roman.py": """import unittest

from roman import parse


class RomanTest(unittest.TestCase):
    def test_numerals(self):
        for text, number in {"III": 3, "IX": 9, "XIV": 14, "MCMXCIV": 1994}.items():
            self.assertEqual(parse(text), number, text)
""",
    ".gitignore": "__pycache__/\n",
}


@dataclass
class Programmer(Player):
    """An agent with the working copy of its task. A new sandbox gets a working copy before its first turn."""

    has_task: bool = False

    def join(self, environment: str, environment_type: str) -> None:
        super().join(environment, environment_type)
        if self.has_task:
            self.client.call("POST", f"/leases/{self.lease['id']}/checkout", {})


@dataclass(frozen=True)
class Step:
    """A turn, and the refusals of the submission that followed it."""

    number: int
    action: dict[str, Any]
    seconds: float
    skipped: bool
    refusals: Sequence[str] = ()


def create_player(number: int, did: str, client: Client) -> Programmer:
    return Programmer(did, client)


def run_demo(
    players: list[Programmer], environment: str, host: Client, options: DemoOptions, print_line: Callable[[str], None]
) -> str:
    """Let an agent work on a new repository, print each turn and the pull request, and return the outcome."""
    with tempfile.TemporaryDirectory(prefix="leasehold-demo-") as folder:
        bare = create_repository(Path(folder))
        name = environment.replace(".", "-")
        # The demo's host is an operator on the same machine: repositories are added by command only.
        call_command("repository", "add", name, "--clone-url", str(bare), stdout=StringIO())
        agents = [player.did for player in players]
        task = {"repository": name, "title": TITLE, "test_command": TEST_COMMAND, "agents": agents}
        host.call("POST", f"/environments/{environment}/coding-task", task)
        print_line(f"task      {TITLE} ({bare})")
        done = play(players[0], environment, host, on_step=lambda step: print_line(format_step(step)))
        if done["status"] == "open":
            return "The agent gave up."
        print_line(f"pull request {done['pull_request_url']}")
        print_line(_git(bare, "log", "-p", "--format=%h %an: %s", f"{done['base_commit']}..{done['head_commit']}"))
        call_command("repository", "disable", name, stdout=StringIO())
        return f"{players[0].did} opened a pull request after {players[0].turns} turns."


def play(
    player: Programmer, environment: str, host: Client, *, max_turns: int = MAX_TURNS, on_step: Callable[[Step], None]
) -> dict[str, Any]:
    """Request turns until the agent's commits are accepted or it gives up. Return the coding task.

    The player has joined, and the environment has a coding task."""
    player.has_task = True
    task = player.client.call("POST", f"/leases/{player.lease['id']}/checkout", {})
    feedback: list[str] = []
    for number in range(1, max_turns + 1):
        turn = player.take_turn(build_state(task, number, max_turns, feedback))
        action = turn["action"]
        if not turn["skipped"] and action.get("type") == "COMPLETE":
            task = _submit(player, environment, host, action)
        feedback = list(task["refusals"])
        player.skipped += turn["skipped"]
        on_step(Step(number, action, turn["duration_seconds"], turn["skipped"], feedback))
        if task["status"] != "open" or action.get("type") == "GIVE_UP":
            break
    return task


def build_state(task: dict[str, Any], number: int, max_turns: int, feedback: Sequence[str]) -> dict[str, Any]:
    """Build the state of one turn from the coding task."""
    return {
        "environment_type": "coding",
        "turn_number": number,
        "max_turns": max_turns,
        "task": {"title": task["title"], "description": task["description"]},
        "repository": {"path": task["path"], "base": task["base_commit"], "branch": task["base_branch"]},
        "test_command": task["test_command"],
        "feedback": list(feedback),
        "legal_actions": LEGAL_ACTIONS,
    }


def _submit(player: Programmer, environment: str, host: Client, action: dict[str, Any]) -> dict[str, Any]:
    """Submit the commits. A repetition after a lost answer finds the lease ended by the first request."""
    body = {"title": str(action.get("title") or TITLE)[:200], "summary": str(action.get("summary", ""))[:10_000]}
    try:
        return player.client.call("POST", f"/leases/{player.lease['id']}/submissions", body)
    except ApiError as error:
        task = host.call("GET", f"/environments/{environment}/coding-task")
        if error.code != "lease_ended" or task["status"] == "open":
            raise
        return task


def format_step(step: Step) -> str:
    """Format a turn and the reasons of a refusal as one line."""
    kind = f"skipped: {step.action.get('reason', '')}" if step.skipped else str(step.action.get("type"))
    text = next((str(step.action[key]) for key in ("title", "note", "reason") if step.action.get(key)), "")
    refused = f"   refused: {' '.join(step.refusals)}" if step.refusals else ""
    return f"turn {step.number:>3}  {kind:<10} {step.seconds:5.2f} s   {text}{refused}"


def create_repository(folder: Path) -> Path:
    """Create a bare repository whose branch main has a small project with a failing test. Return its path."""
    work, bare = folder / "project", folder / "project.git"
    work.mkdir()
    for name, text in PROJECT.items():
        (work / name).write_text(text)
    _git(work, "init", "--quiet", "--initial-branch=main")
    _git(work, "add", "--all")
    _git(work, "commit", "--quiet", "--message=Roman numerals")
    _git(folder, "clone", "--quiet", "--bare", str(work), str(bare))
    return bare


def _git(directory: Path, *args: str) -> str:
    identity = ["-c", "user.name=Leasehold demo", "-c", "user.email=demo@leasehold.invalid", "-c", "commit.gpgSign=false"]
    done = subprocess.run(["git", *identity, *args], cwd=directory, capture_output=True, text=True, check=True)  # noqa: S607
    return done.stdout.strip()
