"""A coding task from the repository to the pull request in Docker sandboxes, by a scripted agent and by Claude Code."""

from contextlib import closing
from pathlib import Path

import pytest

from controlplane.games import coding
from controlplane.games.client import Client
from controlplane.games.coding import Programmer
from tests.commands.manage import run_manage
from tests.e2e.disturbances import PATIENCE_SECONDS, Disturbances
from tests.e2e.test_agent_clis import IMAGE, call, run_agent
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.support.repositories import create_project, git, merge
from tests.support.servers.scripted_models import ScriptedModelServer
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.docker,
    pytest.mark.matrix("game of a minute; its rules are tested in tests/api/test_coding.py"),
]
ENVIRONMENT = "task-kills"
TURNS = 5
PLAN = {1: "kill_container", 2: "put_to_sleep", 3: "kill_control_plane"}
# Policy of an agent that notes each turn in the working copy, and commits in the last one.
SCRIPT = """
import subprocess
def choose_action(state):
    return {"type": "CONTINUE"}
def describe_state(state):
    return ""
def record_turn(state, action, data):
    def shell(command):
        subprocess.run(["bash", "-ec", command], cwd=state["repository"]["path"], check=True)
    shell(f"echo {state['turn_number']} >> notes.txt; sed -i 's/a - b/a + b/' calc.py")
    if state["turn_number"] < state["max_turns"]:
        return {"type": "CONTINUE"}
    shell("python3 -c 'from calc import add; assert add(2, 3) == 5'; git add -A; git commit -qm 'Fix add'")
    return {"type": "COMPLETE", "title": "Fix add", "summary": "It subtracted."}
"""


def create_task(fleet: Fleet, folder: Path, environment: str, **fields: str) -> tuple[Path, Client]:  # noqa: F811
    bare = create_project(folder)
    added = run_manage(fleet.path, "repository", "add", "calc", "--clone-url", str(bare), **fleet.env)
    assert added.returncode == 0, added.stderr
    host = Client(f"http://127.0.0.1:{fleet.port}", fleet.key, PATIENCE_SECONDS)
    body = {"repository": "calc", "title": "Fix add", "test_command": "python -m pytest -q", **fields}
    host.call("POST", f"/environments/{environment}/coding-task", body)
    return bare, host


def test_a_task_is_done_through_a_sleep_and_kills_and_its_merge_ends_the_lease(fleet: Fleet, tmp_path: Path) -> None:  # noqa: F811
    fleet.up()
    bare, host = create_task(fleet, tmp_path, ENVIRONMENT, completes_on="merge")
    programmer = Programmer("did:web:ada.example.org", host)
    programmer.join(ENVIRONMENT, "coding")
    install = ["python3", "-c", f"open('/data/skills/coding/policy.py', 'w').write({SCRIPT!r})"]
    assert host.call("POST", f"/leases/{programmer.lease['id']}/exec", {"argv": install})["exit_code"] == 0
    disturbances = Disturbances(fleet, [programmer], host, plan=PLAN)
    task = coding.play(programmer, ENVIRONMENT, host, max_turns=TURNS, on_step=lambda step: disturbances.note_move())
    disturbances.finish()
    assert (task["status"], task["refusals"], programmer.lost_leases) == ("proposed", [], [])
    assert (programmer.skipped, disturbances.read_played_turns(programmer)) == (1, [1, 3, 4, 5])
    # The container was killed in the second turn, which was skipped. Every other turn was played once.
    assert git(bare, "show", f"{task['branch']}:notes.txt").split() == ["1", "3", "4", "5"]
    assert git(bare, "log", "--format=%an %s", f"main..{task['branch']}") == "did:web:ada.example.org Fix add"

    merge(bare, task["branch"])
    fleet.update("UPDATE leases_codingtask SET next_poll_at = '2020-01-01 00:00:00+00:00'")
    lease = f"/leases/{programmer.lease['id']}"
    wait_until(lambda: host.call("GET", lease)["status"] == "destroyed", "the lease is destroyed", within=120.0, every=1.0)
    assert host.call("GET", lease)["end_reason"] == "condition:pr.merged"
    assert fleet.list_containers() == {}
    assert run_manage(fleet.path, "meter", **fleet.env).returncode == 0
    [total] = host.call("GET", "/costs?by=environment")["results"]
    assert (total["key"], int(total["quantities"]["llm"])) == (ENVIRONMENT, TURNS - 1)


def test_claude_code_fixes_a_failing_test(fleet: Fleet, tmp_path: Path) -> None:  # noqa: F811
    with closing(ScriptedModelServer().start()) as model:
        fleet.env |= {
            "LEASEHOLD_SANDBOX_IMAGE": IMAGE, "LEASEHOLD_LLM_URL": f"{model.url}/v1",
            "LEASEHOLD_LLM_API_KEY": "sk-upstream-secret", "LEASEHOLD_LLM_MODELS": "claude-x",
        }  # fmt: skip
        fleet.update("UPDATE sandboxes_pool SET memory_mib = 1024")
        fleet.up()
        bare, host = create_task(fleet, tmp_path, "task-claude")
        joined = host.call("POST", "/environments/task-claude/join", {"agent_did": "did:plc:ada", "environment_type": "coding"})
        lease = joined["id"]
        host.call("POST", f"/leases/{lease}/checkout", {})
        row, events = run_agent(
            fleet, lease, "The tests in repo fail. Fix them and commit.",
            call("Bash", command="cd /workspace/repo && python -m pytest -q; true", description="run the tests"),
            call("Read", file_path="/workspace/repo/calc.py"),
            call("Edit", file_path="/workspace/repo/calc.py", old_string="a - b", new_string="a + b"),
            call("Bash", command="cd /workspace/repo && python -m pytest -q && git commit -qam Fix", description="x"),
            model="claude-x", permission_mode="acceptEdits", allowed_tools=["Read", "Write", "Edit", "Bash"],
        )  # fmt: skip
        assert (row["state"], row["is_error"]) == ("completed", False), events
        task = host.call("POST", f"/leases/{lease}/submissions", {"title": "Fix add"})
        assert (task["status"], task["refusals"]) == ("proposed", []), events
        assert "return a + b" in git(bare, "show", f"{task['branch']}:calc.py")
        assert host.call("GET", f"/leases/{lease}")["end_reason"] == "condition:task.complete"
