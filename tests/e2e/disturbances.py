"""Disturbances of a game on Docker: sleeps, and within a turn stops and losses of a sandbox, and kills of the control plane."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

from controlplane.games.client import Client, Player
from tests.e2e.test_kill import Fleet
from tests.support.waiting import wait_until

PATIENCE_SECONDS = 240.0
HELD = "state NOT IN ('destroying', 'destroyed')"
AWAKE = "state IN ('warm', 'waiting')"
STATES = f"SELECT DISTINCT state FROM sandboxes_sandbox WHERE {HELD}"
# Policy of an agent that waits in its turn while its workspace has the file `hold`. It plays as the shipped policy does, and
# lists the turns that it has played.
WAITING_POLICY = """
import pathlib, time
from skill.shipped import *
from skill import shipped
def choose_action(state):
    hold = pathlib.Path("/workspace/hold")
    while hold.exists():
        pathlib.Path("/workspace/waits").touch()
        time.sleep(0.05)
    with open("/data/played", "a") as played:
        played.write(f"{state['turn_number']}\\n")
    return shipped.choose_action(state)
"""
INSTALL_POLICY = 'cd /data/skills/$2 && mv policy.py shipped.py && printf %s "$1" >policy.py'


class Disturbances:
    """Disturbances of a game after given numbers of moves. `done` lists the names of those made."""

    def __init__(self, fleet: Fleet, players: Sequence[Player], host: Client, *, plan: Mapping[int, str]) -> None:
        self.fleet, self.players, self.host, self.plan = fleet, players, host, plan
        self.moves = 0
        self.done: list[str] = []
        self.threads: list[threading.Thread] = []
        for player in players:
            self.exec(player, INSTALL_POLICY, WAITING_POLICY, player.environment_type)

    def exec(self, player: Player, script: str, *words: str) -> str:
        body = {"argv": ["sh", "-c", script, "sh", *words]}
        result = self.host.call("POST", f"/leases/{player.lease['id']}/exec", body)
        assert result["exit_code"] == 0, result
        return str(result["stdout"])

    def note_move(self) -> None:
        self.moves += 1
        if name := self.plan.get(self.moves):
            getattr(self, name)()
            self.done.append(name)

    def finish(self) -> None:
        """Wait for the disturbances, and check that each turn of a player was played once."""
        for thread in self.threads:
            thread.join()
        assert self.done == [*self.plan.values()]

    def read_played_turns(self, player: Player) -> list[int]:
        return [int(number) for number in self.exec(player, "cat /data/played").split()]

    def put_to_sleep(self) -> None:
        for thread in self.threads:  # what remains of an earlier disturbance uses a sandbox
            thread.join()
        self.fleet.update(f"UPDATE sandboxes_sandbox SET idle_at = '2020-01-01 00:00:00+00:00' WHERE {AWAKE}")
        self.fleet.sweep()
        wait_until(lambda: self.fleet.select(STATES) == [("cold",)], "all sandboxes are cold", within=60.0, every=0.5)

    def kill_container(self) -> None:
        """Kill the container of the agent that plays next, in its turn, which is skipped. Its files are kept."""

        def kill(container: str) -> None:
            run_docker("kill", container)
            [player] = [player for player in self.players if self._find_container(player) == container]
            self.exec(player, "rm hold")  # in the container that this call starts again

        self._hold_and(kill)

    def lose_sandbox(self) -> None:
        """Remove the container and the files of the agent that plays next, in its turn, which is skipped.

        Its next turn is played in another sandbox, with the lease of which it joins again."""

        def remove(container: str) -> None:
            # The control plane stands still meanwhile: it could make the container again on volumes that are still there.
            assert self.fleet.process
            os.killpg(self.fleet.process.pid, signal.SIGSTOP)
            run_docker("rm", "-f", container)
            run_docker("volume", "rm", f"{container}-workspace", f"{container}-data")
            os.killpg(self.fleet.process.pid, signal.SIGCONT)

        self._hold_and(remove)

    def kill_control_plane(self) -> None:
        """Kill all processes of the control plane in a turn, and let the turn go on before the next start."""

        def kill(container: str) -> None:
            self.fleet.kill()
            _release(container)
            self.fleet.up()

        self._hold_and(kill)

    def _hold_and(self, act: Callable[[str], object]) -> None:
        playing = [player for player in self.players if self._is_active(player)]
        for player in playing:
            self.exec(player, "rm -f waits; touch hold")

        def wait_and_act() -> None:
            container = wait_until(lambda: self._find_waiting_container(playing), "an agent waits in its turn", within=60.0)
            for player in playing:
                if (other := self._find_container(player)) != container:
                    _release(other)
            act(container)

        thread = threading.Thread(target=wait_and_act)
        thread.start()
        self.threads.append(thread)

    def _is_active(self, player: Player) -> bool:
        return bool(self.host.call("GET", f"/leases/{player.lease['id']}")["status"] == "active")

    def _find_container(self, player: Player) -> str:
        [(ref,)] = self.fleet.select(f"SELECT ref FROM sandboxes_sandbox WHERE agent_did = '{player.did}' AND {HELD}")
        return str(ref)

    def _find_waiting_container(self, players: Sequence[Player]) -> str:
        waits = ["test", "-e", "/workspace/waits"]
        containers = map(self._find_container, players)
        return next((name for name in containers if not subprocess.run(["docker", "exec", name, *waits]).returncode), "")


def _release(container: str) -> None:
    run_docker("exec", container, "rm", "/workspace/hold")


def run_docker(*argv: str) -> None:
    subprocess.run(["docker", *argv], check=True, stdout=subprocess.DEVNULL)
