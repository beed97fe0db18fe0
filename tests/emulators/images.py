"""Image builds of the vendor emulators: the instructions of a Dockerfile, executed in a machine whose disk becomes the image.

FROM names an image that exists, with an empty disk, unless its name begins with MISSING_REGISTRY or names an earlier stage.
RUN is executed as root, and may write to the directories of a machine, of which /opt is one. Instructions without an effect on
files are accepted, others end the build."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.emulators.machine import Machine

MISSING_REGISTRY = "missing.example.org/"
WITHOUT_EFFECT = ("ARG", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "SHELL", "STOPSIGNAL", "USER")
CreateMachine = Callable[[str, Path | None], Machine]


class InvalidInstruction(Exception):
    """The build cannot be executed."""


@dataclass
class ImageBuild:
    """Build of an image in a thread. `error` is empty after a success, and `disk` is then the disk of the image."""

    id: str
    dockerfile: str
    disk: Path
    log: str = ""
    error: str = ""
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def size_bytes(self) -> int:
        return sum(path.lstat().st_size for path in self.disk.rglob("*"))

    def run(self, create_machine: CreateMachine) -> None:
        """Execute the Dockerfile."""
        try:
            self._execute(create_machine)
        except Exception as error:
            self.error = str(error)
            self.log += f"ERROR: {error}\n"
        finally:
            self.ended.set()

    def _execute(self, create_machine: CreateMachine) -> None:
        stages: dict[str, Path] = {}
        machine, environment, directory = None, dict[str, str](), ""
        try:
            for number, (instruction, argument) in enumerate(_iter_instructions(self.dockerfile), 1):
                self.log += f"Step {number}: {instruction} {argument}\n"
                if instruction == "FROM":
                    if machine:
                        machine.stop()
                    base, _, stage = argument.partition(" AS ")
                    if base.startswith(MISSING_REGISTRY):
                        raise InvalidInstruction(f"{base}: pull access denied")
                    machine = create_machine(f"{self.id}-{len(stages)}", stages.get(base))
                    stages[stage.strip() or f"stage {len(stages)}"] = machine.directory / "disk"
                elif machine is None:
                    raise InvalidInstruction("no build stage in current context")
                elif instruction == "RUN":
                    self._run(machine, argument, directory, environment)
                elif instruction == "ENV":
                    environment |= dict([argument.split("=", 1)])
                elif instruction == "WORKDIR":
                    directory = argument
                elif instruction not in WITHOUT_EFFECT:
                    raise InvalidInstruction(f"unknown instruction: {instruction}")
            assert machine is not None
            machine.stop()
            subprocess.run(["cp", "-a", str(machine.directory / "disk"), str(self.disk)], check=True)
        finally:
            if machine:
                machine.stop()
            for disk in stages.values():
                shutil.rmtree(disk.parent, ignore_errors=True)

    def _run(self, machine: Machine, argument: str, directory: str, environment: dict[str, str]) -> None:
        argv = json.loads(argument) if argument.startswith("[") else ["/bin/sh", "-c", argument]
        process = machine.popen(
            argv, cwd=directory or "/", env=environment, user=0, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            self.log += line.decode(errors="replace")
        if code := process.wait():
            raise subprocess.SubprocessError(f"command {argument[:80]} returned a non-zero code: {code}")


def _iter_instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    text = re.sub(r"(?m)^\s*#.*\n?", "", dockerfile)
    arguments = dict(re.findall(r"(?m)^ARG[ ]+(\w+)=(\S+)", text))
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.strip():
            instruction, _, argument = line.strip().partition(" ")
            if instruction.upper() == "FROM":
                argument = re.sub(r"\$\{(\w+)\}", lambda found: arguments.get(found[1], ""), argument)
            yield instruction.upper(), argument.strip()
