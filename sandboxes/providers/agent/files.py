"""File operations by the agent in a sandbox, which executes image/files.py."""

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from sandboxes.agent.client import ConnectionLost
from sandboxes.agent.operations import FileOperation, OperationFailed
from sandboxes.agent.protocol import ProtocolError
from sandboxes.agent.runs import NotStarted
from sandboxes.providers.agent.commands import AgentCommandProvider
from sandboxes.providers.errors import FailureCause, SandboxUnreadable, Unavailable
from sandboxes.providers.file_verbs import FileVerbsProvider, raise_for_exit_code

IDLE_TIMEOUT_SECONDS = 60.0  # without progress of a file transfer


class AgentFilesProvider(AgentCommandProvider, FileVerbsProvider):
    """File verbs by the agent, or by the engine if no agent has started the operation."""

    @abstractmethod
    def _stream_output_by_engine(self, ref: str, words: Sequence[str], stdin: BinaryIO | None) -> Iterator[bytes]:
        """Execute image/files.py without the agent, and yield its output."""

    def _stream_output(self, ref: str, words: Sequence[str], stdin: BinaryIO | None = None) -> Iterator[bytes]:
        agent, since = self._find_agent(ref), time.monotonic()
        if agent is not None:
            try:
                operation = FileOperation(
                    agent, words, idle_timeout=IDLE_TIMEOUT_SECONDS, check=lambda: self._require_running(ref, since)
                )
                yield from _translate_operation_errors(operation.run(stdin), ref, words)
                return
            except NotStarted as error:
                self._note_fallback(ref, error)
        yield from self._stream_output_by_engine(ref, words, stdin)


def _translate_operation_errors(chunks: Iterator[bytes], ref: str, words: Sequence[str]) -> Iterator[bytes]:
    try:
        yield from chunks
    except OperationFailed as error:
        raise_for_exit_code(error.exit_code, str(error))
    except TimeoutError as error:
        raise build_stalled_error(ref, words) from error
    except ProtocolError as error:
        message = f"{ref}: {words[0]} in {words[1]} has an invalid answer: {error}"
        raise SandboxUnreadable(message, cause=FailureCause.AGENT_FAILED) from error
    except ConnectionLost as error:
        raise Unavailable(f"{ref}: {words[0]} in {words[1]} was interrupted: {error}") from error


def build_stalled_error(ref: str, words: Sequence[str]) -> SandboxUnreadable:
    message = f"{ref}: no progress of {words[0]} in {words[1]} for {IDLE_TIMEOUT_SECONDS:.0f} s"
    return SandboxUnreadable(message, cause=FailureCause.TIMEOUT)
