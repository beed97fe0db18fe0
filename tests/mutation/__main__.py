"""Mutation test: apply one small defect at a time to a copy of the tree and expect the listed tests to fail.

    .venv/bin/python -m tests.mutation [-k SUBSTRING] [--jobs N]

`killed`: a listed test failed or timed out. `SURVIVED`: all listed tests passed. `broken`: the snippet is missing or ambiguous,
the listed tests fail without the mutant, or pytest could not run them. The exit status is 1 if a mutant survived or is broken.
Runs on SQLite only. The first run migrates a database and saves it as a template (tests/support/database.py), which later runs
copy."""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

from tests.mutation.mutants import MUTANTS, Mutant

REPO = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 300  # of one run of a mutant's tests; a mutant may loop for ever
KILLED, SURVIVED, BROKEN = "killed", "SURVIVED", "broken"
PASSED, FAILED, TIMED_OUT = 0, 1, -1  # exit statuses of pytest, and one that pytest does not use


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="Run the mutation tests.")
    parser.add_argument("-k", metavar="SUBSTRING", default="", help="run only mutants with this in their names")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants tested in parallel (default: 1)")
    options = parser.parse_args()
    exit_on_sigterm()
    mutants = [mutant for mutant in MUTANTS if options.k in mutant.name]
    if not mutants:
        parser.error(f"no mutant has {options.k!r} in its name")
    with tempfile.TemporaryDirectory(prefix="lh-mutation-") as temporary:
        here = Path(temporary)
        results = run_all(mutants, here, jobs=max(1, min(options.jobs, len(mutants))))
    killed, survived = results.count(KILLED), results.count(SURVIVED)
    broken = len(results) - killed - survived
    print(f"{killed} killed, {survived} survived of {len(results)}" + (f", {broken} broken" if broken else ""))
    return int(killed < len(results))


def run_all(mutants: Sequence[Mutant], here: Path, *, jobs: int) -> list[str]:
    """Test all mutants and print a line for each. Return their results."""
    first = here / "tree0"
    copy_tree(first)
    failing = find_failing_unmutated(mutants, first, here)
    free: SimpleQueue[Path] = SimpleQueue()
    free.put(first)
    for number in range(1, jobs):
        shutil.copytree(first, here / f"tree{number}", symlinks=True)
        free.put(here / f"tree{number}")
    print(f"{'result':<9} {'mutant':<42} {'seconds':>7}  detail", flush=True)

    def test(mutant: Mutant) -> str:
        tree, began = free.get(), time.monotonic()
        try:
            result, detail = (BROKEN, "tests fail unmutated") if mutant.name in failing else run_mutant(mutant, tree, here)
        finally:
            free.put(tree)
        print(f"{result:<9} {mutant.name:<42} {time.monotonic() - began:7.1f}  {detail}", flush=True)
        return result

    with ThreadPoolExecutor(jobs) as threads:
        return [*threads.map(test, mutants)]


def run_mutant(mutant: Mutant, tree: Path, here: Path) -> tuple[str, str]:
    """Test one mutant. Return its result and a detail: the failed test, or the reason why the mutant is broken."""
    path = tree / mutant.path
    if not path.is_file():
        return BROKEN, f"no file {mutant.path}"
    original = path.read_text()
    if (count := original.count(mutant.before)) != 1:
        return BROKEN, f"snippet found {count} times in {mutant.path}"
    path.write_text(original.replace(mutant.before, mutant.after))
    try:
        status, output = run_tests(mutant.tests, tree, here, "-x", PYTHONDONTWRITEBYTECODE="1")
    finally:
        path.write_text(original)
    if status == PASSED:
        return SURVIVED, " ".join(mutant.tests)
    if status == TIMED_OUT:
        return KILLED, "timeout"
    failed = next(find_failures(output), "")
    if status != FAILED or not failed:
        return BROKEN, f"pytest exit status {status}: {get_last_line(output)}"
    return KILLED, failed


def find_failing_unmutated(mutants: Sequence[Mutant], tree: Path, here: Path) -> set[str]:
    """Run the listed tests without a mutant. Return the names of the mutants whose tests do not all pass."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    print(f"{len(mutants)} mutants. Running their tests unmutated ...", flush=True)
    began = time.monotonic()
    status, _ = run_tests(tests, tree, here, timeout=TIMEOUT_SECONDS * len(mutants))
    print(f"unmutated: exit status {status} in {time.monotonic() - began:.0f} s", flush=True)
    if status == PASSED:
        return set()
    return {mutant.name for mutant in mutants if run_tests(mutant.tests, tree, here)[0] != PASSED}


def run_tests(
    tests: Iterable[str], tree: Path, here: Path, *options: str, timeout: float = TIMEOUT_SECONDS, **variables: str
) -> tuple[int, str]:
    """Run pytest in the tree, with temporary files and a database of its own. Return its exit status and output."""
    with tempfile.TemporaryDirectory(dir=here) as temporary:
        pytest_argv = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", f"--basetemp={temporary}/tmp"]
        with run_process(
            [*pytest_argv, *options, *tests], tree, TMPDIR=temporary, LEASEHOLD_CACHE=str(here / "cache"), **variables
        ) as pytest:
            try:
                output, _ = pytest.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                return TIMED_OUT, ""
        return pytest.returncode, output


def exit_on_sigterm() -> None:
    """End this process by SystemExit when it is told to end, so that it ends its children."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextmanager
def run_process(command: Sequence[str], tree: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a session of its own. At the end of the `with` the process is killed with all its children."""
    own = ("LEASEHOLD_", "DATABASE_URL", "TEST_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    started = subprocess.Popen(
        command, cwd=tree, env=inherited | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def copy_tree(tree: Path) -> None:
    """Copy all files of the work tree that Git knows or would add."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=REPO, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (REPO / name).is_file():  # not deleted in the work tree, and no link to a directory
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, tree / name)


def find_failures(output: str) -> Iterator[str]:
    """Yield the names of the failed tests in the short summary of pytest."""
    for match in re.finditer(r"^(?:FAILED|ERROR) \S+\.py(?:::)?(.*?)(?: - .*)?$", output, re.MULTILINE):
        yield match[1] or match[0]


def get_last_line(output: str) -> str:
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no output")


if __name__ == "__main__":
    sys.exit(main())
