"""Known agent CLIs."""

from leases.agent_runs.clis.base import AgentCli
from leases.agent_runs.clis.claude_code import ClaudeCode
from leases.agent_runs.clis.codex import Codex
from leases.agent_runs.clis.program import Program

CLIS: dict[str, AgentCli] = {cli.name: cli for cli in (ClaudeCode(), Codex(), Program())}
