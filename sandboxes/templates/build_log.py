"""Build log of bounded size: redacted, its middle omitted."""

import re
from collections.abc import Sequence

HEAD_CHARS, TAIL_CHARS = 16_000, 48_000
MAX_LINE_CHARS = 8_000  # of output without a line break, such as a progress bar
MAX_SECRET_CHARS = 500
REDACTED = "***"
# Credentials as tools print them: user and password in a URL, prefixed tokens, the value after a name such as API_KEY=.
SECRET_PATTERNS = [
    (re.compile(r"(://)[^/\s:@]*:[^/\s@]+@"), rf"\g<1>{REDACTED}@"),
    (
        re.compile(r"\b(?:sk-|gh[pos]_|github_pat_|glpat-|xox[abprs]-|hf_|pypi-|AKIA|dtn_|lsv2_)[A-Za-z0-9_-]{8,}"),
        REDACTED,
    ),
    (re.compile(r"(?i)(\bauthorization:\s*(?:bearer|basic)\s+)\S+"), rf"\g<1>{REDACTED}"),
    # Bounded repetitions: an unbounded one takes quadratic time in a long line without a match.
    (
        re.compile(
            r"(?i)((?:password|passwd|secret|token|api[_-]?key)[a-z0-9_-]{0,32}[\"']?[ \t]{0,3}[=:](?!=)[ \t]{0,3})"
            r"(?:\"[^\"\n]{1,500}\"|'[^'\n]{1,500}'|[^\s\"']{1,500})"
        ),
        rf"\g<1>{REDACTED}",
    ),
]


class BuildLog:
    """Output of a build without `secrets` and credentials, reduced to its first HEAD_CHARS and last TAIL_CHARS characters."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = [secret for secret in secrets if secret]
        self._head, self._tail, self._pending, self.total_chars = "", "", "", 0

    def append(self, text: str) -> str:
        """Add output, and return the complete lines of the log that it completes, redacted."""
        self._pending += text
        end = max(self._pending.rfind("\n"), self._pending.rfind("\r")) + 1
        if not end and len(self._pending) > MAX_LINE_CHARS:
            end = len(self._pending) - MAX_SECRET_CHARS  # the rest may be the beginning of a credential
        complete, self._pending = self._pending[:end], self._pending[end:]
        return self._keep(complete)

    def end(self) -> str:
        """Add the last line, which has no line break, and return it redacted."""
        rest, self._pending = self._pending, ""
        return self._keep(rest)

    def render(self) -> str:
        """Return the log, with a note of the number of omitted characters."""
        omitted = self.total_chars - len(self._head) - len(self._tail)
        note = f"\n[{omitted} characters omitted]\n" if omitted else ""
        return f"{self._head}{note}{self._tail}"

    def _keep(self, text: str) -> str:
        if not text:
            return ""
        text = self.redact(text.replace("\0", "\N{REPLACEMENT CHARACTER}"))
        self.total_chars += len(text)
        taken = text[: HEAD_CHARS - len(self._head)]
        self._head += taken
        self._tail = (self._tail + text[len(taken) :])[-TAIL_CHARS:]
        return text

    def redact(self, text: str) -> str:
        """Return a text without `secrets` and credentials."""
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        for pattern, replacement in SECRET_PATTERNS:
            text = pattern.sub(replacement, text)
        return text
