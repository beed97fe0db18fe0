"""Services of .ci/services, each started when the first test asks for it."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

SERVICES_REQUIRED = os.environ.get("LEASEHOLD_REQUIRE_SERVICES") == "1"
SERVICES = Path(__file__).resolve().parents[3] / ".ci" / "services"
DIRECTORY_VARIABLE = "TEST_SERVICES_DIR"  # set by `make test`, which stops the services at its end
OWN_VARIABLES = ("DATABASE_URL", "DJANGO_", "LEASEHOLD_", "SECRET_KEY", "TEST_")  # of the tests, not of a service
SERVICE_VARIABLES = (DIRECTORY_VARIABLE, "LEASEHOLD_CACHE")


def skip_or_fail(reason: str) -> None:
    """Skip the test, or fail it if all services are required."""
    if SERVICES_REQUIRED:
        pytest.fail(reason)
    pytest.skip(reason)


@cache
def start(name: str) -> None:
    """Start a service, unless it runs, and set its variables. Without `make test` nothing is started.

    An unavailable service sets none: its tests are skipped, or fail where all services are required."""
    if not (directory := os.environ.get(DIRECTORY_VARIABLE)):
        return
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES) or name in SERVICE_VARIABLES
    }
    subprocess.run([SERVICES, "start", name], env=kept, check=True, stdout=subprocess.DEVNULL)
    variables = Path(directory, f"{name}.env")
    if variables.exists():
        os.environ.update(line.split("=", 1) for line in variables.read_text().splitlines())


def describe_missing(name: str) -> str:
    """Return the reason why a service could not be started."""
    reason = Path(os.environ.get(DIRECTORY_VARIABLE, "/none"), f"{name}.missing")
    return reason.read_text() if reason.exists() else f"{name} is a service of .ci/services, which make test starts"


def require_environment(service: str, *names: str) -> list[str]:
    """Start a service and return the values of its variables. Skips the test, or fails it, if one is not set."""
    start(service)
    values = [os.environ.get(name, "") for name in names]
    if not all(values):
        skip_or_fail(f"{names[0]} is not set. {describe_missing(service)}")
    return values


def require_s3(url: str = "TEST_S3_URL") -> list[str]:
    """Return URL, bucket, access key id and secret of the S3 server whose URL is in this variable."""
    return require_environment("stores", url, "TEST_BUCKET", "TEST_S3_ACCESS_KEY_ID", "TEST_S3_SECRET_ACCESS_KEY")


def require_program(service: str, program: str, *, path: str = "") -> str:
    """Install a program of a Debian package and return its path. Skips the test, or fails it, without the program."""
    start(service)
    found = shutil.which(program, path=f"{os.environ['PATH']}:{path}")
    if not found:
        skip_or_fail(f"{program} is not installed. {describe_missing(service)}")
    return str(found)


def require_kubectl() -> str:
    """Return the path of kubectl 1.30 or newer. Skips the test, or fails it, if there is none."""
    start("kubectl")
    found = os.environ.get("TEST_KUBECTL") or shutil.which("kubectl")
    if not found:
        skip_or_fail(f"kubectl is not installed. {describe_missing('kubectl')}")
    return str(found)


def require_gvisor() -> str:
    """Return the name of gVisor's runtime. Skips the test, or fails it, if the engine does not have it."""
    import docker as sdk

    start("gvisor")
    if "runsc" not in sdk.from_env(timeout=60).info()["Runtimes"]:
        skip_or_fail(f"The Docker Engine at hand has no runtime runsc. {describe_missing('gvisor')}")
    return "runsc"
