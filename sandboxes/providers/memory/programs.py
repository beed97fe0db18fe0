"""Simulated programs of memory sandboxes."""

import itertools
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from sandboxes.providers.memory.file_tree import File, Files, Link, put_entry


@dataclass(frozen=True)
class ProgramCall:
    """Arguments and environment of a program. It may modify `files`. A program that takes `timeout` or longer is killed."""

    argv: list[str]
    stdin: bytes
    env: Mapping[str, str]
    cwd: str
    files: Files
    timeout: timedelta

    def path(self, name: str) -> str:
        """Resolve a path relative to the working directory."""
        return name if name.startswith("/") else f"{self.cwd.rstrip('/')}/{name}"


@dataclass(frozen=True)
class ProgramResult:
    """Output of a program, and its simulated duration."""

    exit_code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    took: timedelta = timedelta(0)
    oom: bool = False


Program = Callable[[ProgramCall], ProgramResult]


def _print_lines(*lines: str) -> ProgramResult:
    return ProgramResult(stdout=b"".join(os.fsencode(line) + b"\n" for line in lines))


def _cat(call: ProgramCall) -> ProgramResult:
    content = b""
    for name in call.argv[1:]:
        entry = call.files.get(call.path(name))
        if not isinstance(entry, File):
            return ProgramResult(1, content, f"cat: {name}: No such file or directory\n".encode())
        content += entry.content
    return ProgramResult(stdout=content if call.argv[1:] else call.stdin)


def _printenv(call: ProgramCall) -> ProgramResult:
    if not call.argv[1:]:
        return _print_lines(*(f"{name}={value}" for name, value in call.env.items()))
    values = [call.env[name] for name in call.argv[1:] if name in call.env]
    return replace(_print_lines(*values), exit_code=int(len(values) < len(call.argv[1:])))


def _printf(call: ProgramCall) -> ProgramResult:
    """printf with octal escapes, \\n, \\t, \\r, and %s. The format is repeated for every argument."""
    letters = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"\\": b"\\"}
    template = re.sub(
        rb"\\([0-7]{1,3}|[ntr\\])",
        lambda match: letters.get(match[1]) or bytes([int(match[1], 8) & 255]),
        os.fsencode(call.argv[1]),
    )
    words = [os.fsencode(word) for word in call.argv[2:]] or [b""]
    return ProgramResult(stdout=b"".join(template.replace(b"%s", word) for word in words))


def _head(call: ProgramCall) -> ProgramResult:
    if call.argv[1] != "-c" or call.argv[3:] != ["/dev/zero"]:
        return ProgramResult(2, stderr=b"head: only -c N /dev/zero is supported\n")
    return ProgramResult(stdout=bytes(int(call.argv[2])))


def _link(call: ProgramCall) -> ProgramResult:
    if call.argv[1] != "-s" or len(call.argv) != 4:
        return ProgramResult(2, stderr=b"ln: only -s TARGET PATH is supported\n")
    put_entry(call.files, call.path(call.argv[3]), Link(call.argv[2]))
    return ProgramResult()


def run_program(programs: Mapping[str, Program], call: ProgramCall) -> ProgramResult:
    """Run the program named by argv[0]. A missing program has exit code 127."""
    program = programs.get(call.argv[0].removeprefix("/bin/"))
    return program(call) if program else ProgramResult(127, stderr=f"{call.argv[0]}: not found\n".encode())


def run_shell(programs: Mapping[str, Program], call: ProgramCall) -> ProgramResult:
    """Run `sh -c` with commands separated by `;`, each with at most one `>file` or `>&2`.

    Supports programs, `exit N` and `kill -9 $$`. No variables, no pipes."""
    words = shlex.shlex(call.argv[2], posix=True, punctuation_chars=";>&")
    words.whitespace_split = True
    total = ProgramResult()
    for command in [[*group] for is_separator, group in itertools.groupby(words, ";".__eq__) if not is_separator]:
        if command[0] == "exit":
            return replace(total, exit_code=int(command[1]))
        if command == ["kill", "-9", "$$"]:
            return replace(total, exit_code=137)
        argv = [*itertools.takewhile(lambda word: word not in (">", ">&"), command)]
        result = run_program(programs, replace(call, argv=argv, timeout=call.timeout - total.took))
        if ">" in command:
            put_entry(call.files, call.path(command[-1]), File(result.stdout))
        stdout = result.stdout if len(argv) == len(command) else b""
        stderr = result.stderr + (result.stdout if ">&" in command else b"")
        took, oom = total.took + result.took, total.oom or result.oom
        total = ProgramResult(result.exit_code, total.stdout + stdout, total.stderr + stderr, took, oom)
        if took >= call.timeout:
            break
    return total


PROGRAMS: dict[str, Program] = {
    "true": lambda call: ProgramResult(),
    "false": lambda call: ProgramResult(1),
    "echo": lambda call: _print_lines(" ".join(call.argv[1:])),
    "pwd": lambda call: _print_lines(call.cwd),
    "env": _printenv,
    "printenv": _printenv,
    "printf": _printf,
    "cat": _cat,
    "head": _head,
    "ln": _link,
    "sleep": lambda call: ProgramResult(took=timedelta(seconds=min(float(call.argv[1]), 1e9))),
    "oom": lambda call: ProgramResult(137, oom=True),
}
