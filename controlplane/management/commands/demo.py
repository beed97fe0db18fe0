"""manage.py demo: start the control plane and play a game with agents in leased sandboxes."""

import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

import requests
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError

from controlplane.games import GAMES, DemoOptions
from controlplane.games.client import ApiError, Client, Player, build_cost_rows, build_result_rows, post_condition
from leases import api_keys
from sandboxes.audit import COMMAND_LINE
from sandboxes.db import database_time
from sandboxes.egress import nginx
from sandboxes.management.base import require_migrated

MANAGE_PY = Path(__file__).resolve().parents[3] / "manage.py"
START_TIMEOUT_SECONDS = 60.0
STOP_TIMEOUT_SECONDS = 60.0
PATIENCE_SECONDS = 60.0  # with a busy or restarting control plane
AGENT_NAMES = ("ada", "brook", "cleo", "dara")


class StopRequested(Exception):
    """SIGINT or SIGTERM was received."""


class Command(BaseCommand):
    help = (
        "Start the control plane and play Catan or a role-playing campaign, or do a coding task. Each player is an agent in a "
        "leased sandbox."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=8000)
        parser.add_argument("--pack", choices=sorted(GAMES), default="catan", help="environment pack and its game")
        parser.add_argument(
            "--agents", type=int, choices=[1, 2, 3, 4], help="default: 2 in Catan, 3 in a campaign, 1 in a coding task"
        )
        parser.add_argument("--points", type=int, default=7, help="victory points that win Catan (a full game has 10)")
        parser.add_argument("--seed", type=int, help="random seed, to repeat a game")
        parser.add_argument("--exit", action="store_true", help="stop everything after the game")

    def handle(self, *args: Any, **options: Any) -> None:
        game = GAMES[options["pack"]]
        try:
            self.module = game.load()
        except ImportError:
            raise CommandError(f'This demo needs {game.engine}: pip install "leasehold[{game.extra}]".') from None
        options["agents"] = options["agents"] or game.agents
        if not min(game.agents, 2) <= options["agents"] <= game.max_agents:
            raise CommandError(f"--agents: {options['pack']} has {min(game.agents, 2)} to {game.max_agents} agents.")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.request_stop)
        require_migrated()
        base = f"http://127.0.0.1:{options['port']}"
        up = subprocess.Popen(
            [sys.executable, str(MANAGE_PY), "up", "--port", str(options["port"]), "--leave-nothing"], start_new_session=True
        )
        try:
            self.wait_ready(up, base)
            self.play(up, base, options)
            if not options["exit"]:
                self.print_line("The server stays up. Ctrl-C stops everything and removes every sandbox.")
                sys.exit(up.wait())
        except StopRequested:
            self.print_line("Stopping ...")
        except (requests.ConnectionError, ApiError) as error:
            raise CommandError(f"The game was aborted: {error}") from None
        finally:
            self.stop_control_plane(up)

    def play(self, up: "subprocess.Popen[bytes]", base: str, options: dict[str, Any]) -> None:
        pack, condition = options["pack"], self.module.CONDITION
        environment = f"{pack}-{os.urandom(4).hex()}"
        host = self.create_client(base, [], operator=True, name="demo: game host")
        players = [self.join(base, number, environment, pack) for number in range(options["agents"])]
        demo_options = DemoOptions(points=options["points"], seed=options["seed"])
        outcome = self.module.run_demo(players, environment, host, demo_options, self.print_line)
        self.print_line(outcome)
        ended = post_condition(host, environment, condition, outcome=outcome.rstrip("."))
        if ended:
            self.print_line(f"{condition} posted: {len(ended)} leases ended; their sandboxes are being destroyed.")
        deadline = time.monotonic() + 75  # longer than the interval of the `reclaim` sweep, which is normally enqueued at once
        while time.monotonic() < deadline and up.poll() is None:
            states = {player.client.call("GET", f"/leases/{player.lease['id']}")["status"] for player in players}
            if states == {"destroyed"}:
                break
            time.sleep(0.2)
        self.print_table(list(build_result_rows(players)))
        call_command("meter", stdout=StringIO())  # the sweep runs once a minute
        self.print_table(list(build_cost_rows(host, environment)))
        self.print_line(f"admin     {base}/admin/     (user operator; manage.py quickstart printed its password)")
        self.print_line(f"API docs  {base}/api/docs")

    def join(self, base: str, number: int, environment: str, pack: str) -> Player:
        did = f"did:web:{AGENT_NAMES[number]}.demo.invalid"
        client = self.create_client(base, [did], operator=False, name=f"demo: {AGENT_NAMES[number]}")
        player: Player = self.module.create_player(number, did, client)
        started = time.monotonic()
        player.join(environment, pack)
        seconds, provider = time.monotonic() - started, player.lease["sandbox"]["provider"]
        self.print_line(f"{did} joined {environment} as {player.label}: {provider} sandbox ready in {seconds:.1f} s")
        return player

    def create_client(self, base: str, dids: list[str], *, operator: bool, name: str) -> Client:
        now = database_time.now()
        _, key = api_keys.issue_key(dids, operator=operator, name=name, now=now, actor=COMMAND_LINE)
        return Client(base, key, PATIENCE_SECONDS)

    def wait_ready(self, up: "subprocess.Popen[bytes]", base: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if up.poll() is not None:
                raise CommandError("The control plane did not start; see the output above.")
            try:
                if requests.get(f"{base}/healthz", timeout=2).status_code == 200 and nginx.is_open():
                    return
            except requests.RequestException:
                pass
            time.sleep(0.1)
        raise CommandError(f"The control plane and its egress proxy were not ready within {START_TIMEOUT_SECONDS:.0f} seconds.")

    def stop_control_plane(self, up: "subprocess.Popen[bytes]") -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the shutdown below has its own deadline
        if up.poll() is None:
            up.terminate()
        try:
            up.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(up.pid, signal.SIGKILL)
            raise CommandError("The control plane did not stop in time and was killed.") from None

    def print_table(self, rows: list[tuple[str, ...]]) -> None:
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        self.print_line("")
        for row in rows:
            self.print_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        self.print_line("")

    def print_line(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()

    def request_stop(self, number: int, frame: FrameType | None) -> None:
        raise StopRequested
