"""Wait of `manage.py up` for the services that it needs to start. After a reboot they may be ready later than `up`.

The wait has no end: a supervisor would only start `up` again. SIGTERM ends it at once, as nothing is started yet."""

import time
from collections.abc import Callable

from django.conf import settings
from django.db import OperationalError, connection, connections

from sandboxes import providers
from sandboxes.hosts import registry
from sandboxes.management.base import first_line
from sandboxes.providers.errors import Unavailable

RETRY_SECONDS = 1.0
REPORT_SECONDS = 30.0  # between two lines about the same wait
REFUSAL_PREFIX = "FATAL"  # of an answer of PostgreSQL to a connection, in the languages of its messages
PASSING_REFUSALS = (  # parts of such answers while the server starts, stops or has no free connection
    "starting up", "shutting down", "recovery", "accepting connections", "too many clients", "connection slots",
)  # fmt: skip

PrintLine = Callable[[str], None]


def wait_for(
    name: str,
    find_problem: Callable[[], str],
    *,
    print_line: PrintLine,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return once `find_problem` returns "". Print its text at once, and every REPORT_SECONDS."""
    reported_at = None
    while problem := find_problem():
        if reported_at is None or clock() - reported_at >= REPORT_SECONDS:
            print_line(f"waiting for {name}: {problem}")
            reported_at = clock()
        sleep(RETRY_SECONDS)
    if reported_at is not None:
        print_line(f"{name} responds")


def wait_for_services(*, print_line: PrintLine, needs_engine: bool) -> None:
    """Wait for the database, and then for the engine if it is needed: for its image, or because this host is not known yet.

    A host whose engine has responded before needs none to start: its API works meanwhile. Raises DatabaseError if the database
    refuses the connection for a reason that does not pass, such as a wrong password."""
    if settings.ON_POSTGRES:
        wait_for("the database", find_database_problem, print_line=print_line)
    if settings.SANDBOX_PROVIDER == "docker" and (needs_engine or not registry.is_engine_known("docker")):
        wait_for("the Docker daemon", find_daemon_problem, print_line=print_line)


def find_database_problem() -> str:
    """Return why PostgreSQL does not respond, or "". Raise OperationalError for a refusal that does not pass by itself."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except OperationalError as error:
        if is_lasting_refusal(str(error)):
            raise
        return first_line(error)
    finally:
        connections.close_all()
    return ""


def is_lasting_refusal(message: str) -> bool:
    """Return whether the server itself has refused the connection, and would refuse the next one."""
    return REFUSAL_PREFIX in message and not any(each in message for each in PASSING_REFUSALS)


def find_daemon_problem() -> str:
    """Return why the Docker daemon does not respond, or "". Raise Rejected for an address that cannot be used."""
    try:
        providers.get_provider("docker").engine_id()
    except Unavailable as error:
        return str(error)
    return ""
