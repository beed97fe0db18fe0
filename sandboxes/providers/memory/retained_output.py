"""Output of an exec of the memory provider that has ended, as a sandbox's agent retains it."""

from collections.abc import Mapping

from sandboxes.providers.command_results import ExecResult, OutputPart, OutputReader

OUTPUT_PART_BYTES = 4096  # of one read


class RetainedOutput(OutputReader):
    """Reader of the output of an ended exec, in parts, until its result is acknowledged."""

    def __init__(self, retained: Mapping[str, ExecResult], mark: str, stdout: int, stderr: int) -> None:
        self._retained, self._mark = retained, mark
        self._offsets, self._interrupted = {"stdout": stdout, "stderr": stderr}, False

    def read(self, *, wait: float) -> OutputPart | None:
        result = self._retained.get(self._mark)
        if result is None or self._interrupted:
            return None
        for stream, offset in self._offsets.items():
            if part := getattr(result, stream)[offset : offset + OUTPUT_PART_BYTES]:
                self._offsets[stream] += len(part)
                return OutputPart(stream, part)
        return OutputPart("", ended=True)

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        pass
