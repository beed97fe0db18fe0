"""Run the emulator of a vendor or of Kubernetes:  python -m tests.emulators daytona --port 18080

Prints the environment variables of the provider. Ends with SIGINT or SIGTERM, and removes all sandboxes."""

import argparse
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.emulators.registry import EMULATORS, build_environment, serve, serve_kubernetes


@contextmanager
def serve_environment(name: str, directory: Path, port: int, gateway: str) -> Iterator[Mapping[str, str]]:
    """Run an emulator, and yield the environment variables with which it is reached."""
    if name == "kubernetes":
        with serve_kubernetes(directory, port) as cluster:
            if gateway:
                host, _, gateway_port = gateway.rpartition(":")
                cluster.set_gateway(host, int(gateway_port))
            yield {"KUBECONFIG": str(cluster.kubeconfig)}
    else:
        with serve(name, directory, port) as emulator:
            yield build_environment(name, emulator)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the emulator of a vendor of sandboxes, or of Kubernetes.")
    parser.add_argument("vendor", choices=sorted([*EMULATORS, "kubernetes"]))
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--gateway", default="", metavar="HOST:PORT", help="server of this machine that Pods reach at 10.96.7.7:8443"
    )
    options = parser.parse_args()
    stopping = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    with (
        tempfile.TemporaryDirectory(prefix="lh-emulator-") as directory,
        serve_environment(options.vendor, Path(directory), options.port, options.gateway) as environment,
    ):
        for name, value in environment.items():
            print(f"export {name}={value}", flush=True)
        signal.sigwait(stopping)


if __name__ == "__main__":
    main()
