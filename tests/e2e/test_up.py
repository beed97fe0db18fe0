"""manage.py up with real processes: start, shutdown, killed and hanging children."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from tests.commands.manage import MANAGE, build_environment, run_manage
from tests.e2e.conftest import CHILDREN, HEALTHY, Home
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e


def prepare_exec(home: Home, lease: str, script: str) -> Callable[[], tuple[int, Any]]:
    """Return a function that executes a shell script through HTTP."""
    token = json.loads(run_manage(home.path, "create_key", "--agent", "did:plc:ada", "--json").stdout)["key"]

    def post_exec() -> tuple[int, Any]:
        with closing(http.client.HTTPConnection("127.0.0.1", home.port, timeout=60)) as connection:
            body = json.dumps({"argv": ["sh", "-c", script]})
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("POST", f"/api/v1/leases/{lease}/exec", body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    return post_exec


def test_up_refuses_a_second_up_and_finishes_requests_after_sigterm(home: Home) -> None:
    home.env |= {"LEASEHOLD_DRAIN_DELAY_SECONDS": "3", "LEASEHOLD_DRAIN_TIMEOUT": "25s"}
    first = home.up()
    assert home.get("/livez")[0] == 200
    assert wait_until(lambda: home.get("/readyz")[0] == 200, "the queue has written its heartbeat")
    assert f"admin http://127.0.0.1:{home.port}/admin/" in home.read_log()
    assert "WARNING: PROCESS DOES NOT ISOLATE" in home.read_log()

    second = run_manage(home.path, "up", "--port", str(home.port))
    assert (second.returncode, second.stderr.count("\n")) == (1, 1)
    assert f"Another manage.py up is running on {home.path / 'state'} (pid {first.pid}, since " in second.stderr
    other = run_manage(home.path, "up", "--port", str(home.port), LEASEHOLD_STATE_DIR=str(home.path / "other"))
    assert (other.returncode, other.stderr.count("\n")) == (1, 1)
    assert f"Cannot listen on 127.0.0.1 port {home.port}" in other.stderr
    assert home.get("/healthz")[0] == 200

    lease = home.acquire_lease()
    post_exec = prepare_exec(home, lease, "sleep 12; echo done")

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(post_exec)
        wait_until(lambda: home.query_value("SELECT outcome FROM sandboxes_run") == "open", "the run is open")
        first.send_signal(signal.SIGTERM)
        home.wait_for_line("not ready; accepting requests for another 3 s")
        status, report = home.get("/readyz")
        assert (status, report["missing"]) == (503, ["This server is shutting down."])
        status, result = answer.result()
    assert (status, result["stdout"]) == (200, "done\n"), result
    assert first.wait(60) == 0
    assert home.find_processes() == set()
    assert home.query_value("SELECT outcome FROM sandboxes_run") == "ok"
    assert home.query_value("SELECT state FROM sandboxes_sandbox") == "waiting"


@pytest.mark.matrix("the drain of the first test of this file, with a longer run")
def test_a_run_that_outlasts_the_drain_says_so_and_keeps_its_output(home: Home) -> None:
    home.env |= {"LEASEHOLD_DRAIN_TIMEOUT": "1s"}
    up, lease = home.up(), home.acquire_lease()
    token = json.loads(run_manage(home.path, "create_key", "--agent", "did:plc:ada", "--json").stdout)["key"]
    with closing(http.client.HTTPConnection("127.0.0.1", home.port, timeout=60)) as connection:
        body = json.dumps({"argv": ["sh", "-c", "echo begun; sleep 600"], "timeout_seconds": 900})
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request("POST", f"/api/v1/leases/{lease}/exec", body, headers)
        wait_until(lambda: home.query_value("SELECT stdout FROM sandboxes_run") == b"begun\n", "the output is stored")
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) == 0
    run_manage(home.path, "sweep", "stalled")
    assert home.query_value("SELECT outcome FROM sandboxes_run") == "lost"
    assert home.query_value("SELECT stdout FROM sandboxes_run") == b"begun\n"
    assert "was restarted or killed" in home.query_value("SELECT note FROM sandboxes_run")
    deadline_seconds = "SELECT round((julianday(deadline_at) - julianday(started_at)) * 86400) FROM sandboxes_run"
    assert home.query_value(deadline_seconds) == 930


def test_up_is_refused_without_migrations_and_without_isolation(home: Home) -> None:
    refused = run_manage(home.path, "up", DATABASE_URL=f"sqlite:///{home.path / 'empty.sqlite3'}")
    assert (refused.returncode, refused.stderr) == (1, "CommandError: Migrations are not applied: run manage.py migrate.\n")
    refused = run_manage(home.path, "up", DEBUG="0", SANDBOX_PROVIDER="auto", DOCKER_HOST="unix:///nowhere.sock")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert refused.stderr.startswith("The process provider does not isolate")


def test_after_sigkill_no_process_survives_and_the_next_start_recovers_the_work(home: Home) -> None:
    """The next start destroys every sandbox at its end, because it has the option --leave-nothing."""
    first_up, lease = home.up(), home.acquire_lease()
    instance = json.loads((home.path / "state/up.json").read_text())["instance"]
    leftover = subprocess.Popen(  # stands for a web worker that the kernel did not kill with its parent
        [sys.executable, str(MANAGE), "exec", lease, "--timeout", "1h", "--", "sleep", "600"],
        env=build_environment(home.path, LEASEHOLD_INSTANCE=f"{instance}.web.1"),
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: home.query_value("SELECT outcome FROM sandboxes_run") == "open", "the run is open")
    first_up.kill()
    first_up.wait()
    wait_until(lambda: home.find_processes() <= {leftover.pid}, "web server and queue have ended")
    home.execute("UPDATE sandboxes_pool SET warm_target = 1")
    home.up("--leave-nothing")
    assert leftover.wait(timeout=HEALTHY) == -signal.SIGKILL
    assert "previous instance not stopped cleanly: 1 processes killed, 1 claims released" in home.read_log()
    wait_until(lambda: home.query_value("SELECT outcome FROM sandboxes_run") == "lost", "the run is closed")
    assert home.query_value("SELECT state FROM sandboxes_sandbox WHERE holder IS NOT NULL") == "waiting"
    assert run_manage(home.path, "exec", lease, "--", "true").returncode == 0
    prewarmed = "SELECT count(*) FROM sandboxes_sandbox WHERE state = 'warm' AND holder IS NULL"
    wait_until(lambda: home.query_value(prewarmed) == 1, "a sandbox is pre-warmed")
    assert len(list((home.path / "state/process").glob("*/leasehold-*"))) == 2
    assert home.stop(signal.SIGINT) == 0
    assert home.read_log().endswith("up: 1 leases ended, 2 sandboxes destroyed, 0 left\n")
    assert not list((home.path / "state/process").glob("*/leasehold-*"))
    assert home.query_value("SELECT end_reason || status FROM leases_lease") == "operatordestroyed"
    assert home.find_processes() == set()


@pytest.mark.matrix("half a minute; tests/commands/test_supervisor.py has the rules of restarts")
def test_killed_and_hanging_children_are_restarted_and_leave_no_process(home: Home) -> None:
    up = home.up("--hung-after", "20s")  # must suffice for a start on a busy machine
    before = {child: home.wait_for_child(child) for child in CHILDREN}
    assert len(home.find_processes()) == 4
    os.kill(before["queue"], signal.SIGSTOP)
    os.kill(before["web"], signal.SIGKILL)
    home.wait_for_line("killed by SIGKILL; restarting in 1 s")
    home.wait_for_child("web", other_than=[before["web"]])
    home.wait_for_line("up: ready", times=2)
    assert home.get("/healthz")[0] == 200

    home.wait_for_line("no heartbeat for 20 s; restarting in 1 s")
    restarted = home.wait_for_child("queue", other_than=[before["queue"]])
    os.kill(restarted, signal.SIGKILL)
    home.wait_for_line("killed by SIGKILL; restarting in", times=2)
    home.wait_for_child("queue", other_than=[restarted, before["queue"]])
    assert up.poll() is None
    assert home.stop(signal.SIGTERM) == 0
    assert home.find_processes() == set()


def test_an_empty_directory_is_initialized(home: Home) -> None:
    (home.path / "leasehold.sqlite3").unlink()
    home.up("--initialize")
    assert 'Log in to /admin/ as "operator"' in home.read_log()
    assert home.query_value("SELECT count(*) FROM auth_user") == 1
    assert home.get("/healthz")[0] == 200
    assert home.stop(signal.SIGTERM) == 0


def test_the_small_profile_serves_drains_and_restarts_as_one_process(home: Home) -> None:
    home.env |= {"LEASEHOLD_PROFILE": "small", "LEASEHOLD_DRAIN_TIMEOUT": "25s"}
    up, before = home.up(), home.wait_for_child("all")
    assert home.find_processes() == {up.pid, before}
    assert wait_until(lambda: home.get("/readyz")[0] == 200, "the queue has written its heartbeat")

    os.kill(before, signal.SIGKILL)
    home.wait_for_line("all (pid")
    home.wait_for_child("all", other_than=[before])
    home.wait_for_line("up: ready", times=2)

    lease = home.acquire_lease()
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(prepare_exec(home, lease, "sleep 5; echo done"))
        wait_until(lambda: home.query_value("SELECT outcome FROM sandboxes_run") == "open", "the run is open")
        assert home.stop(signal.SIGTERM) == 0
        status, result = answer.result()
    assert (status, result["stdout"]) == (200, "done\n"), result
    assert "does not stop" not in home.read_log()
    assert home.find_processes() == set()
