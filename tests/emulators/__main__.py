"""Run the emulator of a vendor:  python -m tests.emulators daytona --port 18080

Prints the environment variables of the provider. Ends with SIGINT or SIGTERM, and removes all sandboxes."""

import argparse
import signal
import tempfile
from pathlib import Path

from tests.emulators.registry import EMULATORS, build_environment, serve


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the emulator of a vendor of sandboxes.")
    parser.add_argument("vendor", choices=sorted(EMULATORS))
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    stopping = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    with (
        tempfile.TemporaryDirectory(prefix="lh-emulator-") as directory,
        serve(options.vendor, Path(directory), options.port) as emulator,
    ):
        for name, value in build_environment(options.vendor, emulator).items():
            print(f"export {name}={value}", flush=True)
        signal.sigwait(stopping)


if __name__ == "__main__":
    main()
