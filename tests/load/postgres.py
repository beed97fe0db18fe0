"""PostgreSQL cluster of one run of the load."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from tests.support.servers.ports import find_free_ports
from tests.support.waiting import wait_until


class Postgres:
    """PostgreSQL cluster in a directory."""

    def __init__(self, directory: Path, *, max_connections: int = 200) -> None:
        self.directory, self.max_connections = directory, max_connections
        [self.port] = find_free_ports()
        self.url = f"postgres://leasehold@127.0.0.1:{self.port}/postgres"
        self.programs = max(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])).parent

    def create(self) -> None:
        self.directory.mkdir()
        if os.geteuid() == 0:
            shutil.chown(self.directory, "postgres")
        self._run("initdb", "-D", str(self.directory / "data"), "-A", "trust", "-U", "leasehold")
        self.start()

    def start(self) -> None:
        """Start the server. After a kill, wait until the processes of the killed server have ended."""
        options = f"-p {self.port} -k {self.directory} -c listen_addresses=127.0.0.1 -c max_connections={self.max_connections}"
        arguments = ["-D", str(self.directory / "data"), "-l", str(self.directory / "log"), "-w", "-o", options, "start"]
        wait_until(lambda: self._run("pg_ctl", *arguments, check=False) == 0, "PostgreSQL starts", within=60, every=0.2)

    def kill(self, is_immediate_stop: bool) -> None:
        """Kill the server by SIGKILL, or stop it without a checkpoint. Both recover from the log at the next start."""
        if is_immediate_stop:
            self.stop("immediate")
            return
        pid = int((self.directory / "data/postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)

    def stop(self, mode: str) -> None:
        """Stop the server: "fast" ends all sessions in order, "immediate" needs a recovery at the next start."""
        self._run("pg_ctl", "-D", str(self.directory / "data"), "-m", mode, "-w", "stop", check=False)

    def _run(self, program: str, *arguments: str, check: bool = True) -> int:
        owner = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        command = [*owner, str(self.programs / program), *arguments]
        return subprocess.run(command, check=check, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
