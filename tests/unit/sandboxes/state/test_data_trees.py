"""Round trips of hostile file trees: sleep and wake of /workspace, and the store into another sandbox's /data.

Trees are created and read by programs inside the sandbox, independent of the code under test, and must be identical bit for
bit."""

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings

from leases import execution, leasing
from leases.models import EnvironmentType, Lease
from sandboxes import eviction, providers
from sandboxes.models import Pool
from sandboxes.pool import allocation
from sandboxes.providers.base import DATA, WORKSPACE
from sandboxes.runs.operations import Command
from tests.conftest import DOCKER_IMAGE, MINUTE, NOW

pytestmark = pytest.mark.django_db

CREATE_SCRIPT = """
import json, os, sys
root = os.fsencode(sys.argv[1])
given = json.load(sys.stdin)

def clear(above, spared=()):
    for entry in list(os.scandir(above)):
        if entry.is_dir(follow_symlinks=False) and entry.name not in spared:
            os.chmod(entry.path, 0o700)
            clear(entry.path)
            os.rmdir(entry.path)
        elif entry.name not in spared:
            os.unlink(entry.path)

clear(root, (b".home", b"config.json", b"skills"))
directories = []
for path, kind, mode, value in given:
    path = os.path.join(root, os.fsencode(path))
    if kind == "directory":
        os.mkdir(path, 0o700)
        directories.append((path, mode))
    elif kind == "link":
        os.symlink(os.fsencode(value), path)
    else:
        with open(path, "wb") as file:
            file.write(os.urandom(value) if isinstance(value, int) else bytes.fromhex(value))
        os.chmod(path, mode)
for path, mode in reversed(directories):
    os.chmod(path, mode)
"""
LIST_SCRIPT = """
import hashlib, json, os, stat, sys

def look(above, below):
    for entry in sorted(os.scandir(above), key=lambda entry: entry.name):
        path, found = below + entry.name, entry.stat(follow_symlinks=False)
        mode = stat.S_IMODE(found.st_mode)
        if entry.is_symlink():
            yield os.fsdecode(path), "link", 0o777, int(found.st_mtime), os.fsdecode(os.readlink(entry.path))
            continue
        if mode & 0o700 != 0o700:
            os.chmod(entry.path, 0o700)
        if entry.is_dir():
            yield os.fsdecode(path), "directory", mode & 0o777, 0, ""
            yield from look(entry.path, path + b"/")
        else:
            with open(entry.path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            yield os.fsdecode(path), "file", mode & 0o777, int(found.st_mtime), content
        if mode & 0o700 != 0o700:
            os.chmod(entry.path, mode)

print(json.dumps([*look(os.fsencode(sys.argv[1]), b"")]))
"""
Node = tuple[str, int, Any]  # kind; mode; content (hexadecimal), number of random bytes, link target or children
Line = list[Any]  # path, kind, mode, mtime in seconds, SHA-256 or target

# --- trees ------------------------------------------------------------------------------------------------------------

ODD_NAMES = [
    " ", "-rf", "--", "a b", "new\nline", "tab\t", "...", ".hidden", "*", "?", "'\"", "$(x)", "\\", "\x01", "\x7f", "~", "%2F",
    "e\u0301", "\u00e9", "\u200b", "\ufeff", "\U0001f469\u200d\U0001f4bb", "\U0001f600", "\u4e2d\u6587",
    "x" * 255, "\u00e9" * 127,
]  # fmt: skip
LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="/\0")
TEXT = st.text(LETTERS, min_size=1, max_size=12).filter(lambda name: name not in (".", ".."))
NAMES = st.sampled_from(ODD_NAMES) | TEXT
RAW_NAMES = st.binary(min_size=1, max_size=12).filter(
    lambda raw: b"/" not in raw and b"\0" not in raw and raw not in (b".", b"..")
)
SIZES = [0, 1, 511, 512, 513, 70_000]
CONTENT = st.binary(max_size=40).map(bytes.hex) | st.sampled_from(SIZES)
FILE_MODES = [0o644, 0o600, 0o755, 0o000, 0o200, 0o111, 0o4755, 0o2711, 0o1644, 0o777]
DIRECTORY_MODES = [0o755, 0o700, 0o000, 0o500, 0o300, 0o1777, 0o2755, 0o555]
TARGETS = st.sampled_from([".", "..", "/", "/etc/passwd", "nowhere", "../../../..", "x" * 1000, " ", "\n"]) | TEXT
LEAVES = st.tuples(st.just("file"), st.sampled_from(FILE_MODES), CONTENT) | st.tuples(st.just("link"), st.just(0), TARGETS)


def trees(names: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Node]]:
    def directory(below: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        return st.tuples(st.just("directory"), st.sampled_from(DIRECTORY_MODES), st.dictionaries(names, below, max_size=4))

    return st.dictionaries(names, st.recursive(LEAVES, directory, max_leaves=12), max_size=8)


def nested(depth: int) -> dict[str, Node]:
    tree: dict[str, Node] = {"file": ("file", 0o400, "00")}
    for _ in range(depth):
        tree = {"d": ("directory", 0o500, tree), "up": ("link", 0, "..")}
    return tree


EVERY_KIND: dict[str, Node] = {
    **{name: ("file", 0o644, name.encode().hex()) for name in ODD_NAMES},
    **{f"mode {mode:o}": ("file", mode, 1) for mode in FILE_MODES},
    **{f"directory {mode:o}": ("directory", mode, {"in": ("file", mode, "ff")}) for mode in DIRECTORY_MODES},
    **{f"size {size}": ("file", 0o644, size) for size in SIZES},
    "self": ("link", 0, "self"), "one": ("link", 0, "other"), "other": ("link", 0, "one"), "long": ("link", 0, "x" * 4000),
    "empty": ("directory", 0o755, {}),
}  # fmt: skip


def flatten(tree: dict[str, Node], below: str = "") -> Iterator[tuple[str, str, int, Any]]:
    """Yield the entries of a tree, each after its directory."""
    for name, (kind, mode, value) in tree.items():
        yield below + name, kind, mode, None if kind == "directory" else value
        if kind == "directory":
            yield from flatten(value, f"{below}{name}/")


# --- sandboxes ------------------------------------------------------------------------------------------------------------


@dataclass
class SandboxWorld:
    """Leases in a pool of one provider. Each step advances the time a little."""

    pool: Pool
    minutes: int = 0
    leases: dict[str, Lease] = field(default_factory=dict)

    def lease(self, environment: str) -> Lease:
        if environment not in self.leases:
            request = leasing.LeaseRequest("did:plc:ada", environment, "coding", pool=self.pool.name)
            self.leases[environment] = leasing.acquire(request, now=NOW)[0]
        return self.leases[environment]

    def run(self, environment: str, script: str, place: str, stdin: bytes = b"") -> bytes:
        self.minutes += 1
        command = Command(argv=["python3", "-c", script, place], stdin=stdin, timeout=5 * MINUTE)
        run, result = execution.exec_command(self.lease(environment).pk, command, now=NOW + self.minutes * MINUTE / 100)
        assert result.exit_code == 0, result.stderr.decode(errors="replace")
        assert run.note == ""
        return result.stdout

    def make(self, environment: str, place: str, tree: dict[str, Node]) -> list[Line]:
        """Create a tree, and return it as a program in the sandbox sees it."""
        entries = json.dumps([*flatten(tree)]).encode()
        lines: list[Line] = json.loads(self.run(environment, CREATE_SCRIPT + LIST_SCRIPT, place, entries))
        assert {line[0] for line in lines} >= {path for path, *_ in flatten(tree)}
        return lines

    def look(self, environment: str, place: str) -> list[Line]:
        lines: list[Line] = json.loads(self.run(environment, LIST_SCRIPT, place))
        return lines

    def sleep(self, environment: str) -> None:
        sandbox = allocation.find_by_holder(self.lease(environment).pk)
        assert sandbox
        self.minutes += 1
        assert eviction.evict(sandbox.pk, now=NOW + self.minutes * MINUTE / 100, reason="test")


IN_CONTAINERS = [
    pytest.mark.docker,
    pytest.mark.matrix("the conformance suite has the tars of Docker, the process provider any tree"),
]


@pytest.fixture(params=["process", pytest.param("docker", marks=IN_CONTAINERS)])
def world(db: None, request: pytest.FixtureRequest) -> Iterator[SandboxWorld]:
    if request.param == "docker":
        request.getfixturevalue("docker_ready")
    name = f"trees-{uuid.uuid4().hex[:12]}"
    pool = Pool.objects.create(name=name, provider=request.param, image=DOCKER_IMAGE, capacity=10, memory_mib=256)
    yield SandboxWorld(pool)
    provider = providers.get_provider(request.param)
    for sandbox in provider.list(str(pool.owner)):
        provider.destroy(sandbox.ref)


def examples(world: SandboxWorld, *, process: int, docker: int) -> settings:
    """Hypothesis settings with a number of examples for each provider. The examples of one test reuse its sandboxes."""
    return settings(
        max_examples=process if world.pool.provider == "process" else docker,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )


def assert_survives(world: SandboxWorld, place: str, tree: dict[str, Node]) -> None:
    """Assert that a tree is the same after sleep and wake (/workspace), or in another sandbox of the agent (/data)."""
    before = world.make("game-1", place, tree)
    if place == WORKSPACE:
        world.sleep("game-1")
    else:
        assert differing(before, world.look("game-2", place)) == []
    assert differing(before, world.look("game-1", place)) == []


def differing(before: list[Line], after: list[Line]) -> list[Line]:
    """Return the lines that are in only one of the two listings."""
    return [*map(list, {*map(tuple, before)} ^ {*map(tuple, after)})]


# --- round trips ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "names"), [(WORKSPACE, NAMES | RAW_NAMES.map(os.fsdecode)), (DATA, NAMES)], ids=["workspace", "data"]
)
def test_any_tree_survives_sleep_or_the_move_to_another_sandbox(
    world: SandboxWorld, place: str, names: st.SearchStrategy[str]
) -> None:
    @examples(world, process=15, docker=3)
    @example(EVERY_KIND)
    @example(nested(60))
    @given(trees(names))
    def round_trip(tree: dict[str, Node]) -> None:
        assert_survives(world, place, tree)

    round_trip()


LARGE_FILE: dict[str, Node] = {"large": ("file", 0o644, 12 << 20)}
MANY_FILES: dict[str, Node] = {
    f"d{number}": ("directory", 0o755, {f"file {at}": ("file", 0o644, f"{number:04x}{at:04x}") for at in range(100)})
    for number in range(11)
}


@pytest.mark.parametrize("place", [WORKSPACE, DATA])
@pytest.mark.parametrize("tree", [LARGE_FILE, MANY_FILES], ids=["12 MB", "1,100 files"])
def test_large_tree_survives_sleep_or_the_move_to_another_sandbox(world: SandboxWorld, place: str, tree) -> None:
    assert_survives(world, place, tree)


# --- excludes -------------------------------------------------------------------------------------------------------------

EXCLUDES = ["node_modules", "*.pyc", "build/out*"]
EXCLUDED_AND_SIMILAR_NAMES = st.sampled_from(
    ["node_modules", "node_modules2", "a.pyc", "a.pyc2", "build", "out", "outer", "src"]
)
PLAIN_LEAVES = st.tuples(st.just("file"), st.just(0o644), st.just("00")) | st.tuples(
    st.just("link"), st.just(0), st.just("build")
)


def branching(below: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.tuples(
        st.just("directory"), st.sampled_from([0o755, 0o000]), st.dictionaries(EXCLUDED_AND_SIMILAR_NAMES, below, max_size=5)
    )


def is_excluded(path: str) -> bool:
    """Return whether EXCLUDES match a path, computed without the code under test."""
    parts = path.split("/")
    inside = any(part == "node_modules" or part.endswith(".pyc") for part in parts)
    return inside or (parts[0] == "build" and len(parts) > 1 and parts[1].startswith("out"))


def test_snapshot_skips_exactly_the_excluded_paths(world: SandboxWorld) -> None:
    EnvironmentType.objects.filter(name="coding").update(snapshot_excludes=EXCLUDES)
    below: dict[str, Node] = dict.fromkeys(("node_modules", "a.pyc", "a.pyc2", "out", "outer", "src"), ("file", 420, "00"))
    inner: dict[str, Node] = {**below, "build": ("directory", 0o000, below), "src": ("directory", 0o755, below)}
    every_combination = {**inner, "node_modules": ("directory", 0o755, inner), "src": ("directory", 0o755, inner)}

    @examples(world, process=15, docker=1)
    @example(every_combination)
    @given(st.dictionaries(EXCLUDED_AND_SIMILAR_NAMES, st.recursive(PLAIN_LEAVES, branching, max_leaves=20), max_size=6))
    def skips_excluded(tree: dict[str, Node]) -> None:
        before = world.make("game-1", WORKSPACE, tree)
        world.sleep("game-1")
        assert differing([line for line in before if not is_excluded(line[0])], world.look("game-1", WORKSPACE)) == []

    skips_excluded()
