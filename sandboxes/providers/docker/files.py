"""File operations of the Docker provider: image/files.py in the container, executed by the agent or else by the engine."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from sandboxes.agent.client import ConnectionLost
from sandboxes.agent.operations import FileOperation, OperationFailed
from sandboxes.agent.protocol import ProtocolError
from sandboxes.agent.runs import NotStarted
from sandboxes.providers.base import FailureCause, Unavailable
from sandboxes.providers.docker import agent_exec
from sandboxes.providers.docker.commands import PYTHON_COMMAND, ContainerCommandProvider
from sandboxes.providers.file_verbs import FileVerbsProvider, raise_for_exit_code
from sandboxes.providers.streams import BoundedBuffer

IDLE_TIMEOUT_SECONDS = 60.0  # without progress of a file transfer


class ContainerFilesProvider(ContainerCommandProvider, FileVerbsProvider):
    """File verbs of DockerProvider."""

    def _stream_output(self, ref: str, words: Sequence[str], stdin: BinaryIO | None = None) -> Iterator[bytes]:
        """Execute image/files.py by the agent, or by the engine if no agent has started it."""
        agent, since = agent_exec.find_agent(self._engine, ref), time.time()
        if agent is not None:
            try:
                operation = FileOperation(
                    agent, words, idle_timeout=IDLE_TIMEOUT_SECONDS, check=lambda: self._require_running(ref, since)
                )
                yield from _translate_operation_errors(operation.run(stdin), ref, words)
                return
            except NotStarted as error:
                agent_exec.note_fallback(self._engine, ref, error)
        yield from self._stream_output_by_engine(ref, words, stdin)

    def _stream_output_by_engine(self, ref: str, words: Sequence[str], stdin: BinaryIO | None) -> Iterator[bytes]:
        err = BoundedBuffer(4096)
        argv = (*PYTHON_COMMAND, "/opt/leasehold/files.py", *words)
        with self._running(ref, argv, {}, "/", stdin, uuid.uuid4().hex) as run:
            run.idle_timeout = IDLE_TIMEOUT_SECONDS
            try:
                for stream, chunk in run.frames():
                    if stream == 2:
                        err.add(chunk)
                    else:
                        yield chunk
                exit_code, _ = run.wait()
            except TimeoutError as error:
                raise _stalled(ref, words) from error
        raise_for_exit_code(exit_code, bytes(err).decode(errors="replace"))


def _translate_operation_errors(chunks: Iterator[bytes], ref: str, words: Sequence[str]) -> Iterator[bytes]:
    try:
        yield from chunks
    except OperationFailed as error:
        raise_for_exit_code(error.exit_code, str(error))
    except TimeoutError as error:
        raise _stalled(ref, words) from error
    except (ConnectionLost, ProtocolError) as error:
        raise Unavailable(f"{ref}: {words[0]} in {words[1]} was interrupted: {error}") from error


def _stalled(ref: str, words: Sequence[str]) -> Unavailable:
    message = f"{ref}: no progress of {words[0]} in {words[1]} for {IDLE_TIMEOUT_SECONDS:.0f} s"
    return Unavailable(message, cause=FailureCause.TIMEOUT)
