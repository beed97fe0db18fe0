"""manage.py up: the whole control plane with one command: web server, queue, and someone to mind them."""

import http.client
import os
import socket
import sys
import time
import uuid
from argparse import ArgumentParser
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError
from django.db import connections
from django.utils import timezone

from controlplane import health, schedules, supervisor
from controlplane.supervisor import Child, Supervisor
from leases import sweeps as leases
from leases.management.base import first_line, parse_duration
from sandboxes import providers
from sandboxes import sweeps as sandboxes
from sandboxes.egress import nginx
from sandboxes.models import Sandbox, SandboxState, Sweep
from sandboxes.providers.base import Provider

HEARTBEAT_CHECK_SECONDS = 2.0  # seconds between two looks at the heartbeat
CLEANUP_TIMEOUT_SECONDS = 60.0  # seconds in which --leave-nothing has to destroy everything
CLEANUP_RETRY_SECONDS = 1.0  # seconds between its rounds
EGRESS_TIMEOUT_SECONDS = 45.0  # seconds that "ready" waits for it


class Command(BaseCommand):
    help = "Run the web server and the queue until Ctrl-C or SIGTERM. Sandboxes outlive it, unless --leave-nothing."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
        parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
        parser.add_argument("--no-worker", action="store_true", help="the queue's workers run somewhere else")
        parser.add_argument("--leave-nothing", action="store_true", help="in the end, destroy all sandboxes")
        parser.add_argument(
            "--hung-after", default="3m", help="the queue is started again when its heartbeat is older than this; 3m"
        )

    def handle(
        self, *args: Any, host: str, port: int, no_worker: bool, leave_nothing: bool, hung_after: str, **options: Any
    ) -> None:
        patience = parse_duration("--hung-after", hung_after)
        try:
            if health.find_unapplied_migrations():
                raise CommandError("Migrations are not applied: run manage.py migrate.")
            provider = providers.get_provider(providers.get_default_provider_name())
            if provider.name == "memory":
                raise CommandError("SANDBOX_PROVIDER=memory lives in one process, and this starts several.")
            with supervisor.hold_lock_file(settings.STATE_DIR / "up.json") as (before, write):
                self._clean_up_previous_instance(before.get("instance", ""))
                require_free_port(host, port)
                family = f"{supervisor.INSTANCE_PREFIX}{uuid.uuid4().hex}"
                started_at = timezone.now().isoformat(timespec="seconds")
                write({"pid": os.getpid(), "started_at": started_at, "instance": family})
                children = self._run(family, host, port, provider, no_worker=no_worker, patience=patience)
                self._forget(family)
                if leave_nothing:
                    self._destroy_all_sandboxes(children)
        except supervisor.AlreadyRunning as taken:
            raise CommandError(f"Another manage.py up is running on {settings.STATE_DIR} ({taken}).") from None
        except DatabaseError as error:
            raise CommandError(f"The database does not answer: {first_line(error)}") from None
        except PermissionError as error:
            raise CommandError(f"LEASEHOLD_STATE_DIR cannot be used: {error}") from None

    def say(self, line: str) -> None:
        self.stdout.write(f"up: {line}")
        self.stdout.flush()

    def _clean_up_previous_instance(self, instance: str) -> None:
        """Nothing is left of the `up` that was here before, and what it was at is due now."""
        if not instance:
            return
        try:
            killed = supervisor.kill_instance(instance)
        except TimeoutError as error:
            raise CommandError(f"The last manage.py up left processes that cannot be killed: {error}") from None
        forgotten = self._forget(instance)
        if killed or forgotten:
            self.say(f"the last start ended badly: {killed} processes killed, {forgotten} acts taken over")

    def _forget(self, instance: str) -> int:
        try:
            return sandboxes.release_instance(instance, now=timezone.now())
        except DatabaseError as error:
            self.say(f"what {instance} was at waits for its deadlines: {first_line(error)}")
            return 0
        finally:
            connections.close_all()

    def _run(
        self, family: str, host: str, port: int, provider: Provider, *, no_worker: bool, patience: timedelta
    ) -> Supervisor:
        """The way out, web server and queue, until a signal comes; none of their processes is left."""
        env = {"SANDBOX_PROVIDER": provider.name}  # `auto` is decided once, for all processes alike
        web = Child("web", build_granian_argv(host, port), settings.BASE_DIR, env)
        egress = Child("egress", [sys.executable, str(settings.BASE_DIR / "manage.py"), "egress"], settings.BASE_DIR, env)
        queue = Child("queue", build_qcluster_argv(), settings.BASE_DIR, env, hung=HeartbeatCheck(patience))
        children = Supervisor(family, [egress, web] if no_worker else [egress, web, queue], say=self.say, forget=self._forget)
        children.install_signal_handlers()
        settings.STATIC_ROOT.mkdir(parents=True, exist_ok=True)  # empty will do; without it the server warns
        schedules.sync_schedules(now=timezone.now())
        if not no_worker:
            schedules.enqueue_all_sweeps()
        connections.close_all()
        site = f"http://{bracket_ipv6(to_client_host(host))}:{port}"
        self.say(f"admin {site}/admin/, API {site}/api/docs, provider {provider.name}")
        if not provider.isolated:
            self.say(f"WARNING: {provider.name.upper()} DOES NOT ISOLATE. AGENTS ACT WITH THIS USER'S RIGHTS.")
        children.run(each_tick=ReadinessAnnouncer(web, to_client_host(host), port, self.say))
        return children

    def _destroy_all_sandboxes(self, children: Supervisor) -> None:
        """Every lease has ended and every sandbox is destroyed, unless LEAVING passed, or a signal came."""
        ended = leases.end_all_leases(now=timezone.now(), why="the control plane was shut down", actor="up")
        there = Sandbox.objects.exclude(state=SandboxState.DESTROYED)
        count, until = there.count(), time.monotonic() + CLEANUP_TIMEOUT_SECONDS
        while True:
            leases.reclaim(now=timezone.now())
            hopeful = there.filter(quarantined_at__isnull=True).exists()
            if not hopeful or children.impatient or time.monotonic() > until:
                break
            time.sleep(CLEANUP_RETRY_SECONDS)
        left = there.count()
        self.say(f"{ended} leases ended, {count - left} sandboxes destroyed, {left} left")
        if left:
            raise CommandError("manage.py sweep --loop destroys them once the provider answers.")


class HeartbeatCheck:
    """Says why the queue counts as hung: neither its last heartbeat nor its last start is younger than `patience`.

    The queue can lose its workers' lock and then look healthy and do nothing, for ever."""

    def __init__(self, patience: timedelta) -> None:
        self.patience = patience
        self.next_check_at = 0.0

    def __call__(self, queue: Child) -> str:
        if queue.age < self.patience.total_seconds() or time.monotonic() < self.next_check_at:
            return ""
        self.next_check_at = time.monotonic() + HEARTBEAT_CHECK_SECONDS
        try:
            beat = Sweep.objects.filter(name="heartbeat", succeeded_at__gt=timezone.now() - self.patience).exists()
        except DatabaseError:  # then it cannot write one either, and starting it again would not help
            beat = True
        finally:
            connections.close_all()
        return "" if beat else f"it has given no heartbeat for {self.patience.total_seconds():g} s, so it hangs"


class ReadinessAnnouncer:
    """Says "ready" once for each start of the web server, when /healthz answers and sandboxes have their way out; or after
    some time without the latter, which is said then."""

    def __init__(self, web: Child, host: str, port: int, say: Callable[[str], None]) -> None:
        self.web, self.host, self.port, self.say = web, host, port, say
        self.announced = ""

    def __call__(self) -> None:
        if not self.web.process or self.announced == self.web.instance or not self._healthy():
            return
        is_open = nginx.is_open()
        if is_open or self.web.age > EGRESS_TIMEOUT_SECONDS:
            self.announced = self.web.instance
            self.say("ready" if is_open else "ready, but SANDBOXES REACH NO MODEL: their way out does not open")

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=3)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def build_granian_argv(host: str, port: int) -> list[str]:
    """The web server. Its backpressure stays as it is: it counts connections, and idle ones would lock others out."""
    return [
        sys.executable, "-m", "granian", "controlplane.wsgi:application",
        "--interface", "wsgi", "--host", host, "--port", str(port), "--http", "1", "--no-ws",
        "--workers", str(settings.WEB_WORKERS), "--blocking-threads", str(settings.WEB_THREADS),
        "--blocking-threads-idle-timeout", "600",  # a thread that ends takes its database connection with it
        "--respawn-failed-workers", "--log-level", "error",
    ]  # fmt: skip


def build_qcluster_argv() -> list[str]:
    return [sys.executable, str(settings.BASE_DIR / "manage.py"), "qcluster"]


def require_free_port(host: str, port: int) -> None:
    """CommandError unless this address can be listened on. The server itself would share it with whoever has it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except (OSError, OverflowError) as error:
        raise CommandError(f"Nothing can listen on {host} port {port}: {error}. Choose another with --port.") from None


def to_client_host(host: str) -> str:
    """The address at which we ourselves reach a server that listens on this one."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104


def bracket_ipv6(host: str) -> str:
    return f"[{host}]" if ":" in host else host
