"""Distributions with the client, and scripts that run with the client and httpx alone: the end of each releases its lease."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from leases.models import Lease
from tests.api.client.test_sandbox import Options, list_active
from tests.support.distributions import REPOSITORY, build_tree, link_package

CLIENT = REPOSITORY / "controlplane" / "client"
APPS = ["billing", "controlplane", "leases", "sandboxes"]
BEGIN = """
import os, signal, sys
from leasehold import Sandbox
box = Sandbox("catan", pool=os.environ["POOL"])
"""
WAIT = "print('open', flush=True); sys.stdin.read()"
Script = Callable[[str], subprocess.Popen[str]]


@pytest.fixture(scope="session")
def isolated_path(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Module path with the distribution leasehold-client and httpx, and no other package."""
    tree = build_tree(CLIENT, ["pyproject.toml", "README.md", "leasehold"], tmp_path_factory.mktemp("client"))
    packages = tmp_path_factory.mktemp("packages")
    link_package("httpx", packages)
    assert [*tree.iterdir()] == [tree / "leasehold"]
    assert not {"django", "requests"} & {path.name for path in packages.iterdir()}
    return [str(tree), str(packages)]


@pytest.fixture
def script(options: Options, isolated_path: list[str]) -> Script:
    """Start a script by a Python without other packages."""

    def start(text: str) -> subprocess.Popen[str]:
        code = f"import sys\nsys.path[:0] = {isolated_path}\n{BEGIN}\n{text}"
        environment = {
            "PATH": os.environ["PATH"], "POOL": options["pool"], "LEASEHOLD_URL": options["url"],
            "LEASEHOLD_API_KEY": options["api_key"],
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=restore_interrupts,
        )  # fmt: skip

    return start


def restore_interrupts() -> None:
    """Give a script the default action of SIGINT, which a shell ignores for the commands that it starts in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def end(process: subprocess.Popen[str], number: int | None = None) -> tuple[int, str]:
    """Send a signal once the sandbox is open, and return the exit code and the output of the script."""
    if number is not None:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n", process.communicate()[1]
        assert len(list_active()) == 1
        process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output + errors


def test_distribution_of_the_control_plane_contains_the_client(tmp_path: Path) -> None:
    tree = build_tree(REPOSITORY, ["pyproject.toml", "README.md", *APPS], tmp_path)
    assert sorted(path.name for path in tree.iterdir()) == sorted([*APPS, "leasehold"])
    assert {path.name for path in (tree / "leasehold").iterdir()} >= {"__init__.py", "py.typed", "schemas.py", "sandbox.py"}
    assert not (tree / "controlplane" / "client").exists()
    for app in APPS:
        built = {path.relative_to(tree) for path in (tree / app).rglob("__init__.py")}
        assert built == {
            path.relative_to(REPOSITORY) for path in (REPOSITORY / app).rglob("__init__.py") if CLIENT not in path.parents
        }


@pytest.mark.django_db(transaction=True)
def test_script_needs_httpx_only(script: Script) -> None:
    process = script("with box: print(box.exec('echo hi').stdout, [m for m in sys.modules if 'django' in m])")
    assert end(process) == (0, "hi\n []\n")
    assert list_active() == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("text", "number", "exit_code", "output"),
    [
        (f"with box: {WAIT}", signal.SIGTERM, -signal.SIGTERM, ""),
        (
            "import asyncio\nfrom leasehold import AsyncSandbox\n"
            "async def main():\n  async with AsyncSandbox('catan', pool=os.environ['POOL']):\n"
            "    print('open', flush=True); await asyncio.sleep(600)\n"
            "asyncio.run(main())",
            signal.SIGTERM, -signal.SIGTERM, "",
        ),
        (f"with box: {WAIT}", signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
        ("box.open(); print(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)", None, 0, "True\n"),
        (
            # The handler of a program decides; a child does not release the lease of its parent.
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
            f"with box:\n  if os.fork() == 0: sys.exit(0)\n  os.wait(); box.exec('true'); {WAIT}",
            signal.SIGTERM, 5, "",
        ),
        ("with box: pass\nprint(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)", None, 0, "True\n"),
    ],
    ids=["sigterm", "sigterm with asyncio", "sigint", "atexit", "own handler and fork", "handler is restored"],
)  # fmt: skip
def test_end_of_a_script_releases_its_lease(script: Script, text: str, number: int | None, exit_code: int, output: str) -> None:
    code, printed = end(script(text), number)
    assert (code, output in printed) == (exit_code, True), printed
    assert (list_active(), Lease.objects.get().end_reason) == ([], "released")


THREADS = "print([thread.name for thread in threading.enumerate() if thread is not threading.main_thread()])"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("options_", ["", ", release=False"])
@pytest.mark.parametrize("block", ["box.open()", "with box: pass"])
def test_no_thread_of_the_client_runs_when_the_interpreter_ends(script: Script, block: str, options_: str) -> None:
    """OpenSSL frees its state at the end of a process, which crashed with a thread that was still about to use it."""
    process = script(
        "import atexit, threading, time\nimport leasehold.lease as lease\n"
        "renew, lease.RENEWALS_PER_TTL, begun = lease.LeaseKeeper._renew, 10 ** 9, threading.Event()\n"
        "def slow(*words):\n  begun.set(); renew(*words); time.sleep(0.3)\n"
        f"lease.LeaseKeeper._renew = slow\nbox = Sandbox('catan', pool=os.environ['POOL']{options_})\n"
        f"{block}\nbegun.wait(10); atexit._run_exitfuncs(); {THREADS}"
    )
    assert end(process) == (0, "[]\n")
