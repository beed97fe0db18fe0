"""Stages of `manage.py up`, a process that executes itself again to drop Django's memory once its children are forked.

1. `prepare`, with Django: takes the lock, forks the children, which share its memory, and executes the next stage.
2. `supervise`, with the standard library only: restarts children and stops them. The process id stays the same: the children
   remain children of this process, and the lock stays held. The replacement of a child executes `up` in the stage `child`.
3. `finish`, with Django: releases the claims of the instance, and ends with the exit code of `up`.

STAGE_VARIABLE passes values to the next stage. SIGTERM, SIGINT and SIGHUP are blocked between two stages."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from controlplane.supervisor import (
    INSTANCE_VARIABLE,
    RESERVED_VARIABLE,
    STOP_SIGNALS,
    Child,
    Supervisor,
    find_no_problem,
    reserve_instance_name,
)

STAGE_VARIABLE = "_LEASEHOLD_STAGE"
EGRESS_TIMEOUT_SECONDS = 45.0  # after a start of the web server; "ready" is then printed without egress
PROBE_TIMEOUT_SECONDS = 3.0
CHILD_FIELDS = ("name", "drain_seconds", "starts", "started_at", "instance", "pid")


def print_line(line: str) -> None:
    print(f"up: {line}", flush=True)


def begin() -> None:
    """Run the stage `supervise` if it is the present one. Otherwise return: the management command runs the other stages.

    In the first stage the process executes itself again, to reserve room for an instance's name in its environment."""
    if STAGE_VARIABLE not in os.environ:
        reserve_instance_name()
    elif json.loads(os.environ[STAGE_VARIABLE])["stage"] == "supervise":
        supervise(read_values())


def read_values() -> dict[str, Any]:
    """Return the values that the previous stage passed, and remove them from the environment. {} in the first stage."""
    values: dict[str, Any] = json.loads(os.environ.pop(STAGE_VARIABLE, "{}"))
    return values


def execute(stage: str, **values: Any) -> NoReturn:
    """Execute the next stage in this process. Only inheritable files stay open."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    environment = os.environ | {STAGE_VARIABLE: json.dumps({"stage": stage, **values})}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606


def unblock_signals() -> None:
    """Receive the signals that arrived between two stages."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def describe_children(children: Sequence[Child]) -> list[dict[str, Any]]:
    """Return the children as the value `children` of the stage `supervise`. A child with a health check is `watched`."""
    return [
        {name: getattr(child, name) for name in CHILD_FIELDS} | {"watched": child.find_problem is not find_no_problem}
        for child in children
    ]


def supervise(values: dict[str, Any]) -> NoReturn:
    """Restart children until a signal stops them, then execute the stage `finish`."""
    os.set_inheritable(values["lock_fd"], False)
    check = HeartbeatCheck(values["heartbeat_path"], values["heartbeat_timeout"])
    children = [_restore_child(fields, check, values["child_values"]) for fields in values["children"]]
    processes = Supervisor(values["run_instance"], children, print_line=print_line)
    processes.install_signal_handlers()
    processes.stopping, processes.stop_at_once = values["stopping"], values["stop_at_once"]
    unblock_signals()
    web = next(child for child in children if child.drain_seconds)
    announcer = ReadinessAnnouncer(web, values["host"], values["port"], values["egress_sockets"])
    processes.run(each_tick=announcer, drain=lambda: drain(values["draining_path"], values["drain_delay"]))
    os.set_inheritable(values["lock_fd"], True)
    execute("finish", run_instance=values["run_instance"], lock_fd=values["lock_fd"])


def _restore_child(fields: dict[str, Any], check: "HeartbeatCheck", child_values: dict[str, Any]) -> Child:
    is_watched = fields.pop("watched")

    def work() -> None:
        os.environ.pop(RESERVED_VARIABLE, None)
        execute("child", name=fields["name"], predecessors=os.environ[INSTANCE_VARIABLE].rpartition(".")[0], **child_values)

    return Child(work=work, find_problem=check if is_watched else find_no_problem, **fields)


def drain(draining_path: str, delay_seconds: float) -> None:
    """Make /readyz fail, and give the load balancer time to notice before the web server stops."""
    with open(draining_path, "w"):
        pass
    if delay_seconds:
        print_line(f"not ready; accepting requests for another {delay_seconds:g} s")
        time.sleep(delay_seconds)


class HeartbeatCheck:
    """Health check of the queue worker: it hangs if neither its start nor its last heartbeat is within the timeout."""

    def __init__(self, path: str, timeout_seconds: float) -> None:
        self.path, self.timeout_seconds = path, timeout_seconds

    def __call__(self, queue: Child) -> str:
        if queue.age < self.timeout_seconds:
            return ""
        try:
            with open(self.path) as file:
                age = time.monotonic() - float(file.read())
        except (FileNotFoundError, ValueError):
            age = self.timeout_seconds
        is_alive = 0 <= age < self.timeout_seconds  # a time in the future is one of before the machine was started
        return "" if is_alive else f"no heartbeat for {self.timeout_seconds:g} s"


class ReadinessAnnouncer:
    """Prints "ready" once per start of the web server, as soon as /healthz responds and the egress proxy listens.

    If the egress proxy does not listen within EGRESS_TIMEOUT_SECONDS, prints "ready" with a warning."""

    def __init__(self, web: Child, host: str, port: int, egress_sockets: Sequence[str]) -> None:
        self.web, self.host, self.port, self.egress_sockets = web, host, port, egress_sockets
        self.announced = ""  # instance of the web server for which "ready" was printed

    def __call__(self) -> None:
        if not self.web.pid or self.announced == self.web.instance or not is_healthy(self.host, self.port):
            return
        is_open = all(map(is_listening, self.egress_sockets))
        if is_open or self.web.age > EGRESS_TIMEOUT_SECONDS:
            self.announced = self.web.instance
            print_line("ready" if is_open else "ready, but SANDBOXES REACH NO MODEL: the egress proxy is not open")


def is_healthy(host: str, port: int) -> bool:
    """Return whether /healthz answers 200. Uses a socket, because http.client takes several MiB of memory."""
    try:
        with socket.create_connection((host, port), timeout=PROBE_TIMEOUT_SECONDS) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b" 200 " in connection.recv(64)
    except OSError:
        return False


def is_listening(path: str) -> bool:
    """Return whether a process listens on this unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(path) == 0
