"""Commands by the agent in a sandbox, for every engine whose sandboxes have the agent as process 1."""

import time
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

from sandboxes.agent.runs import AgentClient, AgentResult, AgentRun, NotStarted, OutcomeUnknown
from sandboxes.providers.agent import runs
from sandboxes.providers.agent.output_reader import AgentOutputReader
from sandboxes.providers.base import DATA, MARK_VARIABLE, Provider
from sandboxes.providers.command_results import ExecResult, ExecState, OutputReader, OutputView
from sandboxes.providers.errors import ProviderError, Stopped, Unavailable


class OomWatch:
    """Out-of-memory kills during one command, as far as the engine reports them. This one reports none.

    The agent in a Pod reports them itself."""

    def was_killed(self, exit_code: int) -> bool:
        """Return whether the kernel has killed a process of the sandbox for lack of memory since the watch began."""
        return False


class AgentCommandProvider(Provider):
    """Command verbs by the agent, on top of a look-up of the agent and four questions to the engine."""

    @abstractmethod
    def _find_agent(self, ref: str) -> AgentClient | None:
        """Return a client for the agent of a sandbox; None if the agent cannot be reached at all. Raise Missing."""

    @abstractmethod
    def _require_running(self, ref: str, since: float) -> None:
        """Raise NotStarted if the sandbox ended before `since` (monotonic clock) and does not run, Stopped if it stopped
        since then, Missing if it is gone. Resume it if it is frozen."""

    @abstractmethod
    def _has_stopped(self, ref: str, since: float) -> bool:
        """Return whether the sandbox has stopped or restarted after `since` (monotonic clock). Raise Missing."""

    @abstractmethod
    def _kill_from_outside(self, ref: str, mark: str) -> None:
        """Kill the processes of an exec whose agent does not respond, or else all processes of the sandbox."""

    @abstractmethod
    def _note_fallback(self, ref: str, error: NotStarted, mark: str = "") -> None:
        """Record that the agent has not started an operation. `mark` identifies the exec of a run."""

    def _watch_oom(self, ref: str, since: float) -> OomWatch:
        return OomWatch()

    def _build_run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stdin: bytes,
        timeout: timedelta,
        cap: int,
        mark: str,
        *,
        retain: bool,
        digest_data: bool,
    ) -> AgentRun:
        # The same mark may be used again for a command of the control plane, but an agent starts a run only once.
        run_id = mark if retain else f"{mark}/{uuid.uuid4().hex}"
        environment, digested = {**env, MARK_VARIABLE: mark}, DATA if digest_data else ""
        return AgentRun(run_id, argv, environment, cwd, timeout.total_seconds(), stdin, cap, digested)

    def _exec_by_agent(self, ref: str, run: AgentRun, output: OutputView, *, retain: bool) -> ExecResult | None:
        """Run a command by the agent in the sandbox. Return None if the agent has not started it.

        Raise Stopped if the sandbox stopped meanwhile, Missing if it is gone, and Unavailable if the outcome is unknown."""
        started = since = time.monotonic()
        agent = self._find_agent(ref)
        if agent is None:
            return None
        oom = self._watch_oom(ref, since)

        def begin() -> None:  # a restart before the request is sent, as by a concurrent call, does not concern the command
            nonlocal since
            since = time.monotonic()

        output.attach(*(runs.AgentOutput(agent, run.id, stream) for stream in runs.STREAMS))
        try:
            result = agent.run(run, check=lambda: self._require_running(ref, since), on_connect=begin)
        except NotStarted as error:
            self._note_fallback(ref, error, run.env[MARK_VARIABLE])
            output.attach(b"", b"")
            return None
        except OutcomeUnknown as error:
            if self._has_stopped(ref, since):
                raise Stopped(f"{ref} stopped while the command ran.") from error
            self._kill_from_outside(ref, run.env[MARK_VARIABLE])
            if time.monotonic() < started + run.timeout:
                raise Unavailable(f"The outcome of a command in {ref} is unknown: {error}") from error
            result = AgentResult(137, *output.read(), timed_out=True, dropped=(0, 0))
        if not retain:
            runs.acknowledge(agent, run.id)
        return ExecResult(
            exit_code=result.exit_code,
            stdout=result.stdout[: run.cap],
            stderr=result.stderr[: run.cap],
            timed_out=result.timed_out,
            oom=result.oom or oom.was_killed(result.exit_code),
            truncated=any(result.dropped),
            duration=timedelta(seconds=time.monotonic() - started),
            data_digest=result.digest,
        )

    def find_exec(self, ref: str, mark: str) -> ExecState | None:
        agent = self._find_agent(ref)
        return runs.find_state(agent, mark) if agent else None

    def open_output(self, ref: str, mark: str, *, stdout: int, stderr: int) -> OutputReader | None:
        agent = self._find_agent(ref)
        return AgentOutputReader(agent, mark, stdout, stderr) if agent else None

    def acknowledge_exec(self, ref: str, mark: str) -> None:
        with suppress(ProviderError):
            agent = self._find_agent(ref)
            if agent:
                runs.acknowledge(agent, mark)
