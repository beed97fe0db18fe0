"""File operations of the Docker provider: image/files.py in the container, executed by the agent or else by the engine."""

import uuid
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from sandboxes.providers.agent.files import IDLE_TIMEOUT_SECONDS, AgentFilesProvider, build_stalled_error
from sandboxes.providers.docker.commands import PYTHON_COMMAND, ContainerCommandProvider
from sandboxes.providers.file_verbs import raise_for_exit_code
from sandboxes.providers.streams import BoundedBuffer


class ContainerFilesProvider(ContainerCommandProvider, AgentFilesProvider):
    """File verbs of DockerProvider."""

    def _stream_output(self, ref: str, words: Sequence[str], stdin: BinaryIO | None = None) -> Iterator[bytes]:
        with self._translating_removal(ref):
            yield from super()._stream_output(ref, words, stdin)

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
                raise build_stalled_error(ref, words) from error
        raise_for_exit_code(exit_code, bytes(err).decode(errors="replace"))
