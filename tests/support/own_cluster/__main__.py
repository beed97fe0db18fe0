"""Run a cluster until Ctrl-C, or for a command:  python -m tests.support.own_cluster PROGRAMS [COMMAND ...]

The command, such as .ci/kind-test, has the variables of docs/kubernetes.md. Without one they are printed. PROGRAMS is the
directory of the service `kubernetes` of .ci/services."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.own_cluster.cluster import running_cluster


def main(directory: str, *command: str) -> int:
    image = os.environ.get("LEASEHOLD_SANDBOX_IMAGE", "leasehold-sandbox:latest")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with suppress(KeyboardInterrupt), running_cluster(Path(directory), [image]) as cluster:
        variables = cluster.access.build_environment() | {"LEASEHOLD_SANDBOX_IMAGE": image}
        if command:
            return subprocess.run(command, env=os.environ | variables).returncode
        for name, value in variables.items():
            print(f"export {name}={value}", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
