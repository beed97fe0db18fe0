"""manage.py up: run and supervise the web server, the queue and the egress proxy."""

import gc
import os
import signal
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

from controlplane import checks, health, schedules, stages, startup, supervisor
from controlplane.supervisor import Child, LockFile, Supervisor
from controlplane.worker import heartbeat as queue_heartbeat
from leases import sweeps as lease_sweeps
from leases.management.base import parse_duration
from sandboxes import long_calls, providers
from sandboxes.db import database_time, dialect, migrations
from sandboxes.egress import nginx
from sandboxes.hosts import capacity, registry
from sandboxes.management.base import EXIT_INTERRUPTED, build_command_error, first_line, require_migrated
from sandboxes.models import Sandbox, SandboxState
from sandboxes.pool import prewarmed
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import ProviderError
from sandboxes.sweeps import heartbeat

CLEANUP_TIMEOUT_SECONDS = 60.0  # for --leave-nothing to destroy all sandboxes
CLEANUP_RETRY_SECONDS = 1.0


class Command(BaseCommand):
    requires_system_checks = checks.LONG_RUNNING
    help = "Run web server, queue and egress proxy until Ctrl-C or SIGTERM. Sandboxes are kept unless --leave-nothing."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
        parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
        parser.add_argument("--no-worker", action="store_true", help="do not start the queue, whose workers run elsewhere")
        parser.add_argument("--leave-nothing", action="store_true", help="end all leases and destroy all sandboxes on exit")
        parser.add_argument(
            "--initialize",
            action="store_true",
            help="first build the image, apply migrations and run quickstart",
        )
        parser.add_argument("--hung-after", default="3m", help="restart the queue if its heartbeat is older; default: 3m")

    def handle(
        self,
        *args: Any,
        host: str,
        port: int,
        no_worker: bool,
        leave_nothing: bool,
        initialize: bool,
        hung_after: str,
        **options: Any,
    ) -> None:
        heartbeat_timeout = parse_duration("--hung-after", hung_after)
        values = stages.read_values()
        try:
            if values.get("stage") == "child":
                self._run_child(values, host, port, with_queue=not no_worker)
            elif values.get("stage") == "finish":
                self._finish(values, leave_nothing=leave_nothing)
            else:
                startup.wait_for_services(print_line=self.print_line, needs_engine=initialize)
                if initialize:
                    initialize_installation()
                self._prepare(host, port, with_queue=not no_worker, heartbeat_timeout=heartbeat_timeout)
        except supervisor.AlreadyRunning as error:
            raise CommandError(f"Another manage.py up is running on {settings.STATE_DIR} ({error}).") from None
        except DatabaseError as error:
            raise build_command_error(error) from None
        except ProviderError as error:
            raise CommandError(str(error)) from None
        except PermissionError as error:
            raise CommandError(f"LEASEHOLD_STATE_DIR cannot be used: {error}") from None
        except KeyboardInterrupt:  # before the stage `supervise`, which has handlers of its own
            raise SystemExit(EXIT_INTERRUPTED) from None

    def _prepare(self, host: str, port: int, *, with_queue: bool, heartbeat_timeout: timedelta) -> None:
        """First stage: start the children, and continue in the stage `supervise`."""
        require_migrated()
        provider = providers.get_provider(providers.get_default_provider_name())
        if provider.name == "memory" and settings.PROFILE != "small":
            raise CommandError("SANDBOX_PROVIDER=memory works in one process only: LEASEHOLD_PROFILE=small.")
        with supervisor.hold_lock_file(settings.STATE_DIR / "up.json") as lock:
            self._clean_up_previous_instance(lock.note.get("instance", ""))
            require_free_port(host, port)
            run_instance = f"{supervisor.INSTANCE_PREFIX}{uuid.uuid4().hex}"
            started_at = database_time.now().isoformat(timespec="seconds")
            lock.write({"pid": os.getpid(), "started_at": started_at, "instance": run_instance})
            check = stages.HeartbeatCheck(str(queue_heartbeat.get_path()), heartbeat_timeout.total_seconds())
            children = build_children(host, port, with_queue=with_queue, find_problem=check)
            processes = Supervisor(run_instance, children, print_line=self.print_line)
            processes.install_signal_handlers()
            self._prepare_host(host, port, provider, with_queue=with_queue)
            self._start(processes)
            supervise(processes, lock, check, to_client_host(host), port, provider)

    def _finish(self, values: dict[str, Any], *, leave_nothing: bool) -> None:
        """Last stage: every child has ended, and the lock is still held."""
        os.set_inheritable(values["lock_fd"], False)
        processes = Supervisor(values["run_instance"], [], print_line=self.print_line)
        processes.stopping = True  # the next signal ends the clean-up
        processes.install_signal_handlers()
        stages.unblock_signals()
        self._release_instance(values["run_instance"])
        if leave_nothing:
            self._destroy_all_sandboxes(processes)

    def _run_child(self, values: dict[str, Any], host: str, port: int, *, with_queue: bool) -> None:
        """Serve as the replacement of a child that ended, whose claims become due at once."""
        stages.unblock_signals()
        supervisor.set_identity(values["name"], settings.INSTANCE)
        settings.SANDBOX_PROVIDER = values["provider"]
        self._release_instance(values["predecessors"])
        next(child for child in build_children(host, port, with_queue=with_queue) if child.name == values["name"]).work()

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

    def _prepare_host(self, host: str, port: int, provider: Provider, *, with_queue: bool) -> None:
        settings.SANDBOX_PROVIDER = provider.name  # `auto` is resolved once, so that all processes agree
        settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)  # the server warns if it does not exist
        health.set_draining(False)
        self._register_host(with_queue=with_queue)
        url = settings.PUBLIC_URL or f"http://{bracket_ipv6(to_client_host(host))}:{port}"
        self.print_line(f"admin {url}/admin/, API {url}/api/docs, provider {provider.name}")
        if not provider.isolated:
            self.print_line(f"WARNING: {provider.name.upper()} DOES NOT ISOLATE. AGENTS ACT WITH THIS USER'S RIGHTS.")
        if newer := migrations.read_status().explain_newer():
            self.print_line(f"WARNING: {newer}")
        for line in checks.list_engine_problems():
            self.print_line(line)

    def _start(self, processes: Supervisor) -> None:
        """Fork all children, unless a signal has arrived."""
        connections.close_all()
        gc.collect()
        gc.freeze()  # a collection in a child would write to the pages that it shares with this process
        try:
            for child in processes.children:
                if not processes.stopping:
                    child.start(processes.run_instance)
        except BaseException:
            processes.stop()
            raise

    def _register_host(self, *, with_queue: bool) -> None:
        """Record this host, and write the schedules of its worker. Without its engine no schedules are written."""
        for failure in heartbeat.record_heartbeats(now=database_time.now()).failures:
            self.print_line(f"host not recorded: {failure}")
        try:
            schedules.sync_schedules(now=database_time.now())
            if with_queue:
                schedules.enqueue_all_sweeps()
        except ProviderError as error:
            self.print_line(f"schedules not written: {error}. Run manage.py sync_schedules once the engine responds.")
        capacity.update_automatic_capacities(now=database_time.now())

    def _destroy_all_sandboxes(self, processes: Supervisor) -> None:
        """End every lease, and destroy every sandbox and all resources for starts, except those of other hosts.

        Stops when CLEANUP_TIMEOUT_SECONDS pass or a signal arrives."""
        reason = "the control plane was shut down"
        ended = lease_sweeps.end_all_leases(now=database_time.now(), detail=reason, actor="up")
        prewarmed.schedule_destroy_unclaimed(now=database_time.now(), reason=reason, actor="up")
        sandboxes_left = Sandbox.objects.filter(registry.filter_local()).exclude(state=SandboxState.DESTROYED)
        count, deadline = sandboxes_left.count(), time.monotonic() + CLEANUP_TIMEOUT_SECONDS
        while True:
            lease_sweeps.reclaim(now=database_time.now())
            retryable = sandboxes_left.filter(quarantined_at__isnull=True).exists()
            if not retryable or processes.stop_at_once or time.monotonic() > deadline:
                break
            time.sleep(CLEANUP_RETRY_SECONDS)
        self._discard_prepared()
        remaining = sandboxes_left.count()
        self.print_line(f"{ended} leases ended, {count - remaining} sandboxes destroyed, {remaining} left")
        if remaining:
            raise CommandError("Sandboxes remain. manage.py up --leave-nothing destroys them once their provider responds.")

    def _discard_prepared(self) -> None:
        try:
            providers.get_provider(providers.get_default_provider_name()).discard_prepared()
        except ProviderError as error:
            self.print_line(f"resources for starts not removed: {error}")


def initialize_installation() -> None:
    """Build the image, migrate and run quickstart, in a process of its own: the children do not inherit its memory."""
    if supervisor.run_forked("initialize", build_image_and_database):
        raise CommandError("The installation is not initialized.")


def build_image_and_database() -> None:
    try:
        if providers.get_default_provider_name() == "docker":
            call_command("build_image")
        if migrations.read_status().unapplied:
            call_command("migrate", verbosity=0)
        call_command("quickstart")
    except CommandError as error:
        raise SystemExit(f"CommandError: {error}") from None


def supervise(
    processes: Supervisor, lock: LockFile, check: stages.HeartbeatCheck, host: str, port: int, provider: Provider
) -> None:
    """Continue in the stage `supervise`, which watches the running children. `host` and `port` are those of a local client."""
    signal.pthread_sigmask(signal.SIG_BLOCK, supervisor.STOP_SIGNALS)
    stages.execute(
        "supervise",
        run_instance=processes.run_instance,
        lock_fd=lock.make_inheritable(),
        stopping=processes.stopping,
        stop_at_once=processes.stop_at_once,
        children=stages.describe_children(processes.children),
        child_values={"provider": provider.name},
        heartbeat_path=check.path,
        heartbeat_timeout=check.timeout_seconds,
        host=host,
        port=port,
        egress_sockets=[str(path) for path in nginx.list_required_sockets()],
        draining_path=str(long_calls.get_shutdown_path()),
        drain_delay=settings.DRAIN_DELAY_SECONDS,
    )


def build_children(
    host: str, port: int, *, with_queue: bool, find_problem: Callable[[Child], str] = supervisor.find_no_problem
) -> list[Child]:
    """Return the child processes of the profile. A child with `drain_seconds` serves HTTP; several are web, web1, web2, ..."""
    drain_seconds = settings.DRAIN_TIMEOUT.total_seconds()
    if settings.PROFILE == "small":
        serve = in_child(lambda: serve_combined(host, port, with_queue=with_queue))
        find_problem = find_problem if with_queue else supervisor.find_no_problem
        return [Child("all", serve, find_problem, drain_seconds + supervisor.STOP_TIMEOUT_SECONDS)]
    serve = in_child(lambda: serve_web(host, port))
    children = [Child("egress", in_child(lambda: call_command("egress")))]
    children += [Child(f"web{number or ''}", serve, drain_seconds=drain_seconds) for number in range(settings.WEB_WORKERS)]
    if with_queue:
        children.append(Child("queue", in_child(lambda: call_command("qcluster")), find_problem))
    return children


def serve_web(host: str, port: int) -> None:
    from controlplane import webserver  # imports granian, which the other children do not need

    webserver.serve(host, port)


def serve_combined(host: str, port: int, *, with_queue: bool) -> None:
    from controlplane import combined  # imports granian and aiohttp, which no process of the other profile needs together

    combined.serve(host, port, with_queue=with_queue)


def in_child(serve: Callable[[], object]) -> Callable[[], None]:
    """Return the work of a forked child: `serve` under the child's instance. A CommandError ends it with a message."""

    def work() -> None:
        settings.INSTANCE = os.environ[supervisor.INSTANCE_VARIABLE]
        dialect.keep_idle_connections()
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
