"""Conformance of every provider to the port in sandboxes/providers/base.py."""

import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from sandboxes.providers.base import BadPath, Missing, NoSuchFile, Rejected, SandboxSpec, TooLarge
from sandboxes.providers.memory import MemoryProvider
from tests.conformance.conftest import unique_name, unique_sleep_seconds
from tests.support.waiting import run_with_growing_timeouts

MIB = 1 << 20
READY_TIMEOUT = timedelta(seconds=60)  # far below the 300 s that programs sleep in these tests


# --- create, list, destroy ----------------------------------------------------------------------------------------


def test_created_sandbox_becomes_ready_and_runs_commands(box):
    result = box.run("echo", "hello")
    assert (result.stdout, result.stderr, result.exit_code) == (b"hello\n", b"", 0)
    assert (result.timed_out, result.oom, result.truncated) == (False, False, False)


def test_create_is_idempotent(bench):
    spec = bench.spec()
    assert bench.provider.create(spec) == bench.provider.create(spec)
    assert [found.name for found in bench.provider.list(bench.owner)] == [spec.name]


def test_repeated_create_keeps_files(bench):
    spec = bench.spec()
    ref = bench.provider.create(spec)
    bench.provider.wait_ready(ref, timeout=READY_TIMEOUT)
    bench.provider.write_file(ref, "/workspace/kept", b"kept")
    bench.provider.create(spec)
    assert bench.provider.read_file(ref, "/workspace/kept", limit=10) == b"kept"


def test_concurrent_creates_return_the_same_sandbox(bench):
    spec = bench.spec()
    with ThreadPoolExecutor(4) as threads:
        refs = {*threads.map(bench.provider.create, [spec] * 4)}
    assert refs == {found.ref for found in bench.provider.list(bench.owner)}
    assert len(refs) == 1


def test_name_of_another_owner_is_rejected(bench, box):
    with pytest.raises(Rejected):
        bench.provider.create(SandboxSpec(name=box.name, owner=bench.owner + "-other", image=bench.spec().image))
    assert bench.provider.list(bench.owner + "-other") == []
    assert box.run("true").exit_code == 0


def test_sandbox_is_found_by_ref_and_by_name(bench, box):
    by_ref, by_name = bench.provider.inspect(box.ref), bench.provider.inspect(box.name)
    assert by_ref == by_name
    assert (by_ref.ref, by_ref.name, by_ref.running) == (box.ref, box.name, True)
    assert abs(datetime.now(UTC) - by_ref.created_at) < timedelta(minutes=5)


def test_every_verb_accepts_the_name_as_ref(bench, box):
    box.ref = box.name
    bench.provider.wait_ready(box.name, timeout=READY_TIMEOUT)
    bench.provider.write_file(box.name, "/workspace/a", b"1")
    assert box.run("cat", "a").stdout == b"1"
    bench.provider.destroy(box.name)
    assert bench.provider.list(bench.owner) == []


def test_list_contains_only_the_owners_sandboxes(bench, box):
    second = bench.box()
    assert {found.ref for found in bench.provider.list(bench.owner)} == {box.ref, second.ref}
    assert bench.provider.list(bench.owner + "-other") == []
    assert bench.provider.list(bench.owner[:-1]) == []


def test_destroyed_sandbox_is_gone(bench, box):
    bench.provider.destroy(box.ref)
    assert bench.provider.list(bench.owner) == []
    with pytest.raises(Missing):
        bench.provider.inspect(box.ref)


def test_destroy_is_idempotent(bench, box):
    bench.provider.destroy(box.ref)
    bench.provider.destroy(box.ref)
    bench.provider.destroy(f"lhc-never-{uuid4().hex}")


def test_destroy_leaves_other_sandboxes(bench, box):
    other = bench.box()
    bench.provider.destroy(box.ref)
    assert other.run("echo", "still here").stdout == b"still here\n"


def test_sandbox_recreated_under_a_name_is_empty(bench):
    spec = bench.spec()
    for _ in range(2):
        ref = bench.provider.create(spec)
        bench.provider.wait_ready(ref, timeout=READY_TIMEOUT)
        with pytest.raises(NoSuchFile):
            bench.provider.read_file(ref, "/workspace/left", limit=10)
        bench.provider.write_file(ref, "/workspace/left", b"old")
        bench.provider.destroy(ref)


VERBS = {
    "wait_ready": lambda p, ref: p.wait_ready(ref, timeout=timedelta(seconds=5)),
    "exec": lambda p, ref: p.exec(ref, ["true"], env={}, timeout=READY_TIMEOUT, mark=uuid4().hex),
    "inspect": lambda p, ref: p.inspect(ref),
    "read_file": lambda p, ref: p.read_file(ref, "/workspace/a", limit=10),
    "write_file": lambda p, ref: p.write_file(ref, "/workspace/a", b""),
    "remove_file": lambda p, ref: p.remove_file(ref, "/workspace/a"),
    "get_files": lambda p, ref: b"".join(p.get_files(ref, "/workspace")),
    "put_files": lambda p, ref: p.put_files(ref, "/workspace", pack(file("a"))),
    "size": lambda p, ref: p.size(ref, "/workspace"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_raise_missing_without_a_sandbox(bench, verb):
    box = bench.box()
    bench.provider.destroy(box.ref)
    for ref in (box.ref, box.name, "lhc-never-was"):
        with pytest.raises(Missing):
            VERBS[verb](bench.provider, ref)


# --- exec: input -------------------------------------------------------------------------------------------

WORDS = [
    "a b",
    "",
    "$HOME",
    "`id`",
    "it's",
    '"quoted"',
    "*",
    "back\\slash",
    "ünïcode 漢字",
    "two\nlines",
    "-n",
    "; exit",
]


def test_arguments_are_passed_unchanged_without_a_shell(box):
    result = box.run("printf", r"%s\000", *WORDS)
    assert result.stdout == b"".join(word.encode() + b"\0" for word in WORDS)


def test_stdin_is_passed_unchanged(box):
    assert box.run("cat", stdin=bytes(range(256))).stdout == bytes(range(256))


def test_empty_stdin_ends_immediately(box):
    assert box.run("cat", seconds=60).stdout == b""


def test_five_megabytes_of_stdin_pass_through_cat(box):
    sent = bytes(range(256)) * (5 * MIB // 256)
    result = box.run("cat", stdin=sent, cap=8 * MIB)
    assert result.stdout == sent
    assert not result.truncated


def test_five_megabytes_of_stdin_echoed_past_the_cap_do_not_block(box):
    result = box.run("cat", stdin=b"x" * 5 * MIB, cap=1000)
    assert (result.stdout, result.truncated, result.exit_code) == (b"x" * 1000, True, 0)


def test_unread_stdin_does_not_block(box):
    result = box.run("true", stdin=b"x" * 5 * MIB)
    assert (result.exit_code, result.timed_out) == (0, False)


def test_command_that_stops_reading_to_write_does_not_block(real_box):
    script = f"head -c 8192 >/dev/null; head -c {10 * MIB} /dev/zero; cat >/dev/null"
    result = real_box.run("sh", "-c", script, stdin=b"x" * 5 * MIB, cap=1000)
    assert (result.exit_code, result.timed_out, result.truncated) == (0, False, True)


def test_env_is_passed(box):
    given = {"GREETING": "hello world", "EMPTY": "", "ODD": "a=b 'c' \"d\" $e\nsecond line ü"}
    result = box.run("printenv", *given, env=given)
    assert result.stdout.decode() == "".join(f"{value}\n" for value in given.values())


def test_control_planes_environment_is_not_inherited(box, monkeypatch):
    monkeypatch.setenv("LEASEHOLD_CANARY", "a secret of the control plane")
    seen = box.run("env").stdout
    assert b"PATH=" in seen
    assert b"CANARY" not in seen
    assert b"SECRET_KEY" not in seen


def test_env_does_not_persist_between_execs(box):
    box.run("true", env={"ONCE": "1"})
    assert box.run("printenv", "ONCE").exit_code == 1


def test_mark_is_in_the_environment(box):
    assert box.run("printenv", "LEASEHOLD_RUN", mark="lhc-a-mark").stdout == b"lhc-a-mark\n"


def test_default_cwd_is_the_workspace(box):
    assert box.run("pwd").stdout.decode() == box.path("/workspace") + "\n"


def test_command_starts_in_cwd(bench, box):
    bench.provider.write_file(box.ref, "/data/deep er/file", b"found")
    result = box.run("cat", "file", cwd="/data/deep er")
    assert result.stdout == b"found"


def test_argument_may_be_a_sandbox_path(bench, box):
    bench.provider.write_file(box.ref, "/data/notes", b"found")
    assert box.run("cat", box.path("/data/notes")).stdout == b"found"


# --- exec: results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 3, 42, 255])
def test_exit_code_is_the_programs(box, code):
    assert box.run("sh", "-c", f"exit {code}").exit_code == code


def test_missing_program_is_a_result(box):
    result = box.run("lhc-no-such-program", "--help")
    assert (result.exit_code, result.timed_out, result.stdout) == (127, False, b"")


def test_missing_program_path_is_a_result(box):
    assert box.run("/no/such/program").exit_code == 127


def test_signal_is_reported_as_exit_code(box):
    result = box.run("sh", "-c", "kill -9 $$")
    assert (result.exit_code, result.timed_out, result.oom) == (137, False, False)


def test_exit_code_137_alone_is_not_oom(box):
    assert not box.run("sh", "-c", "exit 137").oom


def test_oom_kill_is_reported(limiting_bench):
    box = limiting_bench.box(memory_mib=64)
    result = box.run(*limiting_bench.hog())
    assert (result.exit_code, result.oom, result.timed_out) == (137, True, False)
    assert not box.run("sh", "-c", "kill -9 $$").oom  # not attributed to the next exec


def test_binary_output_is_returned_unchanged(box):
    result = box.run("printf", r"\377\000\200\012\303")
    assert result.stdout == b"\xff\x00\x80\n\xc3"


def test_stdout_and_stderr_are_separate(box):
    result = box.run("sh", "-c", "echo out; echo err >&2")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


def test_ten_megabytes_on_stdout_keep_the_first_cap_bytes(box):
    result = box.run("sh", "-c", f"echo first; head -c {10 * MIB} /dev/zero", cap=1000)
    assert result.stdout == b"first\n" + bytes(994)
    assert (result.stderr, result.truncated, result.exit_code) == (b"", True, 0)


def test_ten_megabytes_on_stderr_keep_the_first_cap_bytes(box):
    result = box.run("sh", "-c", f"echo first >&2; head -c {10 * MIB} /dev/zero >&2; echo done", cap=1000)
    assert result.stderr == b"first\n" + bytes(994)
    assert (result.stdout, result.truncated, result.exit_code) == (b"done\n", True, 0)


def test_output_of_exactly_the_cap_is_not_truncated(box):
    result = box.run("head", "-c", "1000", "/dev/zero", cap=1000)
    assert (len(result.stdout), result.truncated) == (1000, False)


def test_concurrent_execs_have_separate_results(box):
    def echo(number):
        return box.run("cat", stdin=f"{number}".encode() * 1000).stdout

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(echo, range(16))] == [f"{number}".encode() * 1000 for number in range(16)]


# --- exec: timeouts ----------------------------------------------------------------------------------------


def test_timeout_is_a_result(box):
    result = box.run("sleep", "300", seconds=1)
    assert (result.exit_code, result.timed_out, result.oom) == (137, True, False)
    assert timedelta(seconds=1) <= result.duration < READY_TIMEOUT


def test_output_before_the_timeout_is_returned(box):
    line = "echo begun; sleep 300; echo ended"
    result = run_with_growing_timeouts(lambda seconds: box.run("sh", "-c", line, seconds=seconds), lambda result: result.stdout)
    assert (result.stdout, result.timed_out) == (b"begun\n", True)


def test_sandbox_works_after_a_timeout(box):
    box.run("sleep", "300", seconds=1)
    assert box.run("echo", "fine").stdout == b"fine\n"


FAMILIES = {
    "a child": "sleep {nap} & wait",
    "a child of its own session": "setsid sleep {nap} & wait",
    "an orphan": "(setsid sh -c 'sleep {nap} & exit' &); sleep {nap}",
    "one that ignores signals": "trap '' TERM INT HUP; sleep {nap}",
    "one that cleared its environment": "env -i sleep {nap} & wait",
    "one that closed its outputs": "exec >&- 2>&-; sleep {nap}",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_timeout_kills_all_descendants(real_box, family):
    nap = unique_sleep_seconds()
    result = real_box.run("sh", "-c", FAMILIES[family].format(nap=nap), seconds=1)
    assert result.timed_out
    assert result.duration < READY_TIMEOUT
    assert real_box.asleep(nap) == []


def test_other_exec_survives_a_timeout(real_box):
    nap = unique_sleep_seconds()
    real_box.run("mkfifo", "ready", "go")
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(real_box.run, "sh", "-c", f"sleep {nap} & echo >ready; cat go; kill $!")
        real_box.run("cat", "ready")  # returns once the other exec has started
        assert real_box.run("sleep", "300", seconds=1).timed_out
        assert real_box.asleep(nap) != []
        real_box.run("sh", "-c", "echo still here >go")
        assert other.result().stdout == b"still here\n"


def test_kill_by_mark_affects_only_that_exec(real_box):
    nap, mark = unique_sleep_seconds(), unique_name()
    real_box.run("mkfifo", "ready")
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(real_box.run, "sh", "-c", f"setsid sleep {nap} & echo >ready; wait", mark=mark)
        real_box.run("cat", "ready")  # returns once it has started
        real_box.provider.kill(real_box.ref, unique_name())
        assert real_box.asleep(nap) != []
        real_box.provider.kill(real_box.ref, mark)
        assert real_box.asleep(nap) == []
        assert not other.result().timed_out


def test_kill_without_a_process_succeeds_and_without_a_sandbox_is_missing(bench, box):
    bench.provider.kill(box.ref, unique_name())
    with pytest.raises(Missing):
        bench.provider.kill(unique_name(), unique_name())


def test_remaining_descendant_does_not_delay_the_result(real_box):
    result = real_box.run("sh", "-c", "sleep 300 & echo done", seconds=250)
    assert (result.stdout, result.exit_code, result.timed_out) == (b"done\n", 0, False)
    assert result.duration < READY_TIMEOUT


def test_destroy_does_not_wait_for_running_commands(real_bench, real_box):
    real_box.run("mkfifo", "ready")
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(real_box.run, "sh", "-c", "echo >ready; sleep 300", seconds=250)
        real_box.run("cat", "ready")
        real_bench.provider.destroy(real_box.ref)
        assert running.exception(timeout=60) or running.result().exit_code != 0


# --- single files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/workspace/a", "/data/deep er/still/ü '$x'.bin", "/workspace/-rf", "/data/.hidden"])
def test_file_is_written_with_its_parents_and_read_back(bench, box, path):
    content = bytes(range(256)) * 5000
    bench.provider.write_file(box.ref, path, content)
    assert bench.provider.read_file(box.ref, path, limit=2 * MIB) == content
    assert box.run("cat", box.path(path), cap=2 * MIB).stdout == content


def test_write_replaces_the_file_and_leaves_no_temporary_file(bench, box, workspace):
    workspace.write("a/file", b"a long first version")
    workspace.write("a/file", b"second")
    assert workspace.read("a/file") == b"second"
    assert names(get(bench, box)) == {"a", "a/file"}


def test_empty_file_is_read_back(workspace):
    workspace.write("empty", b"")
    assert workspace.read("empty", limit=0) == b""


def test_commands_may_modify_written_files(box, workspace):
    workspace.write("mine", b"before")
    assert box.run("sh", "-c", "echo after >mine; echo new >other").exit_code == 0
    assert (workspace.read("mine"), workspace.read("other")) == (b"after\n", b"new\n")


def test_remove_affects_only_the_named_file(workspace):
    workspace.write("a", b"1")
    workspace.write("b", b"2")
    workspace.remove("a")
    with pytest.raises(NoSuchFile):
        workspace.read("a")
    assert workspace.read("b") == b"2"


def test_missing_file_is_an_error(workspace):
    for path in ("nothing", "no/such/directory/file"):
        with pytest.raises(NoSuchFile):
            workspace.read(path)
        with pytest.raises(NoSuchFile):
            workspace.remove(path)


OUTSIDE = [
    "", "/", "/workspace", "/workspace/", "/etc/passwd", "etc/passwd", "workspace/a", "/workspaces/a",
    "/workspace/../etc/passwd", "/workspace/a/../../data/b", "/workspace/./a", "/workspace//a", "/workspace/a/",
    "/workspace/a\0b", "/workspace/" + "a" * 300,
]  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_invalid_path_is_refused(bench, box, path):
    with pytest.raises(BadPath):
        bench.provider.read_file(box.ref, path, limit=10)
    with pytest.raises(BadPath):
        bench.provider.write_file(box.ref, path, b"")
    with pytest.raises(BadPath):
        bench.provider.remove_file(box.ref, path)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../../../../../etc/passwd", "beside", "nowhere"])
def test_symbolic_link_is_not_followed(box, workspace, target):
    workspace.write("beside", b"untouched")
    assert box.run("ln", "-s", target, "link").exit_code == 0
    for act in (workspace.read, workspace.remove, lambda path: workspace.write(path, b"evil")):
        with pytest.raises(BadPath):
            act("link")
    assert workspace.read("beside") == b"untouched"


@pytest.mark.parametrize("target", ["/etc", "../../../../../../etc", "beside", "."])
def test_symbolic_link_among_the_parents_is_not_followed(box, workspace, target):
    workspace.write("beside/passwd", b"untouched")
    assert box.run("ln", "-s", target, "link").exit_code == 0
    for act in (workspace.read, workspace.remove, lambda path: workspace.write(path, b"evil")):
        with pytest.raises(BadPath):
            act("link/passwd")
    assert workspace.read("beside/passwd") == b"untouched"


def test_directory_is_not_a_file(workspace):
    workspace.write("folder/file", b"")
    for act in (workspace.read, workspace.remove, lambda path: workspace.write(path, b"")):
        with pytest.raises(BadPath):
            act("folder")


def test_file_is_not_a_directory(workspace):
    workspace.write("file", b"")
    for act in (workspace.read, workspace.remove, lambda path: workspace.write(path, b"")):
        with pytest.raises(BadPath):
            act("file/below")


def test_read_limit_is_inclusive(workspace):
    workspace.write("file", b"0123456789")
    assert workspace.read("file", limit=10) == b"0123456789"
    with pytest.raises(TooLarge):
        workspace.read("file", limit=9)


# --- whole directories --------------------------------------------------------------------------------------------


def file(name, content=b"content", mode=0o644):
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    return member, io.BytesIO(content)


def other(name, kind, linkname="", mode=0o755):
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, linkname, mode
    return member, None


def pack(*members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for member, content in members:
            tar.addfile(member, content)
    packed.seek(0)
    return packed


def get(bench, box, root="/workspace"):
    """Return the tar of get_files as name -> (type, executable, content or target)."""
    read = {}
    with tarfile.open(fileobj=io.BytesIO(b"".join(bench.provider.get_files(box.ref, root))), mode="r:") as tar:
        for member in tar:
            content = tar.extractfile(member).read() if member.isreg() else member.linkname
            read[member.name.removeprefix("./")] = (member.type, bool(member.mode & 0o100), content)
    return read


def names(read):
    return {*read} - {"", ".", ".home"}


def test_directories_are_unpacked_and_packed_unchanged(bench, box):
    sent = [
        file("with space/ünïcode 漢字.txt", b"text"),
        file("run.sh", b"#!/bin/sh\n", mode=0o755),
        file("empty", b""),
        file("long/" + "n" * 200, b"1"),
        file("large", bytes(range(256)) * 20_000),
        other("folder", tarfile.DIRTYPE),
        other("to run", tarfile.SYMTYPE, "run.sh"),
        other("to python", tarfile.SYMTYPE, "/usr/bin/python3"),
    ]
    bench.provider.put_files(box.ref, "/workspace", pack(*sent))
    read = get(bench, box)
    for member, content in sent:
        expected = content.getvalue() if content else member.linkname
        assert read[member.name][0::2] == (member.type, expected)
        assert not member.isreg() or read[member.name][1] is bool(member.mode & 0o100)
    assert names(read) == {member.name for member, _ in sent} | {"with space", "long"}


def test_tar_of_one_sandbox_can_be_unpacked_in_another(bench, box):
    bench.provider.put_files(box.ref, "/data", pack(file("a/b", b"1"), other("l", tarfile.SYMTYPE, "a/b")))
    second = bench.box()
    bench.provider.put_files(second.ref, "/data", io.BytesIO(b"".join(bench.provider.get_files(box.ref, "/data"))))
    assert get(bench, second, "/data") == get(bench, box, "/data")


def test_unpack_replaces_its_members_and_leaves_other_files(bench, box, workspace):
    workspace.write("kept", b"kept")
    workspace.write("replaced", b"old")
    bench.provider.put_files(box.ref, "/workspace", pack(other(".", tarfile.DIRTYPE), file("./replaced", b"new")))
    assert (workspace.read("kept"), workspace.read("replaced")) == (b"kept", b"new")


def test_commands_may_modify_unpacked_files(bench, box, workspace):
    member, content = file("mine", b"before")
    member.uid = member.gid = 12345
    bench.provider.put_files(box.ref, "/workspace", pack((member, content)))
    assert box.run("sh", "-c", "echo after >mine").exit_code == 0
    assert workspace.read("mine") == b"after\n"


def test_empty_tar_changes_nothing(bench, box, workspace):
    workspace.write("kept", b"kept")
    bench.provider.put_files(box.ref, "/workspace", pack())
    assert names(get(bench, box)) == {"kept"}


def test_external_link_is_packed_as_a_link(bench, box):
    box.run("ln", "-s", "/etc", "link")
    assert get(bench, box)["link"][0::2] == (tarfile.SYMTYPE, "/etc")


TO_TMP, TO_PARENT = other("out", tarfile.SYMTYPE, "/tmp"), other("out", tarfile.SYMTYPE, "..")
HOSTILE = {
    "dots": lambda name: [file(f"../{name}")],
    "dots further down": lambda name: [file(f"a/../../{name}")],
    "an absolute name": lambda name: [file(f"/tmp/{name}")],
    "through a link": lambda name: [TO_TMP, file(f"out/{name}")],
    "through a link by dots": lambda name: [TO_PARENT, file(f"out/{name}")],
    "through a link to a link": lambda name: [TO_TMP, other("two", tarfile.SYMTYPE, "out"), file(f"two/{name}")],
    "a directory through a link": lambda name: [TO_TMP, other(f"out/{name}", tarfile.DIRTYPE)],
    "a directory over a link": lambda name: [TO_TMP, other("out", tarfile.DIRTYPE), file(f"out/{name}")],
    "a hard link out": lambda name: [other("x", tarfile.LNKTYPE, "../../../../../../../etc/passwd")],
    "an absolute hard link": lambda name: [other("x", tarfile.LNKTYPE, "/etc/passwd")],
    "a device": lambda name: [other("x", tarfile.CHRTYPE)],
    "a pipe": lambda name: [other("x", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_tar_with_outside_members_is_rejected(bench, box, kind):
    name = f"lhc-{uuid4().hex}"
    with pytest.raises(Rejected):
        bench.provider.put_files(box.ref, "/workspace", pack(*HOSTILE[kind](name)))
    for outside in (f"/tmp/{name}", f"{box.path('/workspace')}/../{name}", f"/{name}"):
        assert box.run("cat", outside).exit_code == 1
        assert box.run("ls", outside).exit_code != 0
    assert "x" not in get(bench, box)


def test_unpack_does_not_write_through_an_existing_link(bench, box):
    box.run("ln", "-s", "/tmp", "out")
    name = f"lhc-{uuid4().hex}"
    with pytest.raises(Rejected):
        bench.provider.put_files(box.ref, "/workspace", pack(file(f"out/{name}")))
    assert box.run("cat", f"/tmp/{name}").exit_code == 1


@pytest.mark.parametrize("sent", [b"this is no tar " * 1000, b""])
def test_invalid_tar_is_rejected(bench, box, sent):
    with pytest.raises(Rejected):
        bench.provider.put_files(box.ref, "/workspace", io.BytesIO(sent))


@pytest.mark.parametrize("root", ["/", "/etc", "/workspace/a", "/workspace/..", "workspace", ""])
def test_only_workspace_and_data_are_valid_roots(bench, box, root):
    with pytest.raises(BadPath):
        b"".join(bench.provider.get_files(box.ref, root))
    with pytest.raises(BadPath):
        bench.provider.put_files(box.ref, root, pack(file("a")))
    with pytest.raises(BadPath):
        bench.provider.size(box.ref, root)


def test_size_is_the_sum_of_regular_files(bench, box, workspace):
    assert bench.provider.size(box.ref, "/workspace") == 0
    workspace.write("a", b"x" * 1000)
    workspace.write("deep/er/b", b"x" * 234)
    box.run("ln", "-s", "/etc/passwd", "link")
    assert bench.provider.size(box.ref, "/workspace") == 1234


def test_roots_and_sandboxes_are_separate(bench, box, workspace):
    workspace.write("a", b"1")
    assert "a" not in get(bench, box, "/data")
    assert names(get(bench, bench.box())) == set()


# --- resource usage -----------------------------------------------------------------------------------------------------


def test_cpu_usage_grows_if_measured(box):
    before = box.provider.stats(box.ref)
    if not box.provider.measures_usage:
        assert before is None
        return
    burn(box, 0.5)
    after = box.provider.stats(box.ref)
    assert before and after and after.memory_bytes >= 0
    used = (after.cpu_micros - before.cpu_micros) / 10**6
    assert 0.45 <= used <= 5, "what the loop's own clock says, which ticks apart from the kernel's, and what starts it"


def test_stats_without_a_sandbox_raises_missing(bench):
    with pytest.raises(Missing):
        bench.provider.stats(unique_name())


def burn(box, seconds):
    """Use this much CPU time."""
    if isinstance(box.provider, MemoryProvider):  # simulated usage
        box.provider.use(box.ref, cpu_micros=int(seconds * 10**6))
        return
    loop = f"import time\nwhile time.process_time() < {seconds}: pass"
    assert box.run("python3", "-c", loop).exit_code == 0
