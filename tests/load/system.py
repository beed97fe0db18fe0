"""System under load: a private PostgreSQL cluster, a private Docker Engine, a model upstream, and `manage.py up`.

Everything listens on 127.0.0.1 or on unix sockets, and is below one directory that is removed at the end."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from docker import APIClient
from docker.errors import APIError

from sandboxes.providers.docker.volumes import NAME_LABEL
from tests.commands.manage import MANAGE, get_runtime_dir, run_manage
from tests.e2e.conftest import HEALTHY, Home
from tests.load.clock import ShiftedClock
from tests.load.postgres import Postgres
from tests.load.weather import Weather
from tests.support.servers.engines import SANDBOX_IMAGE, PrivateEngine, private_engine
from tests.support.servers.ports import find_free_ports

PLACES = 6  # of the pool: fewer than agents, so that sandboxes are evicted for each other
DOWNTIME_SECONDS = (0.0, 3.0)  # of the engine and the database after a kill
SETTINGS = {
    "SANDBOX_PROVIDER": "docker", "LEASEHOLD_MAX_SANDBOXES": str(PLACES), "LEASEHOLD_SANDBOX_MEMORY_MIB": "128",
    "LEASEHOLD_COLD_TTL": "2m", "LEASEHOLD_EGRESS_SLOTS": "64", "LEASEHOLD_LLM_API_KEY": "sk-load",
}  # fmt: skip


class System:
    """The running parts, their victims and their rows."""

    def __init__(self, postgres: Postgres, engine: PrivateEngine, home: Home, weather: Weather) -> None:
        self.postgres, self.engine, self.home = postgres, engine, home
        self.victims: dict[str, Callable[[random.Random], str]] = {
            "web": lambda random: self._kill_processes("web", random),
            "worker": lambda random: self._kill_processes("queue", random),
            "egress": lambda random: self._kill_processes("egress", random),
            "engine": self._kill_engine,
            "database": self._kill_database,
            "sandbox": self._stop_sandbox,
            **weather.victims,
        }

    def manage(self, *arguments: str) -> str:
        """Run a management command. Return its output."""
        process = run_manage(self.home.path, *arguments, **self.home.env)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    def sweep(self) -> list[str]:
        """Run all sweeps once. Return the lines that report a failure."""
        process = run_manage(self.home.path, "sweep", **self.home.env)
        return [line for line in (process.stdout + process.stderr).splitlines() if process.returncode and "failed" in line]

    def select(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.postgres.url, connect_timeout=5) as connection:
            return connection.execute(query).fetchall()

    def is_supervised(self) -> bool:
        """Return whether `manage.py up` runs."""
        return self.home.process is not None and self.home.process.poll() is None

    def _kill_processes(self, child: str, random: random.Random) -> str:
        """Kill one process of a part of `up`, or all of them."""
        parts = [child, *(f"{child}{number}" for number in range(1, 8))]  # web, web1, ...
        pids = sorted(pid for part in parts for pid in self.home.find_processes(part))
        is_single, share = random.random() < 0.5, random.random()
        if not pids:
            return "not running"
        killed = [pids[int(share * len(pids))]] if is_single else pids
        for pid in killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return f"{len(killed)} of {len(pids)} processes"

    def _kill_engine(self, random: random.Random) -> str:
        downtime = random.uniform(*DOWNTIME_SECONDS)
        self.engine.kill()
        time.sleep(downtime)
        self.engine.start()
        return f"down for {downtime:.1f} s"

    def _kill_database(self, random: random.Random) -> str:
        is_immediate_stop, downtime = random.random() < 0.5, random.uniform(*DOWNTIME_SECONDS)
        self.postgres.kill(is_immediate_stop)
        time.sleep(downtime)
        self.postgres.start()
        return f"{'immediate stop' if is_immediate_stop else 'SIGKILL'}, down for {downtime:.1f} s"

    def _stop_sandbox(self, random: random.Random) -> str:
        """Kill, stop, restart or remove the container of a sandbox, if there is one of a sandbox in which a command runs."""
        busy = {name for (name,) in self.select("SELECT ref FROM sandboxes_sandbox WHERE open_runs > 0")}
        with closing(APIClient(self.engine.url, version="auto")) as client:
            names = sorted(each["Names"][0].strip("/") for each in client.containers(filters={"label": NAME_LABEL}))
            candidates = [name for name in names if name in busy] or names
            if not candidates:
                return "no container"
            name, verb = random.choice(candidates), random.choice(("kill", "stop", "restart", "remove"))
            try:
                {
                    "kill": client.kill,
                    "stop": partial(client.stop, timeout=1),
                    "restart": partial(client.restart, timeout=1),
                    "remove": partial(client.remove_container, force=True),
                }[verb](name)
            except APIError as error:
                return f"{verb} of {name} failed: {error.explanation or error}"  # destroyed or stored by its own sweep
        return f"{verb} of {name}, {'a command ran' if name in busy else 'idle'}"


@contextmanager
def run_system(directory: Path, *, live_restore: bool) -> Iterator[System]:
    """Start all parts in `directory`. At the end, stop them and remove what they have created."""
    postgres = Postgres(directory / "postgres")
    try:
        postgres.create()
        with private_engine(directory / "engine", live_restore=live_restore) as engine, run_upstream() as upstream:
            clock = ShiftedClock(directory)
            env = {"DATABASE_URL": postgres.url, "DOCKER_HOST": engine.url, "LEASEHOLD_LLM_URL": upstream, **SETTINGS}
            home = Home(directory, LEASEHOLD_SANDBOX_IMAGE=SANDBOX_IMAGE, **env, **clock.env)
            system = System(postgres, engine, home, Weather(postgres, engine, clock))
            try:
                system.manage("migrate", "--verbosity", "0")
                home.up()
                yield system
            finally:
                stop_home(home)
    finally:
        postgres.stop("immediate")


@contextmanager
def run_upstream() -> Iterator[str]:
    """Run a model upstream. Yield its base URL."""
    [port] = find_free_ports()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.upstream", str(port)], cwd=MANAGE.parent, start_new_session=True
    )
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def stop_home(home: Home) -> None:
    """Kill the control plane with all its processes."""
    if home.process:
        with suppress(ProcessLookupError):
            os.killpg(home.process.pid, signal.SIGKILL)
        home.process.wait(timeout=HEALTHY)
    for pid in home.find_processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(get_runtime_dir(home.path), ignore_errors=True)
