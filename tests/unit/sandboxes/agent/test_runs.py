"""image/agent/main.py as a process, with the control plane's client: runs, output by offset, kills and reconnections."""

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandboxes.agent import client
from sandboxes.agent.client import report_fallback
from sandboxes.agent.runs import AgentRun, OutcomeUnknown
from tests.support.sandbox_agent import Gateway, make_run, start_agent
from tests.support.waiting import wait_until


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.close()


@pytest.fixture
def agent(gateway: Gateway) -> Iterator["subprocess.Popen[bytes]"]:
    process = start_agent(gateway.path)
    gateway.boot()
    yield process
    process.kill()
    process.wait()


@pytest.mark.usefixtures("agent")
def test_result_has_exit_code_streams_and_environment(gateway):
    script = 'cat; echo "$NAME" >&2; exit 7'
    result = gateway.client.run(make_run("r1", "sh", "-c", script, stdin=b"input", NAME="value"))
    assert (result.exit_code, result.stdout, result.stderr, result.timed_out) == (7, b"input", b"value\n", False)


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize(("argv", "code"), [(["/no/such"], 127), (["/etc/passwd"], 126), (["sh", "-c", "kill -9 $$"], 137)])
def test_failed_start_and_signal_are_results(gateway, argv, code):
    assert gateway.client.run(make_run("r1", *argv)).exit_code == code


@pytest.mark.usefixtures("agent")
def test_large_input_and_output_are_transferred_completely(gateway):
    content = bytes(range(256)) * (1 << 12)
    assert gateway.client.run(make_run("r1", "cat", stdin=content, cap=1 << 20)).stdout == content


@pytest.mark.usefixtures("agent")
def test_output_beyond_the_cap_is_counted(gateway):
    result = gateway.client.run(make_run("r1", "sh", "-c", "head -c 300000 /dev/zero; printf end >&2", cap=100_000))
    assert (len(result.stdout), result.stderr, result.dropped) == (100_000, b"end", (200_000, 0))


@pytest.mark.usefixtures("agent")
def test_output_is_read_again_from_any_offset_until_acknowledged(gateway):
    gateway.client.run(make_run("r1", "printf", "0123456789"))
    assert [gateway.client.read("r1", "stdout", offset)[0] for offset in (4, 0, 10)] == [b"456789", b"0123456789", b""]
    gateway.client.acknowledge("r1")
    assert gateway.client.read("r1", "stdout", 0)[1].state == "acknowledged"


@pytest.mark.usefixtures("agent")
def test_agent_states_how_long_ago_a_run_has_ended(gateway):
    begun = time.monotonic()
    gateway.client.run(make_run("r1", "sleep", "0.2"))
    gateway.client.run(make_run("r2", "sleep", "0.2"))
    found = gateway.client.find("r1", cap=1 << 20)
    assert 0.2 <= found.age <= time.monotonic() - begun - 0.2


@pytest.mark.usefixtures("agent")
def test_run_begun_during_a_restart_of_the_gateway_waits_for_it(gateway):
    gateway.stop()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(gateway.client.run, make_run("r1", "echo", "out"))
        wait_until(lambda: str(gateway.client_path) in client._down_since, "the connection was refused")
        gateway.start()
        assert running.result().stdout == b"out\n"


@pytest.mark.usefixtures("agent")
def test_gateway_counts_agents_executions_and_fallbacks(gateway):
    gateway.client.run(make_run("r1", "true"))
    gateway.client.acknowledge("r1")
    for reason in ("busy", "busy", "unknown"):
        report_fallback(gateway.client_path, reason)
    wanted = {"connected": 1, "outdated": 0, "sessions": 1, "executions": 1, "fallbacks busy": 2}
    wait_until(lambda: gateway.gateway.read_counts() == wanted, "all is counted")


@pytest.mark.usefixtures("agent")
def test_repeated_request_starts_nothing(gateway, tmp_path):
    run = make_run("r1", "sh", "-c", f"echo x >> {tmp_path}/starts; echo done")
    first, second = gateway.client.run(run), gateway.client.run(run)
    assert first == second
    gateway.client.acknowledge("r1")
    with pytest.raises(OutcomeUnknown):
        gateway.client.run(run)
    with gateway.connect() as connection:
        wait_until(lambda: connection.request({"verb": "list"}, timeout=5).body == b"{}", "no shim is left")
    assert (tmp_path / "starts").read_text() == "x\n"


def test_result_of_a_run_that_ended_without_control_plane_is_obtained_after_its_restart(gateway, agent, tmp_path):
    started = tmp_path / "started"
    script = f"echo x >> {started}; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; echo out; exit 3"
    run = make_run("r1", "sh", "-c", script)
    boot = gateway.boot()
    threading.Thread(target=_run_and_lose, args=(gateway, run), daemon=True).start()
    wait_until(started.exists, "the run has started")
    gateway.stop()
    (tmp_path / "go").touch()
    shims = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    wait_until(lambda: b"sh" not in _read_commands(shims), "the run has ended")
    gateway.start()
    result = gateway.client.run(run, boot=boot)
    assert (result.exit_code, result.stdout, started.read_text()) == (3, b"out\n", "x\n")


def _run_and_lose(gateway: Gateway, run: AgentRun) -> None:
    with contextlib.suppress(OutcomeUnknown):
        gateway.client.run(run)


def _read_commands(children: Path) -> list[bytes]:
    shims = children.read_text().split()
    names = []
    for shim in shims:
        for child in Path(f"/proc/{shim}/task/{shim}/children").read_text().split():
            names.append(Path(f"/proc/{child}/comm").read_bytes().strip())
    return names


def test_restarted_agent_does_not_start_a_repeated_run(gateway, agent, tmp_path):
    boot = gateway.boot()
    agent.kill()
    agent.wait()
    wait_until(lambda: not gateway.gateway._sessions, "the session has ended")
    successor = start_agent(gateway.path)
    try:
        gateway.boot()
        with pytest.raises(OutcomeUnknown):
            gateway.client.run(make_run("r1", "touch", f"{tmp_path}/file"), boot=boot)
        assert not (tmp_path / "file").exists()
    finally:
        successor.kill()
        successor.wait()


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        os.execve("/bin/sleep", ["sleep", "1000.{mark}"], {{}})
    os._exit(0)
time.sleep(1000.{mark})
"""


def is_daemon_running(mark: str) -> bool:
    return subprocess.run(["pgrep", "-f", f"^sleep 1000.{mark}"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("way", ["timeout", "kill", "shim killed"])
def test_daemons_with_a_session_and_environment_of_their_own_are_killed(gateway, agent, way):
    mark = f"{agent.pid}{len(way)}"
    run = make_run("r1", "python3", "-c", DAEMON.format(mark=mark), timeout=3.0 if way == "timeout" else 60.0)
    caller = threading.Thread(target=lambda: results.append(gateway.client.run(run)))
    results: list = []
    caller.start()
    wait_until(lambda: is_daemon_running(mark), "the daemon has started")
    if way == "kill":
        gateway.client.kill("r1")
        assert not is_daemon_running(mark)
    if way == "shim killed":
        shim = subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True, check=True).stdout.split()
        busy = [pid for pid in shim if subprocess.run(["pgrep", "-P", pid], capture_output=True, check=False).stdout]
        subprocess.run(["kill", f"-{signal.SIGKILL.value}", *busy], check=True)
    caller.join(20)
    assert (results[0].exit_code, results[0].timed_out) == (137, way == "timeout")
    wait_until(lambda: not is_daemon_running(mark), "the daemon is gone", within=5)


@pytest.mark.usefixtures("agent")
def test_kill_leaves_other_runs_alone(gateway, tmp_path):
    other = threading.Thread(
        target=lambda: results.append(gateway.client.run(make_run("r2", "sh", "-c", f"touch {tmp_path}/r2; cat {pipe}")))
    )
    results, pipe = [], tmp_path / "pipe"
    subprocess.run(["mkfifo", pipe], check=True)
    other.start()
    wait_until((tmp_path / "r2").exists, "the other run has started")
    victim = threading.Thread(target=lambda: gateway.client.run(make_run("r1", "sh", "-c", f"touch {tmp_path}/r1; sleep 60")))
    victim.start()
    wait_until((tmp_path / "r1").exists, "the run has started")
    gateway.client.kill("r1")
    pipe.write_bytes(b"alive")
    other.join(20)
    victim.join(20)
    assert (results[0].exit_code, results[0].stdout) == (0, b"alive")


@pytest.mark.usefixtures("agent")
def test_remaining_descendant_does_not_delay_the_result(gateway):
    result = gateway.client.run(make_run("r1", "sh", "-c", "sleep 60 & echo done"))
    assert (result.exit_code, result.stdout) == (0, b"done\n")
    gateway.client.kill("r1")


@pytest.mark.usefixtures("agent")
def test_concurrent_runs_have_separate_results(gateway):
    """Descriptors are closed and reused all the time; no run may read another's."""

    def run_many(thread: int) -> None:
        for number in range(25):
            text = f"{thread}-{number}"
            result = gateway.client.run(make_run(text, "sh", "-c", f"cat; echo {text} >&2", stdin=text.encode()))
            results.append((result.stdout, result.stderr) == (text.encode(), f"{text}\n".encode()))
            gateway.client.acknowledge(text)

    results: list[bool] = []
    threads = [threading.Thread(target=run_many, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 200
