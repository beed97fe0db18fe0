"""Checks of an agent's commits, made with the system's git in a clone of a real repository."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from leases.coding import patches
from leases.coding.git import Git, GitTimeout, InvalidCloneUrl, get_protocol, open_git
from leases.coding.patches import Limits, SubmissionRefused
from tests.support.repositories import create_project, git, run_git, write_files

LIMITS = Limits(1 << 20)
KEY = "AKIA" + "IOSFODNN7EXAMPLE"


@dataclass
class Box:
    """Clone in which the agent works, and the repository of the control plane."""

    work: Path
    git: Git
    base: str

    def commit(self, message: str = "Change") -> None:
        git(self.work, "add", "-A", "-f")
        git(self.work, "commit", "--quiet", "--allow-empty", "--allow-empty-message", "-m", message)

    def submit(self) -> str:
        """Return the rebuilt commit. Raise SubmissionRefused."""
        head = git(self.work, "rev-parse", "HEAD")
        revisions = f"{head}\n^{self.base}\n".encode()
        pack = run_git(self.work, "pack-objects", "--quiet", "--revs", "--thin", "--stdout", stdin=revisions)
        patches.read_pack(self.git, pack, head, self.base, max_bytes=2 << 20)
        commits = patches.list_commits(self.git, self.base, head)
        patches.check_commits(self.git, self.base, commits, LIMITS)
        return patches.rebuild_commits(self.git, self.base, commits, author="did:plc:ada", email="agent@leasehold.invalid")


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    bare = create_project(tmp_path)
    git(tmp_path, "clone", "--quiet", str(bare), "work")
    with open_git(str(bare)) as own:
        own.run("fetch", "--quiet", "--depth=1", str(bare), "+refs/heads/main:refs/heads/main")
        yield Box(tmp_path / "work", own, own.read("rev-parse", "refs/heads/main"))


def test_commits_are_rebuilt_with_the_agent_as_author_and_nothing_else_of_their_headers(box: Box) -> None:
    write_files(box.work, {"calc.py": "def add(a, b):\n    return a + b\n"})
    box.commit("Fix add\n\nIt subtracted.")
    write_files(box.work, {"docs/new.md": "text\n"})
    box.commit("Describe\x1b[31m it")
    head = box.submit()
    assert head == box.submit()  # the same again
    log = box.git.read("log", "--format=%an <%ae> %cn|%B", f"{box.base}..{head}")
    assert "mallory" not in log.lower() and "\x1b" not in log
    assert log.count("did:plc:ada <agent@leasehold.invalid> did:plc:ada|") == 2
    assert "Fix add\n\nIt subtracted." in log
    assert box.git.read("show", f"{head}:docs/new.md") == "text"
    assert box.git.read("rev-list", "--count", f"{box.base}..{head}") == "2"


def write(path: str, text: str = "x\n") -> Callable[[Box], None]:
    return lambda box: write_files(box.work, {path: text})


def write_bytes(path: str, content: bytes) -> Callable[[Box], None]:
    return lambda box: (box.work / path).write_bytes(content) and None


def write_random(box: Box) -> None:
    (box.work / "random.bin").write_bytes(os.urandom(3 << 20))


def link(path: str, target: str) -> Callable[[Box], None]:
    def act(box: Box) -> None:
        (box.work / path).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(target, box.work / path)

    return act


def replace_directory(path: str, target: str) -> Callable[[Box], None]:
    def act(box: Box) -> None:
        shutil.rmtree(box.work / path)
        os.symlink(target, box.work / path)

    return act


def add_submodule(box: Box) -> None:
    git(box.work, "update-index", "--add", "--cacheinfo", f"160000,{box.base},lib")
    git(box.work, "commit", "--quiet", "-m", "Module")


def merge_branches(box: Box) -> None:
    git(box.work, "checkout", "--quiet", "-b", "other")
    write_files(box.work, {"other.txt": "x"})
    box.commit()
    git(box.work, "checkout", "--quiet", "main")
    write_files(box.work, {"main.txt": "x"})
    box.commit()
    git(box.work, "merge", "--quiet", "--no-edit", "other")


def add_and_remove_secret(box: Box) -> None:
    write_files(box.work, {"key.txt": f"{KEY}\n"})
    box.commit()
    (box.work / "key.txt").unlink()


def write_raw_tree(*entries: tuple[str, str]) -> Callable[[Box], None]:
    """Commit a tree that git itself would not make from files."""

    def act(box: Box) -> None:
        blob = bytes.fromhex(git(box.work, "hash-object", "-w", "--stdin", stdin=b"x"))
        content = b"".join(f"{mode} {name}".encode() + b"\0" + blob for mode, name in entries)
        tree = git(box.work, "hash-object", "-w", "-t", "tree", "--stdin", "--literally", stdin=content)
        git(box.work, "update-ref", "HEAD", git(box.work, "commit-tree", tree, "-p", "HEAD", "-m", "Raw"))

    return act


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (write(".github/workflows/x.yml"), "protected"),
        (write(".GitHub/workflows/x.yml"), "protected"),
        (link(".gitea", "ci"), "protected"),
        (replace_directory(".github", "ci"), "protected"),
        (link(".circleci", "ci"), "protected"),
        (link("sub/.devcontainer", "."), "protected"),
        (link("own", ".github"), "points to a protected path"),
        (link("docs/owners", "CODEOWNERS"), "points to a protected path"),
        (write("GITLAB~1.YML"), "on Windows"),
        (write("sub/JENKIN~1"), "on Windows"),
        (write(f"{KEY}.txt"), "A path contains a secret: AWS"),
        (write(f"docs/{KEY}/x.txt"), "A path contains a secret: AWS"),
        (link("out", f"docs/{KEY}"), "target of the symbolic link contains a secret"),
        (write_bytes("a.bin", b"\0\x01" + KEY.encode()), "contains a secret"),
        (write_bytes("a.bin", b"x" * 9000 + b"\0" + f"\n{KEY}\n".encode()), "contains a secret"),
        (write_bytes("a.txt", f"key = '{KEY}'\n".encode("utf-16")), "contains a secret"),
        (write_bytes("a.txt", f"key = '{KEY}'\n".encode("utf-16-be")), "contains a secret"),
        (write("a.min.js", "x " * 10_000 + KEY), "a.min.js:1: contains a secret"),
        (write("a.min.js", "x" * 19_990 + f" {KEY} " + "x" * 50_000), "a.min.js:1: contains a secret"),
        (write("a.min.js", "x " * 200_000 + KEY), "a.min.js:1: contains a secret"),
        (write(".gitmodules", '[submodule "x"]\n\tpath = x\n\turl = ./x\n'), "reserved by Git"),
        (write("a\nb"), "control character"),
        (write("big.bin", "x" * (1 << 20) + "y"), "exceed 1 MiB"),
        (write_random, "too large"),
        (write("settings.py", f"KEY = '{KEY}'\n"), "contains a secret: AWS Access Key"),
        (add_and_remove_secret, "contains a secret"),
        (link("a/out", "../../etc/passwd"), "points outside"),
        (link("out", "/etc/passwd"), "points outside"),
        (link("out", "a/b/up/../x"), "points outside"),
        (link("out", ".git/config"), "points outside"),
        (add_submodule, "submodules"),
        (merge_branches, "not linear"),
        (write_raw_tree(("100644", ".git")), "could not be read"),
        (write_raw_tree(("100644", "..")), "could not be read"),
        (write_raw_tree(("100644", "git~2")), "reserved by Git"),
        (write_raw_tree(("100644", "b"), ("100644", "b")), "could not be read"),
        (lambda box: None, "change no file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_commits_are_refused(box: Box, change: Callable[[Box], None], reason: str) -> None:
    change(box)
    box.commit()
    with pytest.raises(SubmissionRefused, match=reason):
        box.submit()


def test_a_refusal_does_not_repeat_the_secret_of_a_path(box: Box) -> None:
    write_files(box.work, {f"{KEY}.txt": "x"})
    link("out", f"docs/{KEY}")(box)
    box.commit()
    with pytest.raises(SubmissionRefused) as refused:
        box.submit()
    assert KEY not in str(refused.value)


def test_texts_of_the_pull_request_may_not_have_a_secret() -> None:
    patches.check_texts(title="Fix add", summary="It subtracted.")
    with pytest.raises(SubmissionRefused, match=r"The title .* The summary contains a secret: AWS Access Key"):
        patches.check_texts(title=f"Use {KEY}", summary=f"x\n{KEY}")


def test_a_file_to_which_a_protected_link_of_the_base_leads_is_protected(box: Box) -> None:
    """A tool that follows links reads it as the protected file."""
    link(".buildkite", "ci")(box)
    link("ci/hooks", "../tools/hooks")(box)
    link("docs/calc.py", "../calc.py")(box)
    write_files(box.work, {"tools/hooks/post": "x\n", "ci/pipeline.yml": "x\n"})
    box.commit("Base")
    git(box.work, "push", "--quiet", "origin", "HEAD:main")
    box.git.run("fetch", "--quiet", "--", git(box.work, "remote", "get-url", "origin"), "+refs/heads/main:refs/heads/main")
    box.base = box.git.read("rev-parse", "refs/heads/main")
    for path in ("ci/pipeline.yml", "ci/new/file", "CI/pipeline.yml", "tools/hooks/post"):
        git(box.work, "reset", "--quiet", "--hard", box.base)
        write_files(box.work, {path: "y\n"})
        box.commit()
        with pytest.raises(SubmissionRefused, match="protected"):
            box.submit()
    git(box.work, "reset", "--quiet", "--hard", box.base)
    write_files(box.work, {"calc.py": "y\n", "tools/other": "y\n", "cinema": "y\n"})
    box.commit()
    assert box.submit()


def test_a_secret_and_a_missing_text_in_messages_are_refused_together(box: Box) -> None:
    write_files(box.work, {"calc.py": "1\n"})
    box.commit(f"Use {KEY}")
    write_files(box.work, {"calc.py": "2\n"})
    box.commit("")
    with pytest.raises(SubmissionRefused) as refused:
        box.submit()
    assert [reason.split()[0] for reason in refused.value.refusals] == ["The", "Commit"]


def test_a_secret_that_the_file_had_and_links_that_stay_inside_are_accepted(box: Box) -> None:
    link("docs/calc.py", "../calc.py")(box)
    box.commit()
    assert box.submit()


def test_commits_on_another_base_are_refused(box: Box, tmp_path: Path) -> None:
    git(box.work, "checkout", "--quiet", "--orphan", "fresh")
    box.commit()
    with pytest.raises(SubmissionRefused, match="on top of"):
        box.submit()


def test_git_reads_no_configuration_of_a_user_and_runs_no_hook(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".gitconfig").write_text("[alias]\n\tlog = !touch aliased\n[core]\n\tpager = touch paged\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    hooks = box.git.directory / "hooks"
    hooks.mkdir()
    (hooks / "reference-transaction").write_text("#!/bin/sh\ntouch hooked\n")
    (hooks / "reference-transaction").chmod(0o755)
    box.git.run("update-ref", "refs/heads/other", box.base)
    assert box.git.read("log", "-1", "--format=%s", "other") == "Start"
    assert not [name for name in ("aliased", "paged", "hooked") if list(tmp_path.rglob(name))]


def test_a_process_that_exceeds_its_time_is_killed(box: Box) -> None:
    with pytest.raises(GitTimeout, match="longer than 0 seconds"):
        box.git.run("-c", "alias.wait=!sleep 60", "wait", timeout=timedelta(milliseconds=200))


@pytest.mark.parametrize(
    "url",
    [
        "file:///x", "http://example.org/x", "ext::sh -c id", "https://user:pass@example.org/x", "-x", "a@b:-x", "x/y", "",
        "-uid@h:x", "--upload-pack@h:x", "git@-oProxyCommand:x", "ssh://-oProxyCommand=x/y", "ssh://git@-oProxyCommand=x/y",
        "ssh://-l@h/x", "https://h/\nx", "https://h/ x", "https://h/\x7f", "https://-h/x", "https://h\t/x", "/srv/a\nb",
        "/srv/a\0", "git@h:x\ny", "git@h:x y", "ssh://git@h/x\n", "git@h\n:x",
    ],
)  # fmt: skip
def test_clone_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidCloneUrl):
        get_protocol(url)


@pytest.mark.parametrize(
    ("url", "protocol"),
    [
        ("https://example.org/a.git", "https"), ("http://127.0.0.1:3000/a", "http"), ("/srv/a.git", "file"),
        ("git@example.org:a/b.git", "ssh"), ("ssh://git@example.org/a", "ssh"), ("ssh://example.org:22/~a/b", "ssh"),
        ("git@example.org:~ada/b", "ssh"), ("git@example.org:/srv/b", "ssh"), ("ssh://git@[::1]:22/a", "ssh"),
    ],
)  # fmt: skip
def test_clone_urls_are_accepted(url: str, protocol: str) -> None:
    assert get_protocol(url) == protocol
