"""Conformance of file verbs: every provider, and Docker both on the host and by exec."""

import io
import os
import socket
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import pytest

from sandboxes.image import files
from sandboxes.providers import PROVIDER_CLASSES
from sandboxes.providers.base import DATA, WORKSPACE, BadPath, Missing, NoSuchFile, Rejected, TooLarge
from sandboxes.providers.docker.files import _parse_listing
from sandboxes.providers.docker.provider import DockerProvider
from sandboxes.providers.memory import MemoryProvider
from sandboxes.providers.process import ProcessProvider
from tests.conformance.conftest import ProviderBench, SandboxHandle
from tests.conformance.test_provider import file, other, pack

ODD = [
    "with space",
    "ünïcode 漢字 🎲",
    "-rf",
    "--",
    "two\nlines",
    "tab\there",
    'it\'s "quoted" $HOME `id` \\',
    "*",
    ".hidden",
    "a" * 255,
]
BY_EXEC = "docker by exec"
EMPTY = "chmod -R u+rwX /data /workspace; find /data /workspace -mindepth 1 -delete; mkdir /workspace/.home"


@pytest.fixture(scope="module")
def kept_container():
    """Container shared by successive tests, because starting one takes longer than most tests."""
    bench = ProviderBench(DockerProvider())
    made = cache(bench.box)
    yield made
    if made.cache_info().currsize:
        bench.clean()


def box_of(*ways, new=False):
    """Create a fixture parametrized by provider and access path, with an empty sandbox."""

    def by(way):
        return pytest.param(way, marks=[pytest.mark.docker] * way.startswith("docker"), id=way)

    @pytest.fixture(params=[*map(by, ways)])
    def fixture(request, tmp_path, monkeypatch, kept_container):
        kind = request.param.split()[0]
        if kind == "docker":
            request.getfixturevalue("docker_ready")
        if request.param == BY_EXEC:
            monkeypatch.setattr(DockerProvider, "_call_on_host", lambda self, ref, act, *roots: None)
        if new or kind != "docker":
            bench = ProviderBench(ProcessProvider(tmp_path) if kind == "process" else PROVIDER_CLASSES[kind]())
            made = bench.box()
            yield Files(made.provider, made.ref, made.name)
            bench.clean()
        else:
            made = kept_container()
            assert made.run("sh", "-ec", EMPTY, cwd="/").exit_code == 0
            yield Files(made.provider, made.ref, made.name)

    return fixture


@dataclass
class Files(SandboxHandle):
    """One sandbox, with shorthands for its /data verbs."""

    def write(self, path, content=b""):
        self.provider.write_file(self.ref, f"{DATA}/{path}", content)

    def read(self, path):
        return self.provider.read_file(self.ref, f"{DATA}/{path}", limit=1 << 20)

    def put(self, *members):
        self.provider.put_files(self.ref, DATA, pack(*members))

    def look(self, **more):
        return self.provider.manifest(self.ref, DATA, **more)

    def get(self, **more):
        """Return the tar of get_files as name -> content, link target, or None for a directory."""
        with tarfile.open(fileobj=io.BytesIO(b"".join(self.provider.get_files(self.ref, DATA, **more))), mode="r:") as tar:
            return {
                member.name: tar.extractfile(member).read() if member.isreg() else member.linkname or None for member in tar
            }

    def remove(self, *paths):
        self.provider.remove_files(self.ref, DATA, paths)

    def range(self, path, start, length):
        return self.provider.read_range(self.ref, f"{DATA}/{path}", start=start, length=length)

    def python(self, code):
        """Run a Python script in /data."""
        done = self.run("python3", "-c", f"import os, socket\n{code}", cwd=DATA)
        assert done.exit_code == 0, done.stderr


box = box_of("memory", "process", "docker", BY_EXEC)
real = box_of("process", "docker", BY_EXEC)
container = box_of("docker")
new_box = box_of("memory", "process", "docker", new=True)
new_real = box_of("process", "docker", BY_EXEC, new=True)
new_container = box_of("docker", new=True)


# --- manifest -----------------------------------------------------------------------------------------------------


def test_data_of_a_new_sandbox_is_empty(new_box):
    assert new_box.look() == {}
    assert new_box.provider.size(new_box.ref, DATA) == 0


def test_manifest_contains_kind_mode_size_and_target(box):
    box.put(
        file("run.sh", b"#!/bin/sh\n", mode=0o755),
        file("deep/er/file", b"12345", mode=0o640),
        other("empty", tarfile.DIRTYPE, mode=0o700),
        other("link", tarfile.SYMTYPE, "deep/er"),
        other("out", tarfile.SYMTYPE, "/etc/passwd"),
    )
    assert {path: (stat.kind, stat.mode, stat.size, stat.target) for path, stat in box.look().items()} == {
        "run.sh": ("file", 0o755, 10, ""),
        "deep": ("directory", 0o755, 0, ""),
        "deep/er": ("directory", 0o755, 0, ""),
        "deep/er/file": ("file", 0o640, 5, ""),
        "empty": ("directory", 0o700, 0, ""),
        "link": ("link", 0o777, 0, "deep/er"),
        "out": ("link", 0o777, 0, "/etc/passwd"),
    }


def test_roots_have_separate_manifests(box):
    box.write("a")
    assert "a" not in box.provider.manifest(box.ref, WORKSPACE)
    with pytest.raises(BadPath):
        box.provider.manifest(box.ref, "/etc")


def test_unpacked_times_are_kept_in_whole_seconds(box):
    (member, content), folder = file("old"), other("folder", tarfile.DIRTYPE)[0]
    member.mtime, folder.mtime = 1_000_000_000.9, 1_100_000_000
    box.put((member, content), (folder, None))
    there = box.look()
    assert (there["old"].mtime, there["folder"].mtime) == (1_000_000_000, 1_100_000_000)


def test_manifest_of_a_directory_has_paths_relative_to_the_root(box):
    for path in ("a/b/c/file", "a/b/file", "a/bb", "other"):
        box.write(path)
    assert box.look(under="a/b").keys() == {"a/b/c", "a/b/c/file", "a/b/file"}
    assert box.look(under="a/b", deep=False).keys() == {"a/b/c", "a/b/file"}
    assert box.look(deep=False).keys() == {"a", "other"}


def test_manifest_of_a_missing_directory_is_an_error(box):
    box.write("file")
    box.put(other("link", tarfile.SYMTYPE, "."))
    for gone in ("nothing", "no/such"):
        with pytest.raises(NoSuchFile):
            box.look(under=gone)
    for bad in ("file", "file/below", "link", "link/below", "..", "a/../b", "/a", "a//b", "a/", ".", "a\0b"):
        with pytest.raises(BadPath):
            box.look(under=bad)


def test_manifest_above_the_entry_limit_is_too_large(box):
    for path in ("a/1", "a/2", "b"):
        box.write(path)
    assert len(box.look(max_entries=4)) == 4
    assert len(box.look(max_entries=2, deep=False)) == 2
    for more in ({"max_entries": 3}, {"max_entries": 1, "deep": False}, {"max_entries": 1, "under": "a"}):
        with pytest.raises(TooLarge):
            box.look(**more)


def test_unusual_names_are_supported_by_all_verbs(box):
    for name in ODD:
        box.write(f"{name}/{name}", name.encode())
    paths = {f"{name}/{name}" for name in ODD}
    assert box.look().keys() == {*ODD} | paths
    assert box.look(under=ODD[4]).keys() == {f"{ODD[4]}/{ODD[4]}"}
    assert box.get(only=paths) == {path: path.split("/")[0].encode() for path in paths}
    assert all(box.read(path) == box.range(path, 0, 300)[0] == path.split("/")[0].encode() for path in paths)
    box.remove(*paths, *ODD)
    assert box.look() == {}


def test_names_that_are_not_utf8_are_supported_by_all_verbs(real):
    real.python(r"os.mkdir(b'd\xff'); open(b'd\xff/\xfe\xfd', 'w').write('x'); os.symlink(b'\xff', 'link')")
    path = os.fsdecode(b"d\xff/\xfe\xfd")
    assert real.look().keys() == {os.fsdecode(b"d\xff"), path, "link"}
    assert real.look()["link"].target == os.fsdecode(b"\xff")
    assert real.look(under=os.fsdecode(b"d\xff")).keys() == {path}
    assert real.read(path) == real.range(path, 0, 9)[0] == b"x"
    real.write(path, b"new")
    assert real.get(only=[path]) == {path: b"new"}
    real.remove(path)
    assert path not in real.look()


def test_undecodable_string_is_a_bad_path(box):
    for act in (box.read, box.remove, lambda path: box.look(under=path), lambda path: box.get(only=[path])):
        with pytest.raises(BadPath):
            act("\ud800")


def test_pipes_and_sockets_are_listed_but_not_read(real):
    real.python("os.mkfifo('pipe'); s = socket.socket(socket.AF_UNIX); s.bind('socket'); open('file', 'w')")
    there = real.look()
    assert {path: (stat.kind, stat.size, stat.target) for path, stat in there.items()} == {
        "pipe": ("other", 0, ""),
        "socket": ("other", 0, ""),
        "file": ("file", 0, ""),
    }
    assert real.get(only=there) == real.get() == {"file": b""}
    for path in ("pipe", "socket"):
        with pytest.raises(BadPath):
            real.read(path)
        with pytest.raises(BadPath):
            real.range(path, 0, 1)
    real.remove(*there)
    assert real.look() == {}


LOCKED = """
for mode in (0o000, 0o400, 0o100, 0o300):
    os.makedirs(f'{mode:o}/in'); open(f'{mode:o}/in/file', 'w').write('x'); os.chmod(f'{mode:o}/in/file', 0)
    os.chmod(f'{mode:o}/in', mode); os.chmod(f'{mode:o}', mode)
"""


def test_unreadable_entries_are_listed_and_fetched_and_keep_their_mode(real):
    real.python(LOCKED)
    there = real.look()
    assert len(there) == 12
    assert {stat.mode for path, stat in there.items() if path.endswith("file")} == {0}
    content = {path: b"x" for path in there if path.endswith("file")}
    assert real.get(only=content) == content
    assert {path: real.read(path) for path in content} == content
    again = real.look()
    assert {path: stat.mode for path, stat in again.items()} == {path: stat.mode for path, stat in there.items()}
    assert all(again[path].stamp == stat.stamp for path, stat in there.items() if stat.kind == "directory")


def test_two_thousand_small_files_are_listed_fetched_and_removed(box):
    names = [f"d{number % 20:02}/file {number}" for number in range(2000)]
    box.put(*(file(name, name.encode()) for name in names))
    there = box.look()
    assert len(there) == 2020
    assert box.get(only=names) == {name: name.encode() for name in names}
    box.remove(*there)
    assert box.look() == {}


def test_circular_links_are_listed_as_links(box):
    box.put(other("d/here", tarfile.SYMTYPE, "."), other("d/up", tarfile.SYMTYPE, ".."), other("self", tarfile.SYMTYPE, "self"))
    assert {path: stat.target for path, stat in box.look().items()} == {"d": "", "d/here": ".", "d/up": "..", "self": "self"}
    assert box.get() == {"d": None, "d/here": ".", "d/up": "..", "self": "self"}


# --- stamps -------------------------------------------------------------------------------------------------------


def test_stamp_is_stable_without_changes(box):
    box.put(file("a", b"1"), file("d/b", b"2"), other("l", tarfile.SYMTYPE, "a"))
    before = box.look()
    box.read("a")
    box.get()
    box.get(only=["d/b", "l"])
    assert box.look() == before


def test_stamp_changes_with_content_mode_and_target_of_its_entry_only(box):
    box.put(file("a", b"1"), file("d/b", b"2"), other("l", tarfile.SYMTYPE, "a"), file("same", b"3"))
    before = box.look()
    box.write("a", b"2")
    box.put(file("d/b", b"2", mode=0o755), other("l", tarfile.SYMTYPE, "b"))
    box.write("d/new", b"")
    after = box.look()
    assert {path for path in before if after[path].stamp != before[path].stamp} == {"a", "d/b", "l"}


def test_stamp_changes_after_a_rewrite_of_equal_length_and_restored_mtime(real):
    real.write("a", b"one")
    before = real.look()["a"]
    real.python("s = os.stat('a'); open('a', 'r+').write('two'); os.utime('a', ns=(s.st_atime_ns, s.st_mtime_ns))")
    after = real.look()["a"]
    assert (after.size, after.mtime) == (before.size, before.mtime)
    assert after.stamp != before.stamp


def test_directory_stamp_changes_with_its_mode(real):
    real.write("d/a")
    before = real.look()["d"]
    real.python("os.chmod('d', 0o500)")
    assert real.look()["d"].stamp != before.stamp


# --- partial reads --------------------------------------------------------------------------------------------


def test_only_selected_existing_paths_are_fetched(box):
    for path in ("a/b/file", "a/file", "a/other", "b"):
        box.write(path, path.encode())
    box.put(other("link", tarfile.SYMTYPE, "a"))
    assert box.get(only=["a/file", "gone", "a/gone/file", "b/below", "link/file"]) == {"a/file": b"a/file"}
    assert box.get(only={"a", "a/b", "link"}) == {"a": None, "a/b": None, "link": "a"}
    assert box.get(only=[]) == {}


@pytest.mark.parametrize("path", ["", "..", "../x", "/etc/passwd", "a/../../x", "a//b", "./a", "a/", "a\0b"])
def test_invalid_path_is_neither_fetched_nor_removed(box, path):
    with pytest.raises(BadPath):
        box.get(only=[path])
    with pytest.raises(BadPath):
        box.remove(path)


TREE = ["build/cache/x", "build/out", "deep/build/cache", "deep/node_modules/m/index.js", "main.py", "main.pyc", "node_modules"]
EXCLUDED = {
    "a name": (["node_modules"], {"build/cache/x", "build/out", "deep/build/cache", "main.py", "main.pyc"}),
    "a pattern": (["*.pyc", "index.?s"], {*TREE} - {"main.pyc", "deep/node_modules/m/index.js"}),
    "a path": (["build/cache"], {*TREE} - {"build/cache/x"}),
    "a pattern of paths": (["deep/*/cache", "*/out"], {*TREE} - {"deep/build/cache", "build/out"}),
    "a set": (["[bd]*"], {"main.py", "main.pyc", "node_modules"}),
    "another case": (["MAIN.PY"], {*TREE}),
    "nothing that is there": (["cache/build", ".venv"], {*TREE}),
}


@pytest.mark.parametrize("kind", EXCLUDED)
def test_excluded_entries_are_omitted_with_their_children(box, kind):
    patterns, left = EXCLUDED[kind]
    for path in TREE:
        box.write(path, b"x")
    assert {path for path, content in box.get(exclude=patterns).items() if content is not None} == left
    assert box.get(only=TREE, exclude=patterns).keys() == left


def test_invalid_pattern_is_rejected(box):
    for pattern in ("a\0b", "\ud800"):
        with pytest.raises(Rejected):
            box.get(exclude=[pattern])


# --- removing -----------------------------------------------------------------------------------------------------


def test_remove_is_deepest_first_and_leaves_non_empty_directories(box):
    for path in ("a/b/c", "d/kept", "d/gone", "e/f"):
        box.write(path)
    box.remove("a", "a/b", "a/b/c", "d", "d/gone", "e", "e/f", "e", "never", "never/was", "d/kept/below")
    assert box.look().keys() == {"d", "d/kept"}
    box.remove()
    assert box.look().keys() == {"d", "d/kept"}


@pytest.mark.parametrize("target", [DATA, "kept", ".", "/tmp", ".."])
def test_remove_does_not_follow_links(box, target):
    box.write("kept/file")
    box.provider.write_file(box.ref, f"{WORKSPACE}/file", b"")
    box.put(other("link", tarfile.SYMTYPE, target), other("to workspace", tarfile.SYMTYPE, box.path(WORKSPACE)))
    box.remove("link/file", "link/kept/file", "link/kept", "to workspace/file")
    assert {"kept/file", "link"} < box.look().keys()
    box.remove("link", "to workspace")
    assert box.look().keys() == {"kept", "kept/file"}
    assert box.provider.read_file(box.ref, f"{WORKSPACE}/file", limit=1) == b""


def test_remove_works_in_read_only_directories(real):
    real.python("os.makedirs('a/b'); open('a/b/f', 'w'); open('a/kept', 'w'); os.chmod('a/b', 0o500); os.chmod('a', 0o500)")
    real.remove("a/b/f", "a/b")
    assert {path: stat.mode for path, stat in real.look().items() if stat.kind == "directory"} == {"a": 0o500}
    assert "a/b" not in real.look()


@pytest.mark.parametrize("root", [DATA, WORKSPACE])
def test_clear_leaves_only_the_root(box, root):
    fresh = box.provider.manifest(box.ref, root).keys()
    for name in ("a/b/c", ".home/x", "-rf", ODD[4]):
        box.provider.write_file(box.ref, f"{root}/{name}", b"x")
    box.provider.put_files(box.ref, root, pack(other("link", tarfile.SYMTYPE, "/tmp"), other("up", tarfile.SYMTYPE, "..")))
    for _ in range(2):
        box.provider.clear(box.ref, root)
        assert box.provider.manifest(box.ref, root).keys() == fresh
    box.provider.write_file(box.ref, f"{root}/new", b"x")
    assert box.run("cat", "new", cwd=root).stdout == b"x"


def test_clear_of_one_root_leaves_the_other(box):
    box.write("kept")
    box.put(other("to data", tarfile.SYMTYPE, box.path(DATA)))
    box.provider.clear(box.ref, WORKSPACE)
    assert box.look().keys() == {"kept", "to data"}
    with pytest.raises(BadPath):
        box.provider.clear(box.ref, "/data/kept")


def test_clear_removes_locked_deep_and_special_entries(real):
    real.python(LOCKED)
    real.python("""
os.mkfifo('pipe')
for _ in range(300):
    os.mkdir('d' * 200); os.chdir('d' * 200)
open('at the bottom', 'w')
""")
    real.provider.clear(real.ref, DATA)
    assert real.look() == {}
    assert real.run("ls", "-A", cwd=DATA).stdout == b""


# --- ranges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [(0, 4, b"0123"), (4, 3, b"456"), (8, 9, b"89"), (0, 10, b"0123456789"), (0, 1 << 20, b"0123456789"), (10, 1, b""),
     (3, 0, b""), (1 << 70, 1, b"")],
)  # fmt: skip
def test_range_is_read_with_the_file_size(box, start, length, expected):
    box.write("file", b"0123456789")
    assert box.range("file", start, length) == (expected, 10)


def test_binary_range_is_returned_unchanged(box):
    content = bytes(range(256)) * 100
    box.write("file", content)
    assert box.range("file", 1000, 20_000) == (content[1000:21_000], len(content))
    box.write("empty")
    assert box.range("empty", 0, 5) == (b"", 0)


def test_range_of_a_non_file_is_refused(box):
    box.write("d/file", b"x")
    box.put(other("link", tarfile.SYMTYPE, "d/file"), other("way", tarfile.SYMTYPE, "d"))
    with pytest.raises(NoSuchFile):
        box.range("nothing", 0, 1)
    for bad in ("d", "link", "way/file", "d/file/below", "../d"):
        with pytest.raises(BadPath):
            box.range(bad, 0, 1)
    for start, length in ((-1, 1), (0, -1)):
        with pytest.raises(Rejected):
            box.range("d/file", start, length)


# --- skills -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rpg", "catan", "coding"])
def test_seeded_skill_is_owned_by_the_agent(box, kind):
    box.provider.seed(box.ref, kind)
    assert box.look().keys() == {"skills", f"skills/{kind}", f"skills/{kind}/prompt.md"}
    assert box.look()[f"skills/{kind}/prompt.md"].mode == 0o644
    assert b"JSON" in box.read(f"skills/{kind}/prompt.md")
    assert box.run("sh", "-c", "echo mine >prompt.md", cwd=f"{DATA}/skills/{kind}").exit_code == 0
    box.provider.seed(box.ref, kind)
    assert box.read(f"skills/{kind}/prompt.md") == b"mine\n"


def test_second_skill_is_added_to_the_first(box):
    box.provider.seed(box.ref, "rpg")
    box.provider.seed(box.ref, "catan")
    assert box.look(under="skills", deep=False).keys() == {"skills/rpg", "skills/catan"}


IN_THE_WAY = {
    "an empty directory": lambda: other("skills/catan", tarfile.DIRTYPE),
    "a file": lambda: file("skills/catan"),
    "a link": lambda: other("skills/catan", tarfile.SYMTYPE, "/nowhere"),
    "a file above": lambda: file("skills"),
    "a link above": lambda: other("skills", tarfile.SYMTYPE, "/tmp"),
}


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_seed_does_not_replace_existing_entries(box, what):
    box.put(IN_THE_WAY[what]())
    before = box.look()
    box.provider.seed(box.ref, "catan")
    assert box.look() == before


def test_unknown_skill_is_ignored(box):
    box.provider.seed(box.ref, "chess")
    assert box.look() == {}


@pytest.mark.parametrize("kind", ["", "..", "a/b", ".", "a b", "ü", "x" * 101, "a\n", "a\0"])
def test_invalid_skill_name_is_rejected(box, kind):
    with pytest.raises(Rejected):
        box.provider.seed(box.ref, kind)


def test_concurrent_seeds_copy_the_skill_once(box):
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: box.provider.seed(box.ref, "catan"), range(8)))
    assert box.look().keys() == {"skills", "skills/catan", "skills/catan/prompt.md"}


# --- errors --------------------------------------------------------------------------------------------

VERBS = {
    "manifest": lambda p, ref: p.manifest(ref, DATA),
    "get_files": lambda p, ref: b"".join(p.get_files(ref, DATA, only=["a"])),
    "remove_files": lambda p, ref: p.remove_files(ref, DATA, ["a"]),
    "clear": lambda p, ref: p.clear(ref, DATA),
    "read_range": lambda p, ref: p.read_range(ref, f"{DATA}/a", start=0, length=1),
    "seed": lambda p, ref: p.seed(ref, "catan"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_raise_missing_without_a_sandbox(new_box, verb):
    new_box.look()  # so that the provider has cached it
    new_box.provider.destroy(new_box.ref)
    for ref in (new_box.ref, "lhc-never-was"):
        with pytest.raises(Missing):
            VERBS[verb](new_box.provider, ref)


@pytest.mark.parametrize("verb", VERBS)
def test_memory_provider_injects_failures_into_file_verbs(verb):
    memory, seen = MemoryProvider(), []
    box = ProviderBench(memory).box()
    box.provider.write_file(box.ref, f"{DATA}/a", b"")
    memory.before(verb, seen.append)
    VERBS[verb](memory, box.ref)
    assert seen == [box.ref]


# --- Docker: host access and exec --------------------------------------------------------------------------------------------

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root reaches a container's files from outside")


@as_root
def test_host_access_needs_no_exec(container, monkeypatch):
    monkeypatch.setattr(container.provider, "_create_exec", lambda *args, **options: pytest.fail("an exec"))
    container.write("a/f", b"x")
    container.put(file("b/g", b"y"), file("b/locked", b"z", mode=0), other("b", tarfile.DIRTYPE, mode=0))
    assert container.look(under="a").keys() == {"a/f"}
    assert container.get(only=["a/f", "b/locked"]) == {"a/f": b"x", "b/locked": b"z"}
    assert (container.read("a/f"), container.range("b/g", 0, 9)) == (b"x", (b"y", 1))
    assert container.provider.size(container.ref, DATA) == 3
    assert (container.look()["b"].mode, container.look()["b/locked"].mode) == (0, 0)
    with pytest.raises(NoSuchFile):
        container.read("nothing")
    container.provider.remove_file(container.ref, f"{DATA}/b/g")
    container.remove("a/f", "a")
    container.provider.seed(container.ref, "catan")
    container.provider.clear(container.ref, DATA)
    assert container.look() == {}


MUCH = r"""
os.makedirs('d/e'); os.mkdir(b'\xff'); open('d/e/two\nlines', 'w').write('x' * 70000); open(b'\xff/\xfe', 'w')
os.symlink('d/e', 'link'); os.symlink(b'\xff', 'd/link'); os.mkfifo('pipe'); os.symlink('link', 'link2')
for n in range(600): open(f'd/{n}', 'w').write('y' * n)
os.utime('d/1', (-5, -5)); os.utime('d/2', (1 << 33, 1 << 33)); os.chmod('d/3', 0o4755); os.truncate('d/4', 1 << 34)
os.chmod('d/5', 0); os.chmod('d/e', 0)
way = '/'.join(['w' * 250] * 15); os.makedirs(way); open(way + '/' + 'f' * 200, 'w'); os.chdir(way); os.makedirs('long' * 60)
"""


@as_root
def test_host_access_and_exec_return_the_same_results(container, monkeypatch):
    container.python(MUCH)

    def answers():
        there = container.look()
        paths = [path for path, stat in there.items() if stat.size < 1 << 20]
        some = [path for path in paths if path != "d/5"][:400]  # reading this one changes its stamp
        return {
            "manifest": there,
            "entries": container.look(deep=False, under="d"),
            "some": b"".join(container.provider.get_files(container.ref, DATA, only=some, exclude=["*9"])),
            "many": b"".join(container.provider.get_files(container.ref, DATA, only=[path for path in paths if path != "d/5"])),
            "file": container.read("d/e/two\nlines"),
            "range": container.range("d/4", (1 << 33) - 5, 10),
            "size": container.provider.size(container.ref, DATA),
        }

    outside = answers()
    assert len(outside["manifest"]) == 625
    assert outside["manifest"]["d/1"].mtime == 0
    monkeypatch.setattr(DockerProvider, "_call_on_host", lambda self, ref, act, *roots: None)
    assert answers() == outside


@as_root
def test_slow_host_access_falls_back_to_exec(container, monkeypatch):
    container.write("a/b", b"x")
    monkeypatch.setattr("sandboxes.providers.docker.files.HOST_TIMEOUT_SECONDS", -1.0)
    monkeypatch.setattr("sandboxes.providers.docker.files.MAX_HOST_TAR_BYTES", 100)
    assert container.look().keys() == {"a", "a/b"}
    assert container.get(only=["a/b"]) == {"a/b": b"x"}
    assert container.provider.size(container.ref, DATA) == 1
    container.remove("a/b")
    container.provider.clear(container.ref, DATA)
    assert container.look() == {}


def test_restarted_container_is_accessible_on_the_host(new_container):
    new_container.write("a")
    assert new_container.look().keys() == {"a"}
    new_container.provider._engine.client.restart(new_container.ref, timeout=0)
    new_container.write("b")
    assert new_container.look().keys() == {"a", "b"}


def test_locked_root_is_accessible_and_stays_locked(new_real):
    new_real.python("open('a', 'w').write('x'); os.chmod('.', 0)")
    assert new_real.look().keys() == {"a"}
    assert new_real.get(only=["a"]) == {"a": b"x"}
    assert new_real.run("stat", "-c", "%a", new_real.path(DATA), cwd="/").stdout == b"0\n"


def told(*entries):
    return b"".join(files.encode_entry(*entry) for entry in entries)


GOOD = (
    ("a", "directory", 0o755, 0, 5, "1.2.3", ""),
    ("a/b", "file", 0o644, 10, 5, "1.2.3", ""),
    ("l", "link", 0o777, 0, 5, "1", "x"),
)
NONSENSE = {
    "cut": told(*GOOD)[:-1],
    "a field too many": told(*GOOD) + b"x\0",
    "more than asked for": told(*GOOD, *((f"x{n}", *GOOD[1][1:]) for n in range(9))),
    "twice": told(*GOOD, GOOD[0]),
    "below a link": told(*GOOD, ("l/x", *GOOD[1][1:])),
    **{f"the path {path!r}": told((path, *GOOD[1][1:])) for path in ("", ".", "..", "/etc", "../x", "x/", "b/c", "x" * 256)},
    "below a file": told(*GOOD, ("a/b/c", *GOOD[1][1:])),
    "another kind": told(("x", "device", 0, 0, 0, "1", "")),
    "a mode with more": told(("x", "file", 0o4755, 0, 0, "1", "")),
    "a negative size": told(("x", "file", 0, -1, 0, "1", "")),
    "an endless size": told(("x", "file", 0, 10**30, 0, "1", "")),
    "a time far away": told(("x", "file", 0, 0, 1 << 40, "1", "")),
    "an endless stamp": told(("x", "file", 0, 0, 0, "1" * 100, "")),
    "a link to nothing": told(("x", "link", 0, 0, 0, "1", "")),
    "a target of a file": told(("x", "file", 0, 0, 0, "1", "y")),
    "an endless target": told(("x", "link", 0, 0, 0, "1", "y" * 5000)),
}


def test_valid_listing_of_a_sandbox_is_parsed():
    assert [*(_parse_listing(told(*GOOD), "", 3) or {})] == ["a", "a/b", "l"]
    assert _parse_listing(b"", "", 3) == {}


@pytest.mark.parametrize("kind", NONSENSE)
def test_invalid_listing_of_a_sandbox_is_rejected(kind):
    assert _parse_listing(NONSENSE[kind], "", 10) is None


# --- races --------------------------------------------------------------------------------------------------------


@dataclass
class InterruptedBuffer(io.BytesIO):
    """Buffer that runs a callback at its first write or last read."""

    act: object = None
    at: int = 0

    def __post_init__(self):
        super().__init__()

    def write(self, content):
        self._meddle()
        return super().write(content)

    def read(self, size=-1):
        got = super().read(size)
        if self.tell() >= self.at:
            self._meddle()
        return got

    def _meddle(self):
        act, self.act = self.act, None
        if act:
            act()


@pytest.mark.parametrize("size", [0, 10, 1_000_000, 3_000_000])
def test_file_that_changes_size_during_pack_keeps_the_tar_valid(tmp_path, size):
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_bytes(b"a" * 1_000_000)
    (root / "b").write_bytes(b"b")
    out = InterruptedBuffer(lambda: os.truncate(root / "a", size))
    files.pack(str(root), out, only=["a", "b"])
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        assert [(member.name, member.size) for member in tar] == [("a", 1_000_000), ("b", 1)]
        assert tar.extractfile("b").read() == b"b"


@pytest.mark.parametrize("swapped", ["before it is opened", "while it is read"])
def test_directory_replaced_by_a_link_during_pack_is_not_followed(tmp_path, swapped):
    root, outside = tmp_path / "root", tmp_path / "outside"
    for directory in (root / "a", root / "b", outside):
        directory.mkdir(parents=True)
        (directory / "file").write_text("secret" if directory == outside else "")
    seen = {}
    for path, fields in files.scan(str(root), max_entries=100):
        seen[path] = fields
        if path == ("b" if swapped == "before it is opened" else "a/file"):
            (root / "a").rename(tmp_path / "away")
            (root / "a").symlink_to(outside)
    assert {*seen} == ({"a", "b", "b/file"} if swapped == "before it is opened" else {"a", "b", "a/file", "b/file"})
    assert all(fields[2] == 0 for fields in seen.values())


def test_directory_replaced_by_a_link_during_unpack_is_not_followed(tmp_path, monkeypatch):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir(mode=0o700)
    tar = pack(other("d", tarfile.DIRTYPE, mode=0o777), other("e", tarfile.DIRTYPE)).getvalue()

    def swap():
        (root / "d").rename(tmp_path / "away")
        (root / "d").symlink_to(outside)

    source = InterruptedBuffer(at=3 * tarfile.BLOCKSIZE)  # both members are unpacked, and the end of the tar follows
    io.BytesIO.write(source, tar)
    source.seek(0)
    source.act = swap
    monkeypatch.setattr(files, "CHUNK_BYTES", tarfile.BLOCKSIZE)
    with pytest.raises(files.BadPath):
        files.unpack(str(root), source)
    assert (root / "d").is_symlink()
    assert outside.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["paths", "targets"])
def test_total_name_length_above_the_budget_is_too_large(tmp_path, monkeypatch, what):
    way = tmp_path / ("d" * 200)
    way.mkdir()
    for number in range(5):
        (way / f"{number}").symlink_to("t" * 300)
    room = {"paths": 200 + 5 * 202 - 1, "targets": 5 * 300 - 1}[what]
    monkeypatch.setattr(files, "_name_budget_bytes", lambda most: room)
    with pytest.raises(files.TooLarge):
        list(files.scan(str(tmp_path), max_entries=99))
    room += 1 if what == "targets" else 1000
    assert len(list(files.scan(str(tmp_path), max_entries=99))) == 6


def test_clear_ends_at_its_deadline_while_files_are_created(tmp_path, monkeypatch):
    drop = files._remove_entry

    def make_another(above, name):
        drop(above, name)
        (tmp_path / f"{name}x").write_text("")

    (tmp_path / "a").write_text("")
    monkeypatch.setattr(files, "_remove_entry", make_another)
    with pytest.raises((TimeoutError, OSError)):
        files.clear(str(tmp_path), seconds=0.2)


def test_socket_among_files_is_listed(tmp_path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        assert [fields[0] for _, fields in files.scan(str(tmp_path), max_entries=9)] == ["other"]
