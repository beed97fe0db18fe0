"""Commits of an agent: read from a pack, checked, and made anew as commits of the control plane.

The objects of a pack are untrusted. Git checks their form (fsck) when it reads them. Every commit is then checked here,
since a push transfers all of them, and rebuilt from its tree and its message: headers, names and dates are the control
plane's own."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from leases.coding.git import Git, GitError, GitTooLarge
from leases.coding.protected_paths import ProtectedPaths, fold_name, resolve_link
from leases.coding.secret_scan import find_secrets

HEAD_REF = "refs/leasehold/head"
MAX_COMMITS = 100
MAX_FILES = 2000  # changed files, summed over the commits
MAX_MESSAGE_BYTES = 64 << 10
MAX_PATH_BYTES = 1000
MAX_REFUSALS = 20  # reported at once
CHECK_TIMEOUT = timedelta(seconds=60)
FILE, EXECUTABLE, SYMLINK, SUBMODULE, ABSENT = "100644", "100755", "120000", "160000", "000000"
COMMIT_ID = re.compile(r"[0-9a-f]{40}")
UNSAFE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\\]")
GIT_NAMES = re.compile(r"\.git(?:modules)?|git~\d+|gi7eba~\d+|gi7eb[0-9a-f]*~\d+", re.IGNORECASE)
SHORT_NAME = re.compile(r"[^.~]{1,6}~[0-9]{1,6}(?:\.[^.]{0,3})?")  # of a file with a longer name, on NTFS and FAT


@dataclass(frozen=True)
class Limits:
    """Limits of a submission."""

    max_bytes: int
    protected: ProtectedPaths = field(default_factory=ProtectedPaths)


@dataclass(frozen=True)
class Change:
    """Changed path of one commit. Modes and object ids as `git diff-tree --raw` has them."""

    path: str
    old_mode: str
    mode: str
    old_blob: str
    blob: str


class SubmissionRefused(Exception):
    """The commits are not accepted. `refusals` are sentences for the agent."""

    def __init__(self, *refusals: str) -> None:
        self.refusals = list(refusals)[:MAX_REFUSALS]
        super().__init__(" ".join(self.refusals))


def read_pack(git: Git, pack: bytes, head: str, base: str, *, max_bytes: int) -> None:
    """Add the objects of a thin pack to the repository, which has `base`. Raise SubmissionRefused, also if `head` is not on it.

    Git checks every object, in strict mode, which takes warnings for errors."""
    if not COMMIT_ID.fullmatch(head):
        raise SubmissionRefused("The last commit could not be read.")
    try:
        options = ["--strict", "--fix-thin", "--stdin", f"--max-input-size={max_bytes}", "--threads=1"]
        git.run("index-pack", *options, stdin=pack, timeout=CHECK_TIMEOUT)
        git.run("update-ref", HEAD_REF, head)
        git.run("merge-base", "--is-ancestor", base, head)
    except GitTooLarge:
        raise SubmissionRefused("The commits are too large.") from None
    except GitError as error:
        raise SubmissionRefused(f"The commits could not be read. They must be on top of {base[:12]} ({error}).") from None


def list_commits(git: Git, base: str, head: str) -> list[str]:
    """Return the commits after `base`, the oldest first. Raise SubmissionRefused."""
    lines = git.read("rev-list", "--reverse", "--topo-order", "--parents", f"--max-count={MAX_COMMITS + 1}", f"{base}..{head}")
    commits = [line.split() for line in lines.splitlines()]
    if not commits:
        raise SubmissionRefused("Nothing was committed.")
    if len(commits) > MAX_COMMITS:
        raise SubmissionRefused(f"More than {MAX_COMMITS} commits. Squash them.")
    expected = base
    for commit, *parents in commits:
        if parents != [expected]:
            raise SubmissionRefused(f"Commit {commit[:12]} makes the history not linear. Rebase onto {base[:12]}.")
        expected = commit
    return [commit for commit, *_ in commits]


def check_commits(git: Git, base: str, commits: Sequence[str], limits: Limits) -> None:
    """Raise SubmissionRefused with every reason that is found, at most MAX_REFUSALS."""
    refusals: list[str] = []
    limits = replace(limits, protected=replace(limits.protected, links=_read_links(git, base)))
    size, files, parent = 0, 0, base
    for commit in commits:
        refusals += _check_message(git, commit)
        changes = _list_changes(git, parent, commit)
        parent, files = commit, files + len(changes)
        if files > MAX_FILES:
            raise SubmissionRefused(*refusals, f"More than {MAX_FILES} files are changed.")
        sizes = _measure(git, [change.blob for change in changes if change.mode in (FILE, EXECUTABLE, SYMLINK)])
        size += sum(sizes.values())
        if size > limits.max_bytes:
            raise SubmissionRefused(*refusals, f"The changed files exceed {limits.max_bytes >> 20} MiB.")
        for change in changes:
            refusals += (f"{reason} (commit {commit[:12]})." for reason in _check_change(git, change, limits))
            if len(refusals) >= MAX_REFUSALS:
                raise SubmissionRefused(*refusals)
    if refusals:
        raise SubmissionRefused(*refusals)
    if git.read("rev-parse", f"{base}^{{tree}}") == git.read("rev-parse", f"{commits[-1]}^{{tree}}"):
        raise SubmissionRefused("The commits change no file.")


def rebuild_commits(git: Git, base: str, commits: Sequence[str], *, author: str, email: str) -> str:
    """Write commits with the same trees and messages, and return the last one. The same input has the same result."""
    identity = {
        f"GIT_{role}_{part}": value
        for role in ("AUTHOR", "COMMITTER")
        for part, value in (("NAME", _clean_identity(author)), ("EMAIL", _clean_identity(email)))
    }
    parent, not_before = base, _read_time(git, base)
    for commit in commits:
        not_before = max(not_before, _read_time(git, commit))
        date = f"{not_before} +0000"
        env = identity | {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        tree = git.read("rev-parse", f"{commit}^{{tree}}")
        message = _read_message(git, commit)
        parent = git.run("commit-tree", tree, "-p", parent, "-F", "-", stdin=message.encode(), env=env).decode().strip()
    return parent


def _clean_identity(text: str) -> str:
    return re.sub(r"[<>\x00-\x1f\x7f]", "", text).strip() or "agent"


def _read_time(git: Git, commit: str) -> int:
    text = git.read("log", "-1", "--no-show-signature", "--format=%ct", commit)
    return min(int(text), 2**31 - 1) if text.isdigit() else 0


def _read_message(git: Git, commit: str) -> str:
    text = git.read("log", "-1", "--no-show-signature", "--format=%B", commit)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text).strip() + "\n"


def _check_message(git: Git, commit: str) -> Iterator[str]:
    if int(git.read("cat-file", "-s", commit)) > MAX_MESSAGE_BYTES:
        raise SubmissionRefused(f"The message of commit {commit[:12]} is too long.")
    message = _read_message(git, commit)
    if not message.strip():
        yield f"Commit {commit[:12]} has no message."
    yield from (f"The message of commit {commit[:12]} contains a secret: {kind}." for _, kind in find_secrets(message))


def _list_changes(git: Git, parent: str, commit: str) -> list[Change]:
    try:
        raw = git.run("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", parent, commit, timeout=CHECK_TIMEOUT)
    except GitTooLarge:
        raise SubmissionRefused(f"Commit {commit[:12]} changes too many files.") from None
    fields = raw.split(b"\0")[:-1]
    if len(fields) > 2 * MAX_FILES:
        raise SubmissionRefused(f"Commit {commit[:12]} changes more than {MAX_FILES} files.")
    changes = []
    for head, path in zip(fields[::2], fields[1::2], strict=True):
        old_mode, mode, old_blob, blob, _ = head.decode().lstrip(":").split()
        changes.append(Change(path.decode(errors="surrogateescape"), old_mode, mode, old_blob, blob))
    return changes


def _measure(git: Git, blobs: Sequence[str]) -> dict[str, int]:
    """Return the sizes of blobs. A blob that the pack lacks is refused."""
    if not blobs:
        return {}
    names = "".join(f"{blob}\n" for blob in blobs).encode()
    lines = git.run("cat-file", "--batch-check=%(objectname) %(objecttype) %(objectsize)", stdin=names)
    sizes = {}
    for line in lines.decode().splitlines():
        name, kind, *size = line.split()
        if kind != "blob":
            raise SubmissionRefused(f"Object {name[:12]} is missing from the commits.")
        sizes[name] = int(size[0])
    return sizes


def _check_change(git: Git, change: Change, limits: Limits) -> Iterator[str]:
    path = change.path.encode(errors="backslashreplace").decode()
    if reason := _find_path_problem(change.path):
        yield f"{path[:200]!r}: {reason}"
        return
    if limits.protected.contains(change.path):
        yield f"{path}: this path is protected and must not be changed"
    if change.old_mode == ABSENT and (kind := next((kind for _, kind in find_secrets(change.path)), "")):
        yield f"A path contains a secret: {kind}"
        return
    if SUBMODULE in (change.mode, change.old_mode):
        yield f"{path}: submodules must not be changed"
    elif change.mode == SYMLINK:
        target = git.run("cat-file", "blob", change.blob).decode(errors="replace")
        if not _stays_inside(change.path, target):
            yield f"{path}: the symbolic link points outside of the repository"
        elif limits.protected.contains(resolve_link(change.path, target)):
            yield f"{path}: the symbolic link points to a protected path"
        yield from (f"{path}: the target of the symbolic link contains a secret: {kind}" for _, kind in find_secrets(target))
    elif change.mode in (FILE, EXECUTABLE):
        yield from (f"{path}:{line}: contains a secret: {kind}" for line, kind in _find_new_secrets(git, change))
    elif change.mode != ABSENT:
        yield f"{path}: mode {change.mode} is not supported"


def _find_path_problem(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        return "the path is not UTF-8"
    if len(path.encode()) > MAX_PATH_BYTES:
        return "the path is too long"
    if UNSAFE_CHARACTERS.search(path):
        return "the path has a control character or a backslash"
    for part in path.split("/"):
        if part in ("", ".", "..") or GIT_NAMES.fullmatch(fold_name(part)):
            return "the path is reserved by Git"
        if SHORT_NAME.fullmatch(fold_name(part)):
            return "on Windows the path can mean a file with another name"
    return ""


def _stays_inside(path: str, target: str) -> bool:
    """Return whether a link's target is below the root. `..` is only accepted at its beginning: other links may lead up."""
    if not target or target.startswith("/") or UNSAFE_CHARACTERS.search(target):
        return False
    parts = target.split("/")
    rest = parts
    while rest and rest[0] in ("..", "."):
        rest = rest[1:]
    normal = resolve_link(path, target)
    inside = normal != ".." and not normal.startswith("../")
    return inside and ".." not in rest and not any(GIT_NAMES.fullmatch(part) for part in parts)


def _find_new_secrets(git: Git, change: Change) -> list[tuple[int, str]]:
    """Return the first lines with a secret that the file did not have, of a binary file as well."""
    content = git.run("cat-file", "blob", change.blob)
    known = git.run("cat-file", "blob", change.old_blob) if change.old_mode in (FILE, EXECUTABLE) else b""
    found = list(find_secrets(content.decode(errors="replace"), known=known.decode(errors="replace")))
    if not found and b"\0" in content:  # UTF-16 has one in each character
        content, known = content.replace(b"\0", b""), known.replace(b"\0", b"")
        found = list(find_secrets(content.decode(errors="replace"), known=known.decode(errors="replace")))
    return found[:5]


def check_texts(**texts: str) -> None:
    """Raise SubmissionRefused for a text of the pull request that has a secret."""
    refusals = [f"The {name} contains a secret: {kind}." for name, text in texts.items() for _, kind in find_secrets(text)]
    if refusals:
        raise SubmissionRefused(*refusals)


def _read_links(git: Git, base: str) -> dict[str, str]:
    """Return the symbolic links of the base: path -> target."""
    blobs: dict[str, str] = {}
    for entry in git.run("ls-tree", "-r", "-z", base, timeout=CHECK_TIMEOUT).split(b"\0")[:-1]:
        head, _, path = entry.partition(b"\t")
        mode, _, blob = head.decode().split()
        if mode == SYMLINK:
            blobs[path.decode(errors="surrogateescape")] = blob
    content = git.run("cat-file", "--batch", stdin="".join(f"{blob}\n" for blob in blobs.values()).encode())
    links: dict[str, str] = {}
    for link in blobs:
        line, _, content = content.partition(b"\n")
        size = int(line.split()[2])
        links[link], content = content[:size].decode(errors="replace"), content[size + 1 :]
    return links
