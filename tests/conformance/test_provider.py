"""Conformance of every provider to the port in sandboxes/providers/base.py."""

import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from sandboxes.providers.base import DATA, WORKSPACE, SandboxSpec
from sandboxes.providers.command_results import OutputView
from sandboxes.providers.errors import BadPath, Missing, NoSuchFile, Rejected, TooLarge, Unavailable
from sandboxes.providers.memory import MemoryProvider
from tests.conformance.conftest import ProviderBench, unique_name, unique_sleep_seconds
from tests.support.storage.tars import directory, file, link, other, pack
from tests.support.waiting import run_with_growing_timeouts, wait_until

MIB = 1 << 20
READY_TIMEOUT = timedelta(seconds=60)  # far below the 300 s that programs sleep in these tests


# --- create, list, destroy ----------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_created_sandbox_becomes_ready_and_runs_commands(exec_box):
    result = exec_box.run("echo", "hello")
    assert (result.stdout, result.stderr, result.exit_code) == (b"hello\n", b"", 0)
    assert (result.timed_out, result.oom, result.truncated) == (False, False, False)


@pytest.mark.smoke
def test_the_engine_keeps_one_identity(bench):
    identity = bench.provider.engine_id()
    assert 0 < len(identity) <= 200
    assert bench.provider.engine_id() == bench.provider.last_engine_id() == identity


@pytest.mark.smoke
def test_create_is_idempotent_and_keeps_files(bench):
    spec = bench.spec()
    ref = bench.provider.create(spec)
    bench.provider.wait_ready(ref, timeout=READY_TIMEOUT)
    bench.provider.write_file(ref, "/workspace/kept", b"kept")
    assert bench.provider.create(spec) == ref
    assert [found.name for found in bench.list()] == [spec.name]
    assert bench.provider.read_file(ref, "/workspace/kept", limit=10) == b"kept"


def test_concurrent_creates_return_the_same_sandbox(bench):
    spec = bench.spec()
    with ThreadPoolExecutor(4) as threads:
        refs = {*threads.map(bench.provider.create, [spec] * 4)}
    assert refs == {found.ref for found in bench.list()}
    assert len(refs) == 1


@pytest.mark.smoke
def test_name_of_another_owner_is_rejected(bench):
    exec_box = bench.box()
    with pytest.raises(Rejected):
        bench.provider.create(SandboxSpec(name=exec_box.name, owner=bench.owner + "-other", image=bench.spec().image))
    assert bench.list(bench.owner + "-other") == []
    assert exec_box.run("true").exit_code == 0


@pytest.mark.smoke
def test_sandbox_is_found_by_ref_and_by_name(exec_box):
    by_ref, by_name = exec_box.provider.inspect(exec_box.ref), exec_box.provider.inspect(exec_box.name)
    assert by_ref == by_name
    assert (by_ref.ref, by_ref.name, by_ref.running) == (exec_box.ref, exec_box.name, True)
    assert abs(datetime.now(UTC) - by_ref.created_at) < timedelta(hours=1)


def test_every_verb_accepts_the_name_as_ref(bench):
    exec_box = bench.box()
    exec_box.ref = exec_box.name
    bench.provider.wait_ready(exec_box.name, timeout=READY_TIMEOUT)
    exec_box.write("a", b"1")
    assert exec_box.run("cat", "a").stdout == b"1"
    bench.provider.destroy(exec_box.name)
    assert bench.list() == []


def list_all_of(bench, *owners):
    """List everything at the engine, without the sandboxes of other owners, and check the age of each."""
    found = [each for each in bench.provider.list_all() if each.owner in owners]
    assert all(abs(datetime.now(UTC) - each.created_at) < timedelta(minutes=5) for each in found)
    return {(each.ref, each.name, each.owner, each.running) for each in found}


@pytest.mark.smoke
def test_all_sandboxes_are_listed_with_their_owners(bench):
    if not bench.provider.can_list:
        with pytest.raises(Unavailable, match="cannot list"):
            bench.provider.list_all()
        return
    box, other = bench.box(), replace(bench, owner=unique_name(), names=[])
    spec = other.spec()
    try:
        bench.provider.wait_ready(bench.provider.create(spec), timeout=READY_TIMEOUT)
        listed = {(box.ref, box.name, bench.owner, True), (spec.name, spec.name, other.owner, True)}
        # A kubelet states that a Pod runs a moment after its agent has joined.
        wait_until(lambda: list_all_of(bench, bench.owner, other.owner) == listed, "both are listed as running")
        assert {each.owner for each in bench.list()} == {bench.owner}
    finally:
        other.clean()
    assert list_all_of(bench, bench.owner, other.owner) == {(box.ref, box.name, bench.owner, True)}


@pytest.mark.smoke
def test_list_and_destroy_affect_only_the_named_sandboxes(bench):
    first, second = bench.box(), bench.box()
    assert {found.ref for found in bench.list()} == {first.ref, second.ref}
    assert bench.list(bench.owner + "-other") == bench.list(bench.owner[:-1]) == []
    for ref in (first.ref, first.ref, f"lhc-never-{uuid4().hex}"):
        bench.provider.destroy(ref)
        assert [found.ref for found in bench.list()] == [second.ref]
    with pytest.raises(Missing):
        bench.provider.inspect(first.ref)
    assert second.run("echo", "still here").stdout == b"still here\n"


@pytest.mark.smoke
def test_restart_keeps_the_files_and_ends_all_processes(bench):
    box, mark = bench.box(), unique_name()
    box.write("kept", b"kept")
    box.provider.write_file(box.ref, f"{DATA}/kept", b"kept")
    box.provider.start(box.ref, ["sleep", "300"], env={}, mark=mark)
    assert box.provider.find_unresponsive([box.ref], timeout=timedelta(seconds=20)) == set()
    box.provider.restart(box.ref)
    box.provider.wait_ready(box.ref, timeout=READY_TIMEOUT)
    state = box.provider.processes(box.ref, [mark]).get(mark)
    assert state is None or not state.running
    assert (box.read("kept"), box.provider.read_file(box.ref, f"{DATA}/kept", limit=10)) == (b"kept", b"kept")
    assert box.run("true").exit_code == 0


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
    "restart": lambda p, ref: p.restart(ref),
    "exec": lambda p, ref: p.exec(ref, ["true"], env={}, timeout=READY_TIMEOUT, mark=uuid4().hex),
    "kill": lambda p, ref: p.kill(ref, unique_name()),
    "inspect": lambda p, ref: p.inspect(ref),
    "stats": lambda p, ref: p.stats(ref),
    "read_file": lambda p, ref: p.read_file(ref, "/workspace/a", limit=10),
    "write_file": lambda p, ref: p.write_file(ref, "/workspace/a", b""),
    "remove_file": lambda p, ref: p.remove_file(ref, "/workspace/a"),
    "put_files": lambda p, ref: p.put_files(ref, "/workspace", pack(file("a"))),
    "put_and_list_files": lambda p, ref: p.put_and_list_files(ref, DATA, pack(file("a"))),
    "size": lambda p, ref: p.size(ref, "/workspace"),
    "manifest": lambda p, ref: p.manifest(ref, DATA),
    "get_files": lambda p, ref: b"".join(p.get_files(ref, DATA)),
    "get_files by path": lambda p, ref: b"".join(p.get_files(ref, DATA, only=["a"])),
    "remove_files": lambda p, ref: p.remove_files(ref, DATA, ["a"]),
    "clear": lambda p, ref: p.clear(ref, DATA),
    "read_range": lambda p, ref: p.read_range(ref, f"{DATA}/a", start=0, length=1),
    "seed": lambda p, ref: p.seed(ref, "catan", pack(file("prompt.md", b"Play."))),
}


def test_verbs_raise_missing_without_a_sandbox(bench):
    def is_missing(verb, ref):
        try:
            VERBS[verb](bench.provider, ref)
        except Missing:
            return True

    exec_box = bench.box()
    exec_box.look()  # so that the provider has cached the sandbox
    bench.provider.destroy(exec_box.ref)
    for ref in (exec_box.ref, exec_box.name, "lhc-never-was"):
        assert [verb for verb in VERBS if not is_missing(verb, ref)] == []


@pytest.mark.parametrize("verb", ["manifest", "get_files", "remove_files", "clear", "read_range", "seed"])
def test_memory_provider_injects_failures_into_file_verbs(verb):
    memory, seen = MemoryProvider(), []
    exec_box = ProviderBench(memory).box()
    memory.write_file(exec_box.ref, f"{DATA}/a", b"")
    memory.before(verb, seen.append)
    VERBS[verb](memory, exec_box.ref)
    assert seen == [exec_box.ref]


# --- exec: input -------------------------------------------------------------------------------------------

WORDS = ["a b", "", "$HOME", "`id`", "it's", '"quoted"', "*", "back\\slash", "ünïcode 漢字", "two\nlines", "-n", "; exit"]


def test_arguments_are_passed_unchanged_without_a_shell(exec_box):
    result = exec_box.run("printf", r"%s\000", *WORDS)
    assert result.stdout == b"".join(word.encode() + b"\0" for word in WORDS)


@pytest.mark.smoke
def test_stdin_is_passed_unchanged_and_ends(exec_box):
    sent = bytes(range(256)) * (5 * MIB // 256)
    result = exec_box.run("cat", stdin=sent, cap=8 * MIB)
    assert (result.stdout == sent, result.truncated) == (True, False)
    assert exec_box.run("cat").stdout == b""


def test_large_input_that_is_unread_or_echoed_past_the_cap_does_not_block(exec_box):
    unread = exec_box.run("true", stdin=b"x" * 5 * MIB)
    assert (unread.exit_code, unread.timed_out) == (0, False)
    echoed = exec_box.run("cat", stdin=b"x" * 20 * MIB, cap=1000)
    assert (echoed.stdout, echoed.truncated, echoed.exit_code) == (b"x" * 1000, True, 0)


def test_command_that_stops_reading_to_write_does_not_block(real_exec_box):
    script = f"head -c 8192 >/dev/null; head -c {10 * MIB} /dev/zero; cat >/dev/null"
    result = real_exec_box.run("sh", "-c", script, stdin=b"x" * 5 * MIB, cap=1000)
    assert (result.exit_code, result.timed_out, result.truncated) == (0, False, True)


@pytest.mark.smoke
def test_env_and_mark_are_passed_to_this_exec_only(exec_box):
    given = {"GREETING": "hello world", "EMPTY": "", "ODD": "a=b 'c' \"d\" $e\nsecond line ü"}
    result = exec_box.run("printenv", *given, "LEASEHOLD_RUN", env=given, mark="lhc-a-mark")
    assert result.stdout.decode() == "".join(f"{value}\n" for value in (*given.values(), "lhc-a-mark"))
    assert exec_box.run("printenv", "GREETING").exit_code == 1


def test_control_planes_environment_is_not_inherited(exec_box, monkeypatch):
    monkeypatch.setenv("LEASEHOLD_CANARY", "a secret of the control plane")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:CANARY@proxy.invalid")
    seen = exec_box.run("env").stdout
    assert b"PATH=" in seen
    assert b"CANARY" not in seen
    assert b"SECRET_KEY" not in seen


def test_programs_installed_for_the_user_are_found_after_those_of_the_system(exec_box):
    directories = exec_box.run("printenv", "PATH").stdout.decode().strip().split(":")
    assert directories[-1] == exec_box.path("/workspace/.home/.local/bin")
    assert "/usr/bin" in directories[:-1]


def test_program_installed_for_the_user_runs_by_name(real_exec_box):
    script = "mkdir -p ~/.local/bin && printf '#!/bin/sh\\necho it runs\\n' > ~/.local/bin/tool && chmod +x ~/.local/bin/tool"
    assert real_exec_box.run("sh", "-c", script).exit_code == 0
    assert real_exec_box.run("tool").stdout == b"it runs\n"


def test_default_cwd_is_the_workspace(exec_box):
    assert exec_box.run("pwd").stdout.decode() == exec_box.path("/workspace") + "\n"


def test_cwd_and_arguments_may_be_sandbox_paths(exec_box):
    exec_box.provider.write_file(exec_box.ref, "/data/deep er/file", b"found")
    assert exec_box.run("cat", "file", cwd="/data/deep er").stdout == b"found"
    assert exec_box.run("cat", exec_box.path("/data/deep er/file")).stdout == b"found"


# --- exec: results -----------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_exit_code_is_the_programs(exec_box):
    codes = (0, 1, 3, 42, 255)
    assert tuple(exec_box.run("sh", "-c", f"exit {code}").exit_code for code in codes) == codes


def test_missing_program_is_a_result(exec_box):
    result = exec_box.run("lhc-no-such-program", "--help")
    assert (result.exit_code, result.timed_out, result.stdout) == (127, False, b"")
    assert exec_box.run("/no/such/program").exit_code == 127


def test_signal_is_reported_as_exit_code_and_is_not_oom(exec_box):
    result = exec_box.run("sh", "-c", "kill -9 $$")
    assert (result.exit_code, result.timed_out, result.oom) == (137, False, False)
    assert not exec_box.run("sh", "-c", "exit 137").oom


@pytest.mark.smoke
def test_oom_kill_is_reported(limiting_bench):
    exec_box = limiting_bench.box(memory_mib=64)
    result = exec_box.run(*limiting_bench.hog())
    assert (result.exit_code, result.oom, result.timed_out) == (137, True, False)
    assert not exec_box.run("sh", "-c", "kill -9 $$").oom  # not attributed to the next exec


def test_binary_output_is_returned_unchanged(exec_box):
    result = exec_box.run("printf", r"\377\000\200\012\303")
    assert result.stdout == b"\xff\x00\x80\n\xc3"


def test_stdout_and_stderr_are_separate(exec_box):
    result = exec_box.run("sh", "-c", "echo out; echo err >&2")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_ten_megabytes_keep_the_first_cap_bytes(exec_box, stream):
    to = "" if stream == "stdout" else " >&2"
    result = exec_box.run(
        "sh", "-c", f"echo first{to}; head -c {10 * MIB} /dev/zero{to}; echo done{' >&2' if not to else ''}", cap=1000
    )
    both = (b"first\n" + bytes(994), b"done\n")
    assert (result.stdout, result.stderr) == (both if stream == "stdout" else both[::-1])
    assert (result.truncated, result.exit_code) == (True, 0)


def test_output_of_exactly_the_cap_is_not_truncated(exec_box):
    result = exec_box.run("head", "-c", "1000", "/dev/zero", cap=1000)
    assert (len(result.stdout), result.truncated) == (1000, False)


def test_concurrent_execs_have_separate_results(exec_box):
    def echo(number):
        return exec_box.run("cat", stdin=f"{number}".encode() * 1000).stdout

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(echo, range(16))] == [f"{number}".encode() * 1000 for number in range(16)]


# --- exec: timeouts ----------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_timeout_is_a_result_after_which_the_sandbox_works(exec_box):
    result = exec_box.run("sleep", "300", seconds=1)
    assert (result.exit_code, result.timed_out, result.oom) == (137, True, False)
    assert timedelta(seconds=1) <= result.duration < READY_TIMEOUT
    assert exec_box.run("echo", "fine").stdout == b"fine\n"


def test_output_before_the_timeout_is_returned(exec_box):
    line = "echo begun; sleep 300; echo ended"
    result = run_with_growing_timeouts(
        lambda seconds: exec_box.run("sh", "-c", line, seconds=seconds), lambda result: result.stdout
    )
    assert (result.stdout, result.timed_out) == (b"begun\n", True)


FAMILIES = {
    "a child": "sleep {nap} & wait",
    "a child of its own session": "setsid sleep {nap} & wait",
    "an orphan": "(setsid sh -c 'sleep {nap} & exit' &); sleep {nap}",
    "one that ignores signals": "trap '' TERM INT HUP; sleep {nap}",
    "one that cleared its environment": "env -i sleep {nap} & wait",
    "one that closed its outputs": "exec >&- 2>&-; sleep {nap}",
}


def test_timeouts_kill_all_descendants(real_exec_box):
    naps = {family: unique_sleep_seconds() for family in FAMILIES}
    with ThreadPoolExecutor(len(FAMILIES)) as threads:
        results = threads.map(
            lambda family: real_exec_box.run("sh", "-c", FAMILIES[family].format(nap=naps[family]), seconds=1), naps
        )
    for (family, nap), result in zip(naps.items(), results, strict=True):
        assert result.timed_out, family
        assert result.duration < READY_TIMEOUT
        assert real_exec_box.asleep(nap) == [], family


def test_other_exec_survives_a_timeout(real_exec_box):
    nap = unique_sleep_seconds()
    real_exec_box.run("mkfifo", "ready", "go")
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(real_exec_box.run, "sh", "-c", f"sleep {nap} & echo >ready; cat go; kill $!")
        real_exec_box.run("cat", "ready")  # returns once the other exec has started
        assert real_exec_box.run("sleep", "300", seconds=1).timed_out
        assert real_exec_box.asleep(nap) != []
        real_exec_box.run("sh", "-c", "echo still here >go")
        assert other.result().stdout == b"still here\n"


@pytest.mark.smoke
def test_output_is_visible_while_the_command_runs(real_exec_box):
    mark, output = unique_name(), OutputView()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(real_exec_box.run, "sh", "-c", "echo begun; echo also >&2; sleep 60", mark=mark, output=output)
        wait_until(lambda: output.read() == (b"begun\n", b"also\n"), "the output is visible")
        assert not running.done()
        real_exec_box.provider.kill(real_exec_box.ref, mark)


@pytest.mark.smoke
def test_kill_by_mark_affects_only_that_exec(real_exec_box):
    nap, mark = unique_sleep_seconds(), unique_name()
    real_exec_box.run("mkfifo", "ready")
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(real_exec_box.run, "sh", "-c", f"setsid sleep {nap} & echo >ready; wait", mark=mark)
        real_exec_box.run("cat", "ready")  # returns once it has started
        real_exec_box.provider.kill(real_exec_box.ref, unique_name())
        assert real_exec_box.asleep(nap) != []
        real_exec_box.provider.kill(real_exec_box.ref, mark)
        assert real_exec_box.asleep(nap) == []
        assert not other.result().timed_out


def test_remaining_descendant_does_not_delay_the_result(real_exec_box):
    result = real_exec_box.run("sh", "-c", "sleep 300 & echo done", seconds=250)
    assert (result.stdout, result.exit_code, result.timed_out) == (b"done\n", 0, False)
    assert result.duration < READY_TIMEOUT


def test_destroy_does_not_wait_for_running_commands(real_bench):
    real_exec_box = real_bench.box()
    real_exec_box.run("mkfifo", "ready")
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(real_exec_box.run, "sh", "-c", "echo >ready; sleep 300", seconds=250)
        real_exec_box.run("cat", "ready")
        real_bench.provider.destroy(real_exec_box.ref)
        assert running.exception(timeout=60) or running.result().exit_code != 0


# --- single files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/workspace/a", "/data/deep er/still/ü '$x'.bin", "/workspace/-rf", "/data/.hidden"])
def test_file_is_written_with_its_parents_and_read_back(box, path):
    content = bytes(range(256)) * 5000
    box.provider.write_file(box.ref, path, content)
    assert box.provider.read_file(box.ref, path, limit=2 * MIB) == content
    assert box.run("cat", box.path(path), cap=2 * MIB).stdout == content


def test_write_replaces_the_file_and_leaves_no_temporary_file(box):
    for content in (b"a long first version", b"second", b""):
        box.write("a/file", content)
        assert box.read("a/file") == content
        assert box.names() == {"a", "a/file"}


def test_commands_may_modify_written_files(box):
    box.write("mine", b"before")
    assert box.run("sh", "-c", "echo after >mine; echo new >other").exit_code == 0
    assert (box.read("mine"), box.read("other")) == (b"after\n", b"new\n")


def test_remove_affects_only_the_named_file(box):
    box.write("a", b"1")
    box.write("b", b"2")
    box.remove_file("a")
    with pytest.raises(NoSuchFile):
        box.read("a")
    assert box.read("b") == b"2"


def test_missing_file_is_an_error(box):
    for path in ("nothing", "no/such/directory/file"):
        for act in (box.read, box.remove_file):
            with pytest.raises(NoSuchFile):
                act(path)


OUTSIDE = [
    "", "/", "/workspace", "/workspace/", "/etc/passwd", "etc/passwd", "workspace/a", "/workspaces/a",
    "/workspace/../etc/passwd", "/workspace/a/../../data/b", "/workspace/./a", "/workspace//a", "/workspace/a/",
    "/workspace/a\0b", "/workspace/\ud800", "/workspace/" + "a" * 300,
]  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_invalid_path_is_refused(box, path):
    with pytest.raises(BadPath):
        box.provider.read_file(box.ref, path, limit=10)
    with pytest.raises(BadPath):
        box.provider.write_file(box.ref, path, b"")
    with pytest.raises(BadPath):
        box.provider.remove_file(box.ref, path)


LINKS = [
    *(("link", target) for target in ("/etc/passwd", "../../../../../../etc/passwd", "beside/passwd", "nowhere")),
    *(("link/passwd", target) for target in ("/etc", "../../../../../../etc", "beside", ".")),
]


@pytest.mark.parametrize(("path", "target"), LINKS)
def test_symbolic_link_is_not_followed_as_a_file_or_among_its_parents(box, path, target):
    box.write("beside/passwd", b"untouched")
    box.put(link("link", target))
    for act in (box.read, box.remove_file, lambda path: box.write(path, b"evil")):
        with pytest.raises(BadPath):
            act(path)
    assert box.read("beside/passwd") == b"untouched"


def test_directory_is_not_a_file_and_file_not_a_directory(box):
    box.write("folder/file", b"")
    for path in ("folder", "folder/file/below"):
        for act in (box.read, box.remove_file, box.write):
            with pytest.raises(BadPath):
                act(path)


def test_read_limit_is_inclusive(box):
    box.write("file", b"0123456789")
    assert box.read("file", limit=10) == b"0123456789"
    with pytest.raises(TooLarge):
        box.read("file", limit=9)


# --- whole directories --------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_directories_are_unpacked_and_packed_unchanged(box):
    sent = [
        file("with space/ünïcode 漢字.txt", b"text"),
        file("run.sh", b"#!/bin/sh\n", mode=0o755),
        file("empty", b""),
        file("long/" + "n" * 200, b"1"),
        file("large", bytes(range(256)) * 20_000),
        directory("folder"),
        link("to run", "run.sh"),
        link("to python", "/usr/bin/python3"),
    ]
    box.put(*sent)
    received = box.get_members()
    for member, content in sent:
        found, found_content = received[member.name]
        assert (found.type, found_content) == (member.type, content.getvalue() if content else member.linkname or None)
        assert not member.isreg() or found.mode & 0o100 == member.mode & 0o100
    assert {*received} - {"", ".", ".home"} == {member.name for member, _ in sent} | {"with space", "long"}


def test_tar_of_one_sandbox_can_be_unpacked_in_another(bench):
    first, second = bench.box(), bench.box()
    first.put(file("a/b", b"1"), link("l", "a/b"))
    second.provider.put_files(second.ref, WORKSPACE, io.BytesIO(b"".join(first.provider.get_files(first.ref, WORKSPACE))))
    assert second.get() == first.get()
    assert second.get()["a/b"] == b"1"
    assert replace(second, root=DATA).names() == set()


def test_unpack_replaces_its_members_and_leaves_other_files(box):
    box.put(file("kept", b"kept"), file("replaced", b"old"))
    box.put()
    box.put(directory("."), file("./replaced", b"new"))
    assert (box.read("kept"), box.read("replaced")) == (b"kept", b"new")


def test_commands_may_modify_unpacked_files(box):
    member, content = file("mine", b"before")
    member.uid = member.gid = 12345
    box.put((member, content))
    assert box.run("sh", "-c", "echo after >mine").exit_code == 0
    assert box.read("mine") == b"after\n"


TO_TMP, TO_PARENT = link("out", "/tmp"), link("out", "..")
HOSTILE = {
    "dots": lambda name: [file(f"../{name}")],
    "dots further down": lambda name: [file(f"a/../../{name}")],
    "an absolute name": lambda name: [file(f"/tmp/{name}")],
    "through a link": lambda name: [TO_TMP, file(f"out/{name}")],
    "through a link by dots": lambda name: [TO_PARENT, file(f"out/{name}")],
    "through a link to a link": lambda name: [TO_TMP, link("two", "out"), file(f"two/{name}")],
    "a directory through a link": lambda name: [TO_TMP, directory(f"out/{name}")],
    "a directory over a link": lambda name: [TO_TMP, directory("out"), file(f"out/{name}")],
    "a hard link out": lambda name: [other("x", tarfile.LNKTYPE, "../../../../../../../etc/passwd")],
    "an absolute hard link": lambda name: [other("x", tarfile.LNKTYPE, "/etc/passwd")],
    "a device": lambda name: [other("x", tarfile.CHRTYPE)],
    "a pipe": lambda name: [other("x", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_tar_with_outside_members_is_rejected(box, kind):
    name = f"lhc-{uuid4().hex}"
    with pytest.raises(Rejected):
        box.put(*HOSTILE[kind](name))
    assert not exists_outside(box, name)
    assert "x" not in box.get()


def exists_outside(box, name):
    paths = [f"/tmp/{name}", f"{box.path('/workspace')}/../{name}", f"/{name}"]
    words = [f"'{path}'" for path in paths]
    return box.run("sh", "-c", "; ".join([*(f"cat {word}" for word in words), f"ls -d {' '.join(words)}"])).stdout != b""


def test_unpack_does_not_write_through_an_existing_link(box):
    box.run("ln", "-s", "/tmp", "out")
    name = f"lhc-{uuid4().hex}"
    with pytest.raises(Rejected):
        box.put(file(f"out/{name}"))
    assert not exists_outside(box, name)


def test_invalid_and_truncated_tars_are_rejected(box):
    for sent in (b"this is no tar " * 1000, b"", pack(file("a")).getvalue()[:515]):
        with pytest.raises(Rejected):
            box.provider.put_files(box.ref, "/workspace", io.BytesIO(sent))


@pytest.mark.parametrize("root", ["/", "/etc", "/workspace/a", "/workspace/..", "workspace", ""])
def test_only_workspace_and_data_are_valid_roots(box, root):
    for act in (
        lambda: b"".join(box.provider.get_files(box.ref, root)),
        lambda: box.provider.put_files(box.ref, root, pack(file("a"))),
        lambda: box.provider.size(box.ref, root),
        lambda: box.provider.manifest(box.ref, root),
    ):
        with pytest.raises(BadPath):
            act()


def test_size_is_the_sum_of_regular_files(box):
    assert box.provider.size(box.ref, "/workspace") == 0
    box.put(file("a", b"x" * 1000), file("deep/er/b", b"x" * 234), link("link", "/etc/passwd"))
    assert box.provider.size(box.ref, "/workspace") == 1234


# --- resource usage -----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
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


def burn(box, seconds):
    """Use this much CPU time."""
    if isinstance(box.provider, MemoryProvider):  # simulated usage
        box.provider.use(box.ref, cpu_micros=int(seconds * 10**6))
        return
    loop = f"import time\nwhile time.process_time() < {seconds}: pass"
    assert box.run("python3", "-c", loop).exit_code == 0
