"""Scale of one installation: `python -m tests.scale --hosts 50 --sandboxes 10000 --minutes 10`.

Starts a private PostgreSQL cluster and one `manage.py up` for each host: web server, queue worker and egress proxy in one
process, with the memory provider and a state directory of its own. The hosts share nothing but the database and the store, so
the costs are those of the control plane, without sandboxes. Clients then acquire a lease for each sandbox, start the
sandboxes, renew the leases and execute commands, wait until the sandboxes are idle and go cold, and release the leases. Prints
costs in CPU time, which do not depend on the number of cores, growth of the database, and what was late. Exit code 1 if a
request failed, a lease ended as lost or a control plane was restarted."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import django


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--sandboxes", type=int, default=10_000, help="in all; default: %(default)s")
    parser.add_argument("--started", type=int, metavar="COUNT", help="sandboxes to start; default: all")
    parser.add_argument("--minutes", type=float, default=10, help="duration of the life cycles; default: %(default)s")
    parser.add_argument("--idle-minutes", type=float, default=2, help="without any request before that; default: %(default)s")
    parser.add_argument("--renew-every", type=float, default=60, metavar="SECONDS", help="of a lease; default: %(default)s")
    parser.add_argument("--exec-every", type=float, default=1200, metavar="SECONDS", help="of a lease; default: %(default)s")
    parser.add_argument("--clients", type=int, default=16, help="threads that send requests; default: %(default)s")
    arguments = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from tests.scale.plan import Plan
    from tests.scale.run import run

    with tempfile.TemporaryDirectory(prefix="lh-scale-") as directory:
        Path(directory).chmod(0o755)  # PostgreSQL runs as a user of its own
        arguments.started = min(arguments.started or arguments.sandboxes, arguments.sandboxes)
        return run(Plan(**vars(arguments)), Path(directory))


if __name__ == "__main__":
    sys.exit(main())
