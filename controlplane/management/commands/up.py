"""manage.py up: run and supervise the web server, the queue and the egress proxy."""

import gc
import http.client
import os
import socket
import time
import uuid
from argparse import ArgumentParser
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError
from django.db import connections
from django.utils import timezone

from controlplane import checks, combined, health, schedules, supervisor, webserver
from controlplane.supervisor import Child, Supervisor
from leases import sweeps as lease_sweeps
from leases.management.base import first_line, parse_duration
from sandboxes import providers
from sandboxes.db import database_time
from sandboxes.egress import nginx
from sandboxes.hosts import capacity, registry
from sandboxes.models import Sandbox, SandboxState, Sweep
from sandboxes.providers.base import Provider, ProviderError
from sandboxes.sweeps import heartbeat

HEARTBEAT_CHECK_SECONDS = 2.0  # interval between queries of the heartbeat
CLEANUP_TIMEOUT_SECONDS = 60.0  # for --leave-nothing to destroy all sandboxes
CLEANUP_RETRY_SECONDS = 1.0
EGRESS_TIMEOUT_SECONDS = 45.0  # after this "ready" is printed without egress


class Command(BaseCommand):
    requires_system_checks = (checks.CONFIGURATION,)
    help = "Run web server, queue and egress proxy until Ctrl-C or SIGTERM. Sandboxes are kept unless --leave-nothing."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
        parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
        parser.add_argument("--no-worker", action="store_true", help="do not start the queue, whose workers run elsewhere")
        parser.add_argument("--leave-nothing", action="store_true", help="end all leases and destroy all sandboxes on exit")
        parser.add_argument("--hung-after", default="3m", help="restart the queue if its heartbeat is older; default: 3m")

    def handle(
        self, *args: Any, host: str, port: int, no_worker: bool, leave_nothing: bool, hung_after: str, **options: Any
    ) -> None:
        heartbeat_timeout = parse_duration("--hung-after", hung_after)
        try:
            if health.find_unapplied_migrations():
                raise CommandError("Migrations are not applied: run manage.py migrate.")
            provider = providers.get_provider(providers.get_default_provider_name())
            if provider.name == "memory":
                raise CommandError("SANDBOX_PROVIDER=memory works in one process only, and manage.py up starts several.")
            with supervisor.hold_lock_file(settings.STATE_DIR / "up.json") as (previous, write):
                self._clean_up_previous_instance(previous.get("instance", ""))
                require_free_port(host, port)
                run_instance = f"{supervisor.INSTANCE_PREFIX}{uuid.uuid4().hex}"
                started_at = timezone.now().isoformat(timespec="seconds")
                write({"pid": os.getpid(), "started_at": started_at, "instance": run_instance})
                processes = self._run(
                    run_instance, host, port, provider, no_worker=no_worker, heartbeat_timeout=heartbeat_timeout
                )
                self._release_instance(run_instance)
                if leave_nothing:
                    self._destroy_all_sandboxes(processes)
        except supervisor.AlreadyRunning as error:
            raise CommandError(f"Another manage.py up is running on {settings.STATE_DIR} ({error}).") from None
        except DatabaseError as error:
            raise CommandError(f"The database does not respond: {first_line(error)}") from None
        except PermissionError as error:
            raise CommandError(f"LEASEHOLD_STATE_DIR cannot be used: {error}") from None

    def print_line(self, line: str) -> None:
        self.stdout.write(f"up: {line}")
        self.stdout.flush()

    def _clean_up_previous_instance(self, instance: str) -> None:
        """Kill the remaining processes of the previous `up` and make the work they claimed due at once."""
        if not instance:
            return
        try:
            killed = supervisor.kill_instance(instance)
        except TimeoutError as error:
            raise CommandError(f"Processes of the previous manage.py up cannot be killed: {error}") from None
        released = self._release_instance(instance)
        if killed or released:
            self.print_line(f"previous instance not stopped cleanly: {killed} processes killed, {released} claims released")

    def _release_instance(self, instance: str) -> int:
        try:
            return lease_sweeps.release_instance(instance, now=database_time.now())
        except DatabaseError as error:
            self.print_line(f"claims of {instance} not released, they end at their deadlines: {first_line(error)}")
            return 0
        finally:
            connections.close_all()

    def _run(
        self, run_instance: str, host: str, port: int, provider: Provider, *, no_worker: bool, heartbeat_timeout: timedelta
    ) -> Supervisor:
        """Run the egress proxy, the web server and the queue until a signal arrives, then stop them."""
        settings.SANDBOX_PROVIDER = provider.name  # `auto` is resolved once, so that all processes agree
        children = build_children(host, port, with_queue=not no_worker, find_problem=HeartbeatCheck(heartbeat_timeout))
        web = next(child for child in children if child.drain_seconds)
        processes = Supervisor(run_instance, children, print_line=self.print_line, release_instance=self._release_instance)
        processes.install_signal_handlers()
        settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)  # the server warns if it does not exist
        health.set_draining(False)
        self._register_host(no_worker=no_worker)
        connections.close_all()
        gc.collect()
        gc.freeze()  # a collection in a child would write to the pages that it shares with this process
        url = f"http://{bracket_ipv6(to_client_host(host))}:{port}"
        self.print_line(f"admin {url}/admin/, API {url}/api/docs, provider {provider.name}")
        if not provider.isolated:
            self.print_line(f"WARNING: {provider.name.upper()} DOES NOT ISOLATE. AGENTS ACT WITH THIS USER'S RIGHTS.")
        processes.run(each_tick=ReadinessAnnouncer(web, to_client_host(host), port, self.print_line), drain=self._drain)
        return processes

    def _register_host(self, *, no_worker: bool) -> None:
        """Record this host, and write the schedules of its worker. Without its engine no schedules are written."""
        for failure in heartbeat.record_heartbeats(now=database_time.now()).failures:
            self.print_line(f"host not recorded: {failure}")
        try:
            schedules.sync_schedules(now=timezone.now())
            if not no_worker:
                schedules.enqueue_all_sweeps()
        except ProviderError as error:
            self.print_line(f"schedules not written: {error}. Run manage.py sync_schedules once the engine responds.")
        capacity.update_automatic_capacities(now=database_time.now())

    def _drain(self) -> None:
        """Make /readyz fail, and give the load balancer time to notice before the web server stops."""
        health.set_draining(True)
        if settings.DRAIN_DELAY_SECONDS:
            self.print_line(f"not ready; accepting requests for another {settings.DRAIN_DELAY_SECONDS} s")
            time.sleep(settings.DRAIN_DELAY_SECONDS)

    def _destroy_all_sandboxes(self, processes: Supervisor) -> None:
        """End every lease and destroy every sandbox, except those of other hosts.

        Stops when CLEANUP_TIMEOUT_SECONDS pass or a signal arrives."""
        ended = lease_sweeps.end_all_leases(now=database_time.now(), detail="the control plane was shut down", actor="up")
        sandboxes_left = Sandbox.objects.filter(registry.filter_local()).exclude(state=SandboxState.DESTROYED)
        count, deadline = sandboxes_left.count(), time.monotonic() + CLEANUP_TIMEOUT_SECONDS
        while True:
            lease_sweeps.reclaim(now=database_time.now())
            retryable = sandboxes_left.filter(quarantined_at__isnull=True).exists()
            if not retryable or processes.stop_at_once or time.monotonic() > deadline:
                break
            time.sleep(CLEANUP_RETRY_SECONDS)
        remaining = sandboxes_left.count()
        self.print_line(f"{ended} leases ended, {count - remaining} sandboxes destroyed, {remaining} left")
        if remaining:
            raise CommandError("Sandboxes remain. manage.py sweep --loop destroys them once the provider responds.")


class HeartbeatCheck:
    """Detects a hung queue: running longer than `heartbeat_timeout` without a heartbeat in that time.

    The queue can lose the lock shared by its workers. It then looks healthy but executes nothing."""

    def __init__(self, heartbeat_timeout: timedelta) -> None:
        self.heartbeat_timeout = heartbeat_timeout
        self.next_check_at = 0.0

    def __call__(self, queue: Child) -> str:
        if queue.age < self.heartbeat_timeout.total_seconds() or time.monotonic() < self.next_check_at:
            return ""
        self.next_check_at = time.monotonic() + HEARTBEAT_CHECK_SECONDS
        try:
            own = Sweep.objects.filter(name=schedules.HEARTBEAT, host=registry.find_worker_host(now=timezone.now()))
            is_alive = own.filter(succeeded_at__gt=timezone.now() - self.heartbeat_timeout).exists()
        except DatabaseError:  # the queue cannot write a heartbeat either, and a restart would not help
            is_alive = True
        finally:
            connections.close_all()
        return "" if is_alive else f"no heartbeat for {self.heartbeat_timeout.total_seconds():g} s"


class ReadinessAnnouncer:
    """Prints "ready" once per start of the web server, when /healthz responds and the egress proxy is open.

    After EGRESS_TIMEOUT_SECONDS it prints "ready" with a warning instead of waiting for the egress proxy."""

    def __init__(self, web: Child, host: str, port: int, print_line: Callable[[str], None]) -> None:
        self.web, self.host, self.port, self.print_line = web, host, port, print_line
        self.announced = ""

    def __call__(self) -> None:
        if not self.web.pid or self.announced == self.web.instance or not self._healthy():
            return
        is_open = nginx.is_open()
        if is_open or self.web.age > EGRESS_TIMEOUT_SECONDS:
            self.announced = self.web.instance
            self.print_line("ready" if is_open else "ready, but SANDBOXES REACH NO MODEL: the egress proxy is not open")

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=3)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def build_children(host: str, port: int, *, with_queue: bool, find_problem: Callable[[Child], str]) -> list[Child]:
    """Return the child processes of the profile. A child with `drain_seconds` serves HTTP; several are web, web1, web2, ..."""
    drain_seconds = settings.DRAIN_TIMEOUT.total_seconds()
    if settings.PROFILE == "small":
        serve = in_child(lambda: combined.serve(host, port, with_queue=with_queue))
        find_problem = find_problem if with_queue else supervisor.find_no_problem
        return [Child("all", serve, find_problem, drain_seconds + supervisor.STOP_TIMEOUT_SECONDS)]
    serve = in_child(lambda: webserver.serve(host, port))
    children = [Child("egress", in_child(lambda: call_command("egress")))]
    children += [Child(f"web{number or ''}", serve, drain_seconds=drain_seconds) for number in range(settings.WEB_WORKERS)]
    if with_queue:
        children.append(Child("queue", in_child(lambda: call_command("qcluster")), find_problem))
    return children


def in_child(serve: Callable[[], object]) -> Callable[[], None]:
    """Return the work of a forked child: `serve` under the child's instance. A CommandError ends it with a message."""

    def work() -> None:
        settings.INSTANCE = os.environ[supervisor.INSTANCE_VARIABLE]
        try:
            serve()
        except CommandError as error:
            raise SystemExit(f"CommandError: {error}") from None

    return work


def require_free_port(host: str, port: int) -> None:
    """Raise CommandError if the address is in use. The server itself would share the port with its current owner."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except (OSError, OverflowError) as error:
        raise CommandError(f"Cannot listen on {host} port {port}: {error}. Choose another port with --port.") from None


def to_client_host(host: str) -> str:
    """Return the address at which a local client reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104


def bracket_ipv6(host: str) -> str:
    return f"[{host}]" if ":" in host else host
