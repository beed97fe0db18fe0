"""Parts of the suite: each is one pytest process with its paths, marks and database.

`make test` runs FAST: every test without the mark `matrix`, once, on the database that it needs. `make test-all` runs FAST and
MATRIX, with full search budgets: also the tests with that mark, and the other database."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SQLITE, POSTGRES = "SQLite", "PostgreSQL"
NO_SERVICE = "not docker and not e2e"
REMOTE_PATH = "tests/unit/sandboxes/remote"
REMOTE_PATHS = ("tests/conformance", REMOTE_PATH)
LAYER_PATHS = ("tests/admin", "tests/api", "tests/commands")
DOMAIN_PATHS = ("tests/unit", "tests/races", "tests/machines")
KUBERNETES_PATHS = ("tests/conformance", "tests/docker", "tests/unit/sandboxes/kubernetes")
VENDORS = ("cloudflare", "daytona", "langsmith", "modal", "runloop")

# In files with tests of the mark `postgres`, which tests/conftest.py also sets for real transactions.
IN_NEED_OF_POSTGRES = r"\bmark\.postgres\b|\btransaction=True\b|\btransactional_db\b"


@dataclass(frozen=True)
class Part:
    """Selection of tests. `budget` is in CPU seconds of the reference machine (speed.py), None where none is kept."""

    name: str
    paths: Sequence[str]
    marks: str  # expression of pytest -m
    database: str
    budget: int | None = None
    ignored: Sequence[str] = ()
    keyword: str = ""  # expression of pytest -k
    containing: str = ""  # only files whose text has this pattern: to import all test modules takes 20 s of CPU
    waits: bool = False  # mostly, for containers and processes: runs beside busy parts, and has the processor first

    def list_files(self) -> list[str]:
        """Return the paths for pytest: those of the part, or the files below them that contain its pattern."""
        return sorted({*self._find_files()}) if self.containing else list(self.paths)

    def _find_files(self) -> Iterator[str]:
        for path in self.paths:
            for file in sorted((REPO / path).rglob("*.py")):
                if any(file.is_relative_to(REPO / ignored) for ignored in self.ignored):
                    continue  # pytest runs a file that is named in spite of --ignore
                is_fixture = file.name == "conftest.py"  # concerns its whole directory
                if (is_fixture or file.name.startswith("test_")) and re.search(self.containing, file.read_text()):
                    yield str((file.parent if is_fixture else file).relative_to(REPO))

    def build_arguments(self) -> list[str]:
        """Return the arguments of pytest."""
        keyword = ["-k", self.keyword] if self.keyword else []
        return ["-m", self.marks, *keyword, *(f"--ignore={path}" for path in self.ignored), *self.list_files()]


FAST = (
    # Those that mostly wait come first: containers and processes need most of the time.
    Part("e2e", ("tests/e2e",), "e2e and not matrix", POSTGRES, 190, waits=True),
    Part("docker", ("tests/docker",), "docker and not matrix", POSTGRES, 60, waits=True),
    Part(
        "engine", ("tests/conformance", "tests/egress", *DOMAIN_PATHS), "docker and not matrix", POSTGRES, 60,
        ignored=(REMOTE_PATH,), containing=r"\bmark\.docker\b|\bBY_ENGINE\b", waits=True,
    ),
    # For processes in sandboxes and for emulated vendors. Behind the three above, so that it is not the last one alone.
    Part("conformance", REMOTE_PATHS, f"{NO_SERVICE} and not postgres and not matrix", SQLITE, 130, waits=True),
    # Then those that keep a core busy, the longest first, so that both cores have work until the end.
    Part(
        "database", (*LAYER_PATHS, "tests/unit"), f"{NO_SERVICE} and postgres and not matrix", POSTGRES, 200,
        ignored=("tests/unit/billing",), containing=IN_NEED_OF_POSTGRES,
    ),
    Part(
        "races", ("tests/races", "tests/machines", "tests/unit/billing"), f"{NO_SERVICE} and postgres and not matrix", POSTGRES,
        260, containing=IN_NEED_OF_POSTGRES,
    ),
    Part("domain", DOMAIN_PATHS, f"{NO_SERVICE} and not postgres and not matrix", SQLITE, 200, ignored=(REMOTE_PATH,)),
    Part("layers", LAYER_PATHS, f"{NO_SERVICE} and not postgres and not matrix", SQLITE, 265),
)  # fmt: skip

MATRIX = (
    Part("e2e-matrix", ("tests/e2e",), "e2e and matrix", POSTGRES, waits=True),
    Part(
        "docker-matrix", ("tests/docker", "tests/egress", *DOMAIN_PATHS), "docker and matrix", POSTGRES,
        ignored=("tests/unit/sandboxes/kubernetes", REMOTE_PATH), keyword="not kubernetes and not cluster",
        containing=r"\bmark\.docker\b", waits=True,
    ),
    Part(
        "kubernetes", KUBERNETES_PATHS, "docker and matrix", POSTGRES, keyword="kubernetes and not cluster", waits=True,
    ),
    Part("cluster", ("tests/conformance", "tests/docker"), "docker and matrix", POSTGRES, keyword="cluster", waits=True),
    Part("by-engine", ("tests/conformance",), "docker and matrix", POSTGRES, keyword="engine", waits=True),
    Part("gvisor", ("tests/conformance",), "docker and matrix", POSTGRES, keyword="gvisor", waits=True),
    *(Part(vendor, REMOTE_PATHS, f"{NO_SERVICE} and matrix", POSTGRES, keyword=vendor) for vendor in VENDORS),
    Part(
        "domain-matrix", (*LAYER_PATHS, *DOMAIN_PATHS), f"{NO_SERVICE} and matrix and not postgres", SQLITE,
        ignored=(REMOTE_PATH,), containing=r"\bmark\.matrix\b",
    ),
    Part(
        "database-matrix", (*LAYER_PATHS, *DOMAIN_PATHS), f"{NO_SERVICE} and matrix and postgres", POSTGRES,
        ignored=(REMOTE_PATH,), containing=r"\bmark\.matrix\b",
    ),
    # The other database, for the tests that the parts above run on one of them.
    Part("layers-postgres", LAYER_PATHS, f"{NO_SERVICE} and database and not postgres", POSTGRES),
    Part("domain-postgres", DOMAIN_PATHS, f"{NO_SERVICE} and database and not postgres", POSTGRES, ignored=(REMOTE_PATH,)),
    Part(
        "database-sqlite", (*LAYER_PATHS, *DOMAIN_PATHS), f"{NO_SERVICE} and postgres", SQLITE, ignored=(REMOTE_PATH,),
        containing=IN_NEED_OF_POSTGRES,
    ),
    Part("remote-sqlite", REMOTE_PATHS, f"{NO_SERVICE} and database", SQLITE),
)  # fmt: skip
PARTS = {part.name: part for part in (*FAST, *MATRIX)}
