"""Conformance of file verbs: every provider, and Docker both by the agent and by the engine."""

import io
import os
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from sandboxes.file_watch import FileWatch
from sandboxes.image import files
from sandboxes.models import Sandbox, SandboxState
from sandboxes.providers.base import DATA, WORKSPACE
from sandboxes.providers.errors import BadPath, FileExists, NoSuchFile, Rejected, TooLarge
from sandboxes.providers.file_verbs import parse_listing
from sandboxes.state import changes, exact_tars, skills
from tests.conformance.conftest import BY_ENGINE, GVISOR, make_box_fixture
from tests.support.storage.tars import directory, file, link, other, pack

ODD = [
    "-rf", "with space", "ünïcode 漢字 🎲", "--", "two\nlines", "tab\there", 'it\'s "quoted" $HOME `id` \\', "*", ".hidden",
    "a" * 255,
]  # fmt: skip
box = make_box_fixture("memory", "process", "docker", BY_ENGINE, GVISOR, root=DATA)
real = make_box_fixture("process", "docker", BY_ENGINE, GVISOR, root=DATA)
container = make_box_fixture("docker", root=DATA)


# --- all verbs ----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_each_file_verb_has_its_effect(file_box):
    file_box.write("a/ü file", b"0123456789")
    assert (file_box.read("a/ü file"), file_box.range("a/ü file", 4, 3)) == (b"0123456789", (b"456", 10))
    file_box.make_directory("empty/er")
    file_box.put(file("run.sh", b"#!/bin/sh\n", mode=0o755), link("link", "run.sh"))
    listed = file_box.provider.put_and_list_files(file_box.ref, DATA, pack(file("b", b"12")))
    assert listed == file_box.look()
    assert {path: (stat.kind, stat.size) for path, stat in listed.items()} == {
        "a": ("directory", 0), "a/ü file": ("file", 10), "empty": ("directory", 0), "empty/er": ("directory", 0),
        "run.sh": ("file", 10), "link": ("link", 0), "b": ("file", 2),
    }  # fmt: skip
    assert file_box.provider.size(file_box.ref, DATA) == 22
    with pytest.raises(FileExists):
        file_box.move("b", "run.sh")
    file_box.move("b", "a/b")
    assert file_box.get(only=["a/b", "b", "link"]) == {"a/b": b"12", "link": "run.sh"}
    file_box.remove_file("a/b")
    file_box.remove("link", "empty", "empty/er")
    file_box.provider.seed(file_box.ref, "catan", skill_tar(prompt_md=b"Play."))
    assert file_box.look().keys() == {"a", "a/ü file", "run.sh", "skills", "skills/catan", "skills/catan/prompt.md"}
    file_box.provider.clear(file_box.ref, DATA)
    assert file_box.look() == {}


# --- manifest -----------------------------------------------------------------------------------------------------


def test_data_of_a_new_sandbox_is_empty(bench):
    new = bench.box()
    assert new.provider.manifest(new.ref, DATA) == {}
    assert new.provider.size(new.ref, DATA) == 0


@pytest.mark.smoke
def test_manifest_contains_kind_mode_size_and_target(box):
    box.put(
        file("run.sh", b"#!/bin/sh\n", mode=0o755),
        file("deep/er/file", b"12345", mode=0o640),
        directory("empty", mode=0o700),
        link("link", "deep/er"),
        link("out", "/etc/passwd"),
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


def test_unpacked_times_are_kept_in_whole_seconds(box):
    (member, content), folder = file("old"), directory("folder")[0]
    member.mtime, folder.mtime = 1_000_000_000.9, 1_100_000_000
    box.put((member, content), (folder, None))
    there = box.look()
    assert (there["old"].mtime, there["folder"].mtime) == (1_000_000_000, 1_100_000_000)


def test_manifest_of_a_directory_has_paths_relative_to_the_root(box):
    box.put(*map(file, ("a/b/c/file", "a/b/file", "a/bb", "other")))
    assert box.look(under="a/b").keys() == {"a/b/c", "a/b/c/file", "a/b/file"}
    assert box.look(under="a/b", deep=False).keys() == {"a/b/c", "a/b/file"}
    assert box.look(deep=False).keys() == {"a", "other"}


def test_manifest_of_a_missing_directory_is_an_error(box):
    box.put(file("file"), link("link", "."))
    for gone in ("nothing", "no/such"):
        with pytest.raises(NoSuchFile):
            box.look(under=gone)
    for bad in ("file", "file/below", "link", "link/below", "..", "a/../b", "/a", "a//b", "a/", ".", "a\0b", "\ud800"):
        with pytest.raises(BadPath):
            box.look(under=bad)


def test_manifest_above_the_entry_limit_is_too_large(box):
    box.put(*map(file, ("a/1", "a/2", "b")))
    assert len(box.look(max_entries=4)) == 4
    assert len(box.look(max_entries=2, deep=False)) == 2
    for more in ({"max_entries": 3}, {"max_entries": 1, "deep": False}, {"max_entries": 1, "under": "a"}):
        with pytest.raises(TooLarge):
            box.look(**more)


def test_unusual_names_are_supported_by_all_verbs(box):
    directories = ["/".join(ODD[:depth]) for depth in range(1, len(ODD))]
    path = "/".join(ODD)
    box.write(path, b"x")
    assert box.look().keys() == {*directories, path}
    assert box.look(under=directories[-1]).keys() == {path}
    assert box.get(only=[*directories, path]) == {**dict.fromkeys(directories), path: b"x"}
    assert box.read(path) == box.range(path, 0, 300)[0] == b"x"
    box.put(*map(file, ODD[1:]))
    assert box.get(only=ODD[1:]) == dict.fromkeys(ODD[1:], b"content")
    box.remove(path, *directories, *ODD[1:])
    assert box.look() == {}


@pytest.mark.smoke
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


@pytest.mark.smoke
def test_pipes_and_sockets_are_listed_but_not_read(real):
    real.python("os.mkfifo('pipe'); s = socket.socket(socket.AF_UNIX); s.bind('socket'); open('file', 'w')")
    there = real.look()
    assert {path: stat.kind for path, stat in there.items()} == {"pipe": "other", "socket": "other", "file": "file"}
    assert {(stat.size, stat.target) for stat in there.values()} == {(0, "")}
    assert real.get(only=there) == real.get() == {"file": b""}
    for path in ("pipe", "socket"):
        for act in (real.read, lambda path: real.range(path, 0, 1)):
            with pytest.raises(BadPath):
                act(path)
    real.remove(*there)
    assert real.look() == {}


LOCKED = """
for mode in (0o000, 0o400, 0o100, 0o300):
    os.makedirs(f'{mode:o}/in'); open(f'{mode:o}/in/file', 'w').write('x'); os.chmod(f'{mode:o}/in/file', 0)
    os.chmod(f'{mode:o}/in', mode); os.chmod(f'{mode:o}', mode)
"""


def test_unreadable_entries_are_listed_and_transferred_and_keep_their_mode(real):
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
    tar = b"".join(real.provider.get_files(real.ref, DATA))
    real.provider.clear(real.ref, DATA)
    real.provider.put_files(real.ref, DATA, io.BytesIO(tar))
    assert b"".join(real.provider.get_files(real.ref, DATA)) == tar


def test_hundreds_of_files_are_listed_fetched_and_removed(box):
    names = [f"d{number % 20:02}/file {number}" for number in range(600)]
    box.put(*(file(name, name.encode()) for name in names))
    there = box.look()
    assert len(there) == len(names) + 20
    assert box.get(only=names) == {name: name.encode() for name in names}
    box.remove(*there)
    assert box.look() == {}


def test_circular_links_are_listed_as_links(box):
    box.put(link("d/here", "."), link("d/up", ".."), link("self", "self"))
    assert {path: stat.target for path, stat in box.look().items()} == {"d": "", "d/here": ".", "d/up": "..", "self": "self"}
    assert box.get() == {"d": None, "d/here": ".", "d/up": "..", "self": "self"}


# --- directories and moves --------------------------------------------------------------------------------------


def test_directory_is_created_with_its_parents_and_repeatedly(box):
    box.make_directory("a/b c/ünï")
    assert {path: stat.kind for path, stat in box.look().items()} == dict.fromkeys(("a", "a/b c", "a/b c/ünï"), "directory")
    box.write("a/b c/file", b"x")
    box.make_directory("a/b c")
    assert box.read("a/b c/file") == b"x"


def test_directory_is_not_created_over_or_behind_another_entry(box):
    box.put(file("file"), link("link", "/tmp"), directory("d"))
    for bad in ("file", "file/below", "link", "link/below", "../x", "d/../e", "", "a//b", "a\0b"):
        with pytest.raises(BadPath):
            box.make_directory(bad)
    assert box.look().keys() == {"file", "link", "d"}


def test_files_links_and_directories_are_moved(box):
    box.put(file("d/in/file", b"1", mode=0o755), link("d/link", "in/file"), file("-rf", b"2"))
    box.move("-rf", "new/parent/two\nlines")
    box.move("d", "new/e")
    box.move("new/e/link", "link")
    assert box.get() == {
        "link": "in/file", "new": None, "new/e": None, "new/e/in": None, "new/e/in/file": b"1", "new/parent": None,
        "new/parent/two\nlines": b"2",
    }  # fmt: skip
    assert box.look()["new/e/in/file"].mode == 0o755


def test_existing_target_is_replaced_only_with_overwrite(box):
    box.put(file("a", b"a"), file("b", b"b"), link("l", "b"), directory("empty"), file("d/f", b"f"), file("full/f", b"x"))
    for source, target in (("a", "b"), ("a", "a"), ("a", "l"), ("a", "d"), ("d", "empty"), ("d", "a"), ("l", "a")):
        with pytest.raises(FileExists):
            box.move(source, target)
    for source, target in (("a", "d"), ("d", "a"), ("d", "full"), ("d", "l")):
        with pytest.raises(BadPath):
            box.move(source, target, overwrite=True)
    assert box.get().keys() == {"a", "b", "l", "empty", "d", "d/f", "full", "full/f"}
    box.move("a", "a", overwrite=True)
    box.move("a", "b", overwrite=True)
    box.move("b", "l", overwrite=True)
    box.move("d", "empty", overwrite=True)
    assert box.get() == {"l": b"a", "empty": None, "empty/f": b"f", "full": None, "full/f": b"x"}


def test_move_leaves_its_root_by_no_way(box):
    box.put(file("a"), link("out", "/tmp"), link("up", ".."), directory("d"))
    before = box.look()
    for source, target in (
        ("a", "out/a"), ("a", "up/a"), ("out/a", "b"), ("a", "../b"), ("../etc", "b"), ("a", "d/../../b"), ("d", "d/e"),
        ("a", "a/b"), ("a", ""), ("", "b"), ("a", "b\0"),
    ):  # fmt: skip
        for overwrite in (True, False):
            with pytest.raises(BadPath):
                box.move(source, target, overwrite=overwrite)
    with pytest.raises(BadPath):
        box.provider.move_file(box.ref, f"{DATA}/a", f"{WORKSPACE}/a", overwrite=True)
    with pytest.raises(NoSuchFile):
        box.move("gone", "b")
    assert box.look() == before


def test_directory_without_permissions_is_moved_with_its_mode(real):
    real.python("os.makedirs('locked/in'); os.makedirs('to'); os.chmod('locked/in', 0o500); os.chmod('locked', 0)")
    real.move("locked", "to/moved")
    real.move("to/moved/in", "in")
    assert {path: stat.mode for path, stat in real.look().items()} == {"in": 0o500, "to": 0o755, "to/moved": 0}


def test_watch_reports_changes_by_programs(box):
    sandbox = Sandbox(ref=box.ref, state=SandboxState.WAITING, incarnation=1, prepared=True)
    box.put(file("d/kept"), file("d/changed", b"1"), file("d/removed"), file("outside"))
    watch = FileWatch(DATA, "d", box.look(under="d"), 1)
    assert list(watch.poll(sandbox, box.provider)) == []
    box.write("d/changed", b"2")
    box.remove("d/removed")
    box.put(directory("d/new"), link("d/new/link", "/etc"))
    box.write("outside", b"2")
    assert [(change.kind, change.path) for change in watch.poll(sandbox, box.provider)] == [
        ("deleted", "d/removed"), ("created", "d/new"), ("created", "d/new/link"), ("modified", "d/changed"),
    ]  # fmt: skip
    box.provider.clear(box.ref, DATA)
    assert {change.kind for change in watch.poll(sandbox, box.provider)} == {"deleted"}


# --- stamps -------------------------------------------------------------------------------------------------------


def test_stamp_is_stable_without_changes(box):
    box.put(file("a", b"1"), file("d/b", b"2"), link("l", "a"))
    before = box.look()
    box.read("a")
    box.get()
    box.get(only=["d/b", "l"])
    assert box.look() == before


def test_stamp_changes_with_content_mode_and_target_of_its_entry_only(box):
    box.put(file("a", b"1"), file("d/b", b"2"), link("l", "a"), file("same", b"3"))
    before = box.look()
    box.write("a", b"2")
    box.put(file("d/b", b"2", mode=0o755), link("l", "b"))
    box.write("d/new", b"")
    after = box.look()
    assert {path for path in before if after[path].stamp != before[path].stamp} == {"a", "d/b", "l"}


def test_stamp_changes_with_a_directorys_mode_and_a_rewrite_of_equal_length_and_mtime(real):
    real.write("d/a", b"one")
    before = real.look()
    real.python("s = os.stat('d/a'); open('d/a', 'r+').write('two'); os.utime('d/a', ns=(s.st_atime_ns, s.st_mtime_ns))")
    real.python("os.chmod('d', 0o500)")
    after = real.look()
    assert (after["d/a"].size, after["d/a"].mtime) == (before["d/a"].size, before["d/a"].mtime)
    assert after["d/a"].stamp != before["d/a"].stamp
    assert after["d"].stamp != before["d"].stamp


# --- partial reads --------------------------------------------------------------------------------------------


def test_only_selected_existing_paths_are_fetched(box):
    box.put(*map(file, ("a/b/file", "a/file", "a/other", "b")), link("link", "a"))
    assert box.get(only=["a/file", "gone", "a/gone/file", "b/below", "link/file"]) == {"a/file": b"content"}
    assert box.get(only={"a", "a/b", "link"}) == {"a": None, "a/b": None, "link": "a"}
    assert box.get(only=[]) == {}


def test_invalid_path_is_neither_fetched_nor_removed(box):
    for path in ("", "..", "../x", "/etc/passwd", "a/../../x", "a//b", "./a", "a/", "a\0b", "\ud800"):
        for act in (lambda path: box.get(only=[path]), box.remove):
            with pytest.raises(BadPath):
                act(path)


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


@pytest.mark.parametrize("only", [None, ["sparse"]])
def test_sparse_file_counts_with_its_apparent_size_against_the_limit_of_a_tar(real, only):
    real.python("open('sparse', 'wb').truncate(40 << 20); open('small', 'wb').write(b'kept')")
    out = io.BytesIO()
    with pytest.raises(TooLarge, match="1 MiB"):
        out.writelines(real.provider.get_files(real.ref, DATA, only=only, max_bytes=1 << 20))
    assert len(out.getvalue()) <= 1 << 20
    assert real.get(only=["small"], max_bytes=1 << 20) == {"small": b"kept"}


def test_tar_above_its_limit_is_too_large(box):
    box.put(file("a", b"x" * 30_000))
    with pytest.raises(TooLarge, match="20000 bytes"):
        box.get(max_bytes=20_000)
    assert box.get(max_bytes=60_000) == {"a": b"x" * 30_000}


def test_excluded_entries_are_omitted_with_their_children(box):
    box.put(*map(file, TREE))
    for patterns, left in EXCLUDED.values():
        assert {path for path, content in box.get(exclude=patterns).items() if content is not None} == left, patterns
        assert box.get(only=TREE, exclude=patterns).keys() == left, patterns


def test_invalid_pattern_is_rejected(box):
    for pattern in ("a\0b", "\ud800"):
        with pytest.raises(Rejected):
            box.get(exclude=[pattern])


# --- exact tars ---------------------------------------------------------------------------------------------------

STATE = r"""
os.mkdir('d'); open('d/one', 'w').write('x'); os.link('d/one', 'two'); os.link('d/one', 'a'); os.symlink('nowhere', 'dangling')
os.symlink('t' * 4000, 'long'); os.mkdir('empty'); os.mkdir('n' * 255); open('-rf\n' + '\udcff' * 100, 'w').close()
with open('sparse', 'wb') as file:
    file.write(b'begin'); file.seek(512 << 20); file.write(b'end'); file.truncate(1 << 30)
open('hole', 'wb').truncate(1 << 30); os.chmod('d', 0o1777); os.chmod('two', 0o640)
for number, name in enumerate(['two', 'sparse', 'hole', 'dangling', 'empty', 'd']):
    os.utime(name, ns=(0, -1_500_000_001 + number * 10**17 + number), follow_symlinks=False)
"""
DESCRIPTION = r"""
def describe():
    for folder, folders, names in os.walk(b'.'):
        for path in sorted(os.path.join(folder, name) for name in folders + names):
            s = os.lstat(path)
            if path.startswith(b'./.home'): continue
            target = os.readlink(path) if os.path.islink(path) else b''
            count = 0 if os.path.isdir(path) else s.st_nlink
            size = 0 if os.path.isdir(path) else s.st_size
            yield path, oct(s.st_mode), s.st_mtime_ns, count, size, s.st_blocks < 1000, target
print([*describe()], os.path.samefile('two', 'a'), open('sparse', 'rb').read(5), open('a').read())
"""


@pytest.mark.smoke
@pytest.mark.parametrize("root", [WORKSPACE, DATA])
def test_exact_tar_restores_links_holes_times_and_sticky_bits(real, root):
    real.root = root
    real.python(STATE)
    before = real.python(DESCRIPTION)
    tar = b"".join(real.provider.get_files(real.ref, root, exact=True))
    assert len(tar) < 1 << 20
    assert real.provider.size(real.ref, root) < 1 << 20
    assert exact_tars.is_exact_tar(io.BytesIO(tar))
    assert exact_tars.read_omissions(io.BytesIO(tar)) == []
    real.provider.clear(real.ref, root)
    real.provider.put_files(real.ref, root, io.BytesIO(tar))
    assert real.python(DESCRIPTION) == before
    assert len(before) > 1000


@pytest.mark.smoke
def test_exact_tar_lists_what_it_does_not_keep(real):
    real.python(r"""
os.mkfifo('pipe'); s = socket.socket(socket.AF_UNIX); s.bind('socket'); open('program', 'w'); os.chmod('program', 0o6755)
for number in range(7): os.mkfifo(f'd{number}')
here = os.getcwd()
for _ in range(20): os.mkdir('d' * 250); os.chdir('d' * 250)
os.chdir(here)
""")
    tar = io.BytesIO(b"".join(real.provider.get_files(real.ref, real.root, exact=True)))
    long_path = "/".join(["d" * 250] * 16)
    assert exact_tars.read_omissions(tar) == [
        {"kind": "pipe", "count": 8, "paths": ["d0", "d1", "d2", "d3", "d4"]},
        {"kind": "socket", "count": 1, "paths": ["socket"]},
        {"kind": "long_path", "count": 1, "paths": [long_path[:200]]},
        {"kind": "set_id_bit", "count": 1, "paths": ["program"]},
    ]
    real.provider.clear(real.ref, real.root)
    real.provider.put_files(real.ref, real.root, tar)
    assert real.look()["program"].mode == 0o755


def test_exact_tar_keeps_the_links_and_times_of_a_tar(box):
    (member, content), second, folder = file("d/one"), other("two", tarfile.LNKTYPE, "d/one"), directory("d", mode=0o1755)[0]
    member.mtime, folder.mtime = -5, 1_100_000_000
    member.pax_headers, folder.pax_headers = {"mtime": "-4.25"}, {"mtime": "1100000000.123456789"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for each in ((folder, None), (member, content), second):
            tar.addfile(*each)
    packed.seek(0)
    box.provider.put_files(box.ref, box.root, packed)
    members = {name: member for name, (member, _) in box.get_members(exact=True).items()}
    assert {(name, member.linkname) for name, member in members.items() if member.islnk()} in (
        {("two", "d/one")}, {("d/one", "two")},
    )  # fmt: skip
    assert [member.pax_headers["mtime"] for member in members.values() if member.isreg()] == ["-4.250000000"]
    assert (members["d"].pax_headers["mtime"], members["d"].mode) == ("1100000000.123456789", 0o1755)
    assert box.get()["two"] == b"content"


# --- removing -----------------------------------------------------------------------------------------------------


def test_remove_is_deepest_first_and_leaves_non_empty_directories(box):
    box.put(*map(file, ("a/b/c", "d/kept", "d/gone", "e/f")))
    box.remove("a", "a/b", "a/b/c", "d", "d/gone", "e", "e/f", "e", "never", "never/was", "d/kept/below")
    assert box.look().keys() == {"d", "d/kept"}
    box.remove()
    assert box.look().keys() == {"d", "d/kept"}


def test_remove_does_not_follow_links(box):
    box.provider.write_file(box.ref, f"{WORKSPACE}/file", b"")
    links = {f"link{number}": target for number, target in enumerate([DATA, "kept", ".", "/tmp", "..", box.path(WORKSPACE)])}
    box.put(file("kept/file"), *(link(name, target) for name, target in links.items()))
    box.remove(*(f"{name}/{path}" for name in links for path in ("file", "kept/file", "kept")))
    assert box.look().keys() == {"kept", "kept/file", *links}
    box.remove(*links)
    assert box.look().keys() == {"kept", "kept/file"}
    assert box.provider.read_file(box.ref, f"{WORKSPACE}/file", limit=1) == b""


def test_remove_works_in_read_only_directories(real):
    real.python("os.makedirs('a/b'); open('a/b/f', 'w'); open('a/kept', 'w'); os.chmod('a/b', 0o500); os.chmod('a', 0o500)")
    real.remove("a/b/f", "a/b")
    assert {path: stat.mode for path, stat in real.look().items() if stat.kind == "directory"} == {"a": 0o500}
    assert "a/b" not in real.look()


def test_put_and_list_files_returns_the_manifest_afterwards(box):
    box.write("before", b"1")
    listed = box.provider.put_and_list_files(box.ref, box.root, pack(file("a/b"), link("link", "a")))
    assert {"before", "a", "a/b", "link"} <= listed.keys()
    assert listed == box.look()
    with pytest.raises(TooLarge):
        box.provider.put_and_list_files(box.ref, box.root, pack(file("c")), max_entries=1)


@pytest.mark.smoke
@pytest.mark.parametrize("root", [DATA, WORKSPACE])
def test_clear_leaves_only_the_root(box, root):
    fresh = box.provider.manifest(box.ref, root).keys()
    members = [*map(file, ("a/b/c", ".home/x", "-rf", ODD[4])), link("link", "/tmp"), link("up", "..")]
    box.provider.put_files(box.ref, root, pack(*members))
    for _ in range(2):
        box.provider.clear(box.ref, root)
        assert box.provider.manifest(box.ref, root).keys() == fresh
    box.provider.write_file(box.ref, f"{root}/new", b"x")
    assert box.run("cat", "new", cwd=root).stdout == b"x"


def test_clear_of_one_root_leaves_the_other(box):
    box.put(file("kept"), link("to data", box.path(DATA)))
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


def test_range_is_read_with_the_file_size(box):
    content = bytes(range(256)) * 100
    box.put(file("file", b"0123456789"), file("binary", content), file("empty", b""))
    for start, length, expected in (
        (0, 4, b"0123"), (4, 3, b"456"), (8, 9, b"89"), (0, 10, b"0123456789"), (0, 1 << 20, b"0123456789"), (10, 1, b""),
        (3, 0, b""), (1 << 70, 1, b""),
    ):  # fmt: skip
        assert box.range("file", start, length) == (expected, 10)
    assert box.range("binary", 1000, 20_000) == (content[1000:21_000], len(content))
    assert box.range("empty", 0, 5) == (b"", 0)


def test_range_of_a_non_file_is_refused(box):
    box.put(file("d/file"), link("link", "d/file"), link("way", "d"))
    with pytest.raises(NoSuchFile):
        box.range("nothing", 0, 1)
    for bad in ("d", "link", "way/file", "d/file/below", "../d"):
        with pytest.raises(BadPath):
            box.range(bad, 0, 1)
    for start, length in ((-1, 1), (0, -1)):
        with pytest.raises(Rejected):
            box.range("d/file", start, length)


# --- skills -------------------------------------------------------------------------------------------------------


def skill_tar(**contents):
    return io.BytesIO(zlib.decompress(skills.pack_archive({name.replace("_", "."): text for name, text in contents.items()})))


@pytest.mark.smoke
def test_seeded_skills_are_owned_by_the_agent(box):
    kinds = ("rpg", "catan", "coding")
    for number, kind in enumerate(kinds, 1):
        box.provider.seed(box.ref, kind, skill_tar(prompt_md=f"Play {kind}.".encode(), turn_py=b"#!/bin/sh"))
        assert box.look(under="skills", deep=False).keys() == {f"skills/{each}" for each in kinds[:number]}
        assert box.look()[f"skills/{kind}/prompt.md"].mode == 0o644
        assert box.look()[f"skills/{kind}/turn.py"].mode == 0o755
        assert box.read(f"skills/{kind}/prompt.md") == f"Play {kind}.".encode()
    assert box.run("sh", "-c", "echo mine >prompt.md", cwd=f"{DATA}/skills/rpg").exit_code == 0
    box.provider.seed(box.ref, "rpg", skill_tar(prompt_md=b"another"))
    assert box.read("skills/rpg/prompt.md") == b"mine\n"


IN_THE_WAY = {
    "an empty directory": lambda: directory("skills/catan"),
    "a file": lambda: file("skills/catan"),
    "a link": lambda: link("skills/catan", "/nowhere"),
    "a file above": lambda: file("skills"),
    "a link above": lambda: link("skills", "/tmp"),
}


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_seed_does_not_replace_existing_entries(box, what):
    box.put(IN_THE_WAY[what]())
    before = box.look()
    box.provider.seed(box.ref, "catan", skill_tar(prompt_md=b"Play."))
    assert box.look() == before


def test_seed_with_an_invalid_name_or_tar_is_rejected_and_writes_nothing(box):
    for kind in ("", "..", "a/b", ".", "a b", "ü", "x" * 101, "a\n", "a\0"):
        with pytest.raises(Rejected):
            box.provider.seed(box.ref, kind, skill_tar(prompt_md=b"Play."))
    assert box.look() == {}
    outside = io.BytesIO()
    with tarfile.open(fileobj=outside, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../outside"))
    for content in (outside.getvalue(), b"no tar" * 100):
        with pytest.raises(Rejected):
            box.provider.seed(box.ref, "catan", io.BytesIO(content))
    assert box.look(deep=True).keys() <= {"skills"}


def test_concurrent_seeds_write_the_skill_once(box):
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: box.provider.seed(box.ref, "catan", skill_tar(prompt_md=b"Play.")), range(8)))
    assert box.look().keys() == {"skills", "skills/catan", "skills/catan/prompt.md"}


# --- Docker: agent and engine ------------------------------------------------------------------------------------------------


def test_agent_needs_no_exec_and_its_files_are_owned_by_the_agents_user(container, monkeypatch):
    monkeypatch.setattr(container.provider, "_create_exec", lambda *args, **options: pytest.fail("an exec"))
    container.write("a/f", b"x")
    container.put(file("b/g", b"y"), file("b/locked", b"z", mode=0), directory("b", mode=0))
    assert container.run("stat", "-c", "%u:%g", "a", "a/f", "b", cwd=DATA).stdout.split() == [b"10001:10001"] * 3
    assert container.get(only=["a/f", "b/locked"]) == {"a/f": b"x", "b/locked": b"z"}
    assert (container.look()["b"].mode, container.look()["b/locked"].mode) == (0, 0)


MUCH = r"""
os.makedirs('d/e'); os.mkdir(b'\xff'); open('d/e/two\nlines', 'w').write('x' * 70000); open(b'\xff/\xfe', 'w')
os.symlink('d/e', 'link'); os.symlink(b'\xff', 'd/link'); os.mkfifo('pipe'); os.symlink('link', 'link2')
for n in range(600): open(f'd/{n}', 'w').write('y' * n)
os.utime('d/1', (-5, -5)); os.utime('d/2', (1 << 33, 1 << 33)); os.chmod('d/3', 0o4755); os.truncate('d/4', 1 << 34)
os.chmod('d/5', 0); os.chmod('d/e', 0)
way = '/'.join(['w' * 250] * 15); os.makedirs(way); open(way + '/' + 'f' * 200, 'w'); os.chdir(way); os.makedirs('long' * 60)
"""


def test_digest_stated_by_the_agent_is_that_of_the_listing(container):
    script = "mkdir -p d/e; echo x >d/f; ln -s d/f link; mkfifo pipe; touch 'two\nlines' \"$(printf '\\377')\"; chmod 751 d"
    result = container.run("sh", "-c", script, cwd=DATA, digest_data=True)
    assert result.data_digest == changes.digest_manifest(container.look())
    assert container.run("touch", "d/f", cwd=DATA, digest_data=True).data_digest not in ("", result.data_digest)
    assert container.run("sh", "-c", "for n in $(seq 300); do : >$n; done", cwd=DATA, digest_data=True).data_digest == ""


def test_agent_and_engine_return_the_same_results(container, settings, tmp_path):
    container.python(MUCH)

    def answers():
        there = container.look()
        paths = [path for path, stat in there.items() if stat.size < 1 << 20]
        some = [path for path in paths if path != "d/5"][:400]  # reading this one changes its stamp
        return {
            "manifest": there,
            "entries": container.look(deep=False, under="d"),
            "some": b"".join(container.provider.get_files(container.ref, DATA, only=some, exclude=["*9"])),
            "file": container.read("d/e/two\nlines"),
            "range": container.range("d/4", (1 << 33) - 5, 10),
            "size": container.provider.size(container.ref, DATA),
        }

    by_agent = answers()
    assert len(by_agent["manifest"]) == 625
    assert by_agent["manifest"]["d/1"].mtime == 0
    settings.AGENT_GATEWAY = tmp_path / "none"
    assert answers() == by_agent


def test_files_are_accessible_after_a_restart_of_the_container(container):
    container.write("a")
    assert container.look().keys() == {"a"}
    container.provider._engine.client.restart(container.ref, timeout=0)
    container.write("b")
    assert container.look().keys() == {"a", "b"}


def test_locked_root_is_accessible_and_stays_locked(real):
    real.python("open('a', 'w').write('x'); os.chmod('.', 0)")
    try:
        assert real.look().keys() == {"a"}
        assert real.get(only=["a"]) == {"a": b"x"}
        assert real.run("stat", "-c", "%a", real.path(DATA), cwd="/").stdout == b"0\n"
    finally:
        assert real.run("chmod", "755", real.path(DATA), cwd="/").exit_code == 0


def build_listing(*entries):
    return b"".join(files.encode_entry(*entry) for entry in entries)


GOOD = (
    ("a", "directory", 0o755, 0, 5, "1.2.3", ""),
    ("a/b", "file", 0o644, 10, 5, "1.2.3", ""),
    ("l", "link", 0o777, 0, 5, "1", "x"),
)
NONSENSE = {
    "cut": build_listing(*GOOD)[:-1],
    "a field too many": build_listing(*GOOD) + b"x\0",
    "more than asked for": build_listing(*GOOD, *((f"x{n}", *GOOD[1][1:]) for n in range(9))),
    "twice": build_listing(*GOOD, GOOD[0]),
    "below a link": build_listing(*GOOD, ("l/x", *GOOD[1][1:])),
    **{f"{path!r}": build_listing((path, *GOOD[1][1:])) for path in ("", ".", "..", "/etc", "../x", "x/", "b/c", "x" * 256)},
    "below a file": build_listing(*GOOD, ("a/b/c", *GOOD[1][1:])),
    "another kind": build_listing(("x", "device", 0, 0, 0, "1", "")),
    "a mode with more": build_listing(("x", "file", 0o4755, 0, 0, "1", "")),
    "a negative size": build_listing(("x", "file", 0, -1, 0, "1", "")),
    "an endless size": build_listing(("x", "file", 0, 10**30, 0, "1", "")),
    "a time far away": build_listing(("x", "file", 0, 0, 1 << 40, "1", "")),
    "an endless stamp": build_listing(("x", "file", 0, 0, 0, "1" * 100, "")),
    "a link to nothing": build_listing(("x", "link", 0, 0, 0, "1", "")),
    "a target of a file": build_listing(("x", "file", 0, 0, 0, "1", "y")),
    "an endless target": build_listing(("x", "link", 0, 0, 0, "1", "y" * 5000)),
}


def test_valid_listing_of_a_sandbox_is_parsed():
    assert [*(parse_listing(build_listing(*GOOD), "", 3) or {})] == ["a", "a/b", "l"]
    assert parse_listing(b"", "", 3) == {}


@pytest.mark.parametrize("kind", NONSENSE)
def test_invalid_listing_of_a_sandbox_is_rejected(kind):
    assert parse_listing(NONSENSE[kind], "", 10) is None


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
    for place in (root / "a", root / "b", outside):
        place.mkdir(parents=True)
        (place / "file").write_text("secret" if place == outside else "")
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
    tar = pack(directory("d", mode=0o777), directory("e")).getvalue()

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
