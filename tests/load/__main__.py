"""Load with random kills on PostgreSQL and Docker: `python -m tests.load --minutes 20 --kill-every 20 [--seed S]`.

Agents work through the HTTP API while processes of the web server, the worker and the egress proxy, the Docker daemon and
the database are killed by SIGKILL, one at each interval; or the container of a sandbox, preferably of one in which a command
runs, is killed, stopped, restarted or removed. In between the clock of the control plane jumps by an hour or a day and back,
the database refuses writes, is locked or restarted, and the daemon is restarted. All the time one receiver of webhooks
accepts and never answers. Afterwards the command checks that no acknowledged write is lost, no command was executed twice,
nothing is leaked, no row is stuck, and the other receiver has all events. Exit code 1 if a check fails."""

import argparse
import os
import secrets
import sys

import django

KILLED = ("database", "egress", "engine", "sandbox", "web", "worker")
WEATHER = ("clock", "daemon", "locks", "read-only", "restart")
VICTIMS = (*KILLED, *WEATHER)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20, help="duration of the load; default: %(default)s")
    parser.add_argument("--kill-every", type=float, default=20, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--agents", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="chooses victims and acts; default: random")
    parser.add_argument("--live-restore", action="store_true", help="containers survive the death of the Docker daemon")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS, help="default: all")
    parser.add_argument("--keep", action="store_true", help="keep the directory with the logs")
    arguments = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from tests.load.run import Plan, run_load  # the models need configured settings
    from tests.support.servers.engines import find_obstacle

    if obstacle := find_obstacle():
        sys.exit(f"The load cannot run here: {obstacle}.")
    return run_load(Plan(**vars(arguments)))


if __name__ == "__main__":
    sys.exit(main())
