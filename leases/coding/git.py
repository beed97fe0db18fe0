"""Git on the control plane's side: no configuration, hook, credential helper or program of its user or of a repository.

Every process has a deadline, and limits for its memory and for each file that it writes. Input from a sandbox is only read by
such processes."""

import base64
import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from leases.service_urls import LOOPBACK_HOSTS
from sandboxes.redaction.texts import quote_answer

GIT_TIMEOUT = timedelta(seconds=120)  # of one process
MAX_MEMORY_BYTES = 4 << 30  # address space of one process; git maps packs
MAX_OUTPUT_BYTES = 64 << 20
NO_REASON = "Could not read from remote repository"
PASSED_VARIABLES = (
    "PATH", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "GIT_SSL_CAINFO", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
BASE_CONFIG = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.bigFileThreshold": "8m",  # larger blobs are streamed, not held in memory
    "core.symlinks": "false",
    "credential.helper": "",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "fetch.recurseSubmodules": "false",
    "submodule.recurse": "false",
    "http.followRedirects": "false",
    "init.defaultBranch": "main",
    "pack.threads": "1",
    "protocol.allow": "never",
    "safe.directory": "*",
}
TOO_LARGE = re.compile(r"File too large|exceeds maximum allowed size")
NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"  # of a user or host: it never begins with "-", as an option does
SSH_URL = re.compile(rf"ssh://(?:{NAME}@)?(?:{NAME}|\[[0-9A-Fa-f:.]+\])(?::[0-9]+)?/[!-~]*|{NAME}@{NAME}:[!-,.-~][!-~]*")
UNSAFE_URL_CHARACTERS = re.compile(r"[\x00-\x20\x7f]")


class GitError(Exception):
    """A git process failed. The message is its last line, without credentials."""


class GitTimeout(GitError):
    """A git process exceeded its time."""


class GitTooLarge(GitError):
    """A git process exceeded the size of a file, of its output or of its memory."""


class InvalidCloneUrl(ValueError):
    """Not an https or ssh URL or an absolute path."""


def get_protocol(url: str) -> str:
    """Return the protocol of a clone URL: https, http (loopback only), ssh or file. Raise InvalidCloneUrl."""
    if url.startswith("/") and not re.search(r"[\x00-\x1f\x7f]", url):
        return "file"
    if UNSAFE_URL_CHARACTERS.search(url):
        raise InvalidCloneUrl("A clone URL has no spaces or control characters.")
    if SSH_URL.fullmatch(url):
        return "ssh"
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidCloneUrl("Not a URL.") from None
    if parts.username or parts.password:
        raise InvalidCloneUrl("A clone URL has no credentials.")
    if (
        parts.hostname
        and parts.hostname[0] != "-"
        and (parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK_HOSTS))
    ):
        return parts.scheme
    raise InvalidCloneUrl("Must be an https or ssh URL, or an absolute path.")


@dataclass
class Git:
    """Git in one repository directory, for at most one remote repository."""

    directory: Path
    home: Path
    secrets: tuple[str, ...] = field(default=(), repr=False)
    max_file_bytes: int = 1 << 30

    def run(
        self,
        *args: str,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: timedelta = GIT_TIMEOUT,
        accepted: tuple[int, ...] = (0,),
    ) -> bytes:
        """Return the output. Raise GitError, GitTimeout or GitTooLarge."""
        blocks = max(self.max_file_bytes, MAX_OUTPUT_BYTES) // 512
        limits = f"ulimit -c 0; ulimit -f {blocks}; ulimit -v {MAX_MEMORY_BYTES >> 10}"
        command = ["sh", "-c", f'{limits}; exec git "$@"', "git", *args]
        with tempfile.TemporaryFile(dir=self.home) as output, tempfile.TemporaryFile(dir=self.home) as errors:
            process = subprocess.Popen(
                command, cwd=self.directory, env=self._build_environment() | dict(env or {}), stdin=subprocess.PIPE,
                stdout=output, stderr=errors, start_new_session=True,
            )  # fmt: skip
            try:
                process.communicate(stdin, timeout=timeout.total_seconds())
            except subprocess.TimeoutExpired:
                raise GitTimeout(f"git {args[0]} took longer than {timeout.total_seconds():.0f} seconds.") from None
            finally:
                _kill_group(process)
            size = output.seek(0, os.SEEK_END)
            errors.seek(0)
            if process.returncode not in accepted:
                raise self._build_error(args[0], process.returncode, errors.read(1 << 16))
            if size > MAX_OUTPUT_BYTES:
                raise GitTooLarge(f"git {args[0]} printed more than {MAX_OUTPUT_BYTES >> 20} MiB.")
            output.seek(0)
            return output.read()

    def read(self, *args: str, timeout: timedelta = GIT_TIMEOUT) -> str:
        """Return the output as text without the final line break. Raise as run does."""
        return self.run(*args, timeout=timeout).decode(errors="replace").rstrip("\n")

    def _build_environment(self) -> dict[str, str]:
        passed = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        return passed | {
            "HOME": str(self.home),
            "LC_ALL": "C.UTF-8",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": str(self.home / "gitconfig"),
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "/bin/false",
            "SSH_ASKPASS": "/bin/false",
        }

    def _build_error(self, command: str, status: int, errors: bytes) -> GitError:
        text = errors.decode(errors="replace")
        if status in (-signal.SIGXFSZ, 128 + signal.SIGXFSZ) or TOO_LARGE.search(text):
            return GitTooLarge(f"git {command} wrote a file above {self.max_file_bytes >> 20} MiB.")
        if "out of memory" in text.lower() or "mmap failed" in text:
            return GitTooLarge(f"git {command} needs more than {MAX_MEMORY_BYTES >> 30} GiB of memory.")
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("hint:")]
        at = next((i for i, line in enumerate(lines) if line.startswith(("fatal:", "error:", "remote:"))), len(lines) - 1)
        if at > 0 and NO_REASON in lines[at]:
            at -= 1  # the line of ssh
        chosen = lines[at] if lines else ""
        return GitError(f"git {command}: {quote_answer(chosen, *self.secrets) if chosen else f'exit {status}'}")


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill git with the programs that it started, such as ssh."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def open_git(url: str = "", *, token: str = "", ssh_key_path: str = "", max_file_bytes: int = 1 << 30) -> Iterator[Git]:
    """Yield Git in a new bare repository, which is removed afterwards. It may reach `url` and nothing else.

    `token` authenticates https as a password, as GitHub, GitLab and Gitea accept access tokens. Raise InvalidCloneUrl."""
    config = dict(BASE_CONFIG)
    config["protocol.file.allow"] = "always"  # bundles of a sandbox, and repositories on this host
    secrets: tuple[str, ...] = ()
    protocol = get_protocol(url) if url else "file"
    config[f"protocol.{protocol}.allow"] = "always"
    if protocol == "ssh":
        settings = ["BatchMode=yes", "StrictHostKeyChecking=yes", "IdentitiesOnly=yes", "ConnectTimeout=20"]
        settings += [f"UserKnownHostsFile={Path.home() / '.ssh/known_hosts'}"]
        settings += [f"IdentityFile={ssh_key_path}"] if ssh_key_path else []
        config["core.sshCommand"] = shlex.join(["ssh", "-F/dev/null", *(f"-o{setting}" for setting in settings)])
    if token and protocol in ("https", "http"):
        basic = base64.b64encode(f"x-access-token:{token}".encode()).decode()
        config[f"http.{url}.extraHeader"] = f"Authorization: Basic {basic}"
        secrets = (token, basic)
    with tempfile.TemporaryDirectory(prefix="leasehold-git-") as folder:
        home, directory = Path(folder), Path(folder, "repository")
        directory.mkdir()
        (home / "gitconfig").touch(0o600)
        (home / "gitconfig").write_text("".join(_format_setting(name, value) for name, value in config.items()))
        git = Git(directory, home, secrets, max_file_bytes)
        git.run("init", "--quiet", "--bare", "--template=", ".")
        yield git


def _format_setting(name: str, value: str) -> str:
    section, _, key = name.rpartition(".")
    head, _, subsection = section.partition(".")
    title = f'{head} "{_escape(subsection)}"' if subsection else head
    return f'[{title}]\n\t{key} = "{_escape(value)}"\n'


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
