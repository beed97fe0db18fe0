"""Specification of an image: validation, content hash, and the Dockerfile."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sandboxes.errors import InvalidTemplate

NAME_PATTERN = r"[a-z0-9][a-z0-9-]{0,62}"
MAX_COMMANDS = 64
MAX_COMMAND_CHARS = 8000
MAX_DOCKERFILE_CHARS = 64_000
BASE_ARGUMENT = "BASE_IMAGE"  # build argument of a Dockerfile: the sandbox image of this installation
# An image reference: registry host with port, path, tag, digest. Without whitespace, so that a line break adds no instruction.
BASE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")


@dataclass(frozen=True)
class TemplateSpecification:
    """Content of an image: commands on a base, or a Dockerfile. Raise InvalidTemplate from `validate`."""

    base: str = ""
    commands: Sequence[str] = ()
    dockerfile: str = ""

    def validate(self) -> None:
        """Raise InvalidTemplate, which names the field, unless the specification is complete and within the limits."""
        if self.dockerfile:
            self._validate_dockerfile()
            return
        if not BASE_PATTERN.fullmatch(self.base):
            raise InvalidTemplate("base", "Not the name of an image.")
        if not self.commands:
            raise InvalidTemplate("commands", "State at least one command, or a Dockerfile.")
        if len(self.commands) > MAX_COMMANDS:
            raise InvalidTemplate("commands", f"At most {MAX_COMMANDS} commands.")
        for command in self.commands:
            if not command.strip() or len(command) > MAX_COMMAND_CHARS or "\0" in command:
                raise InvalidTemplate("commands", f"Each command is text of 1 to {MAX_COMMAND_CHARS} characters.")

    def _validate_dockerfile(self) -> None:
        if self.base or self.commands:
            raise InvalidTemplate("dockerfile", "Excludes base and commands.")
        if len(self.dockerfile) > MAX_DOCKERFILE_CHARS or "\0" in self.dockerfile:
            raise InvalidTemplate("dockerfile", f"At most {MAX_DOCKERFILE_CHARS} characters, without NUL.")
        if not re.search(r"(?im)^\s*FROM\s+\S", self.dockerfile):
            raise InvalidTemplate("dockerfile", "Has no FROM instruction.")

    def compute_version(self) -> str:
        """Return the SHA-256 of the content, in hexadecimal digits. Equal specifications have equal versions."""
        content = {"base": self.base, "commands": [*self.commands], "dockerfile": self.dockerfile}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def render_dockerfile(self, user: str) -> str:
        """Return the Dockerfile of the image. `user` is the user of its sandboxes; empty: that of the base, also for commands.

        Otherwise commands run as root with a home directory of their own: the agent's is in the initial content of /workspace,
        and files of root there could not be changed by the agent."""
        if self.dockerfile:
            return self.dockerfile
        home = "export HOME=/root; " if user else ""
        runs = [f"RUN {json.dumps(['/bin/sh', '-c', home + command])}" for command in self.commands]
        lines = [f"FROM {self.base}", *(["USER root", *runs, f"USER {user}"] if user else runs)]
        return "\n".join([*lines, ""])


def validate_name(name: str) -> None:
    """Raise InvalidTemplate for a malformed name."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise InvalidTemplate("name", "Lower-case letters, digits and hyphens, at most 63, beginning with a letter or digit.")
