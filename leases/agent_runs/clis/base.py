"""Interface of agent CLIs: the command line of a prompt, and the meaning of the messages that the CLI prints.

A CLI reads the prompt from stdin and prints one JSON object a line on stdout. A new one is a module with a subclass of AgentCli
and an entry in clis.registry."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from leases.agent_runs.policy import AgentPolicy, ToolCall
from leases.errors import InvalidRequest

PERMISSION_MODES = ("default", "acceptEdits", "plan", "bypassPermissions")
# Executes the first command line if the session's file exists, else the second: one Run for both.
RESUME_SCRIPT = """\
import os, pathlib, sys
directory, pattern, count, *words = sys.argv[1:]
found = next(pathlib.Path(os.path.expanduser(directory)).rglob(pattern), None)
argv = words[:int(count)] if found else words[int(count):]
os.execvp(argv[0], argv)
"""


@dataclass(frozen=True)
class AgentOptions:
    """Options of an agent run. Empty values and None: the default of the CLI."""

    prompt: str
    model: str = ""
    permission_mode: str = "default"
    system_prompt: str = ""  # appended to that of the CLI
    session_id: str = ""  # session of the CLI to resume
    argv: tuple[str, ...] = ()  # of a program that is no known CLI
    policy: AgentPolicy = field(default_factory=AgentPolicy)


@dataclass(frozen=True)
class AgentResult:
    """Result that the CLI reports at its end. `text` None: the last text of the agent."""

    text: str | None = None
    is_error: bool = False
    cost: Decimal | None = None  # USD


@dataclass(frozen=True)
class Message:
    """Meaning of one printed JSON object."""

    role: str  # in the chat history: system, assistant, tool, result
    text: str = ""  # of the agent
    session_id: str = ""
    turn_id: str = ""  # answer of the model to which the message belongs
    tool_calls: tuple[ToolCall, ...] = ()
    result: AgentResult | None = None


@dataclass(frozen=True)
class SessionFile:
    """Place where a CLI stores a session: a pattern of file names below a directory."""

    directory: str
    pattern: str


class AgentCli(ABC):
    """An agent CLI. Instances have no state."""

    name: str
    npm_package = ""  # with its version, for `manage.py build_image --npm`
    default_model = ""
    unsupported_options: frozenset[str] = frozenset()
    permission_modes: Sequence[str] = PERMISSION_MODES

    @abstractmethod
    def build_argv(self, options: AgentOptions, *, session_id: str = "") -> list[str]:
        """Return the command line, which resumes a session if `session_id` is given."""

    @abstractmethod
    def interpret(self, document: Mapping[str, Any]) -> Message:
        """Return the meaning of a message. Unknown messages, also hostile ones, have none: an error would end the recording."""

    def build_env(self) -> Mapping[str, str]:
        return {}

    def find_session(self, session_id: str) -> SessionFile | None:
        """Return the place of a session's state, or None if the CLI has no sessions."""
        return None

    def check(self, options: AgentOptions) -> None:
        """Raise InvalidRequest for an option that the CLI does not have."""
        for name in sorted(self.unsupported_options):
            if getattr(options, name):
                raise InvalidRequest(name, f"The agent CLI {self.name} does not support this option.")
        if options.permission_mode not in self.permission_modes:
            modes = ", ".join(self.permission_modes)
            raise InvalidRequest("permission_mode", f"The agent CLI {self.name} supports only: {modes}.")

    def build_command(self, options: AgentOptions) -> list[str]:
        """Return the command line of a Run. A session whose state is gone is not resumed: the prompt begins a new one."""
        place = self.find_session(options.session_id) if options.session_id else None
        fresh = self.build_argv(options)
        if place is None:
            return fresh
        resumed = self.build_argv(options, session_id=options.session_id)
        launcher = ["python3", "-I", "-c", RESUME_SCRIPT, place.directory, place.pattern, str(len(resumed))]
        return [*launcher, *resumed, *fresh]


def get_text(value: Any, name: str) -> str:
    """Return a string of an untrusted JSON object, or ""."""
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, str) else ""


def get_objects(value: Any, name: str) -> Sequence[Mapping[str, Any]]:
    """Return the objects in a list of an untrusted JSON object."""
    found = value.get(name) if isinstance(value, Mapping) else None
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []


def get_cost(value: Mapping[str, Any], name: str) -> Decimal | None:
    """Return an amount in USD of an untrusted JSON object; None if it is absent, negative or not plausible."""
    try:
        cost = Decimal(str(value.get(name)))
    except InvalidOperation:
        return None
    return cost.quantize(Decimal("1e-9")) if cost.is_finite() and 0 <= cost < 10**6 else None
