"""Redaction of the upstream's credential from its responses, because some upstreams quote request headers."""

MIN_SECRET_LENGTH = 16  # characters
KEY_PREFIX = "sk-"  # of the keys of OpenAI, Anthropic and LiteLLM
MIN_PREFIXED_SECRET_LENGTH = 7  # characters of a key with KEY_PREFIX; a shorter one is part of words such as "task-1"


def is_secret(key: str) -> bool:
    """Return whether a key is a secret. Other keys, such as "ollama", are placeholders and may be ordinary words."""
    return len(key) >= (MIN_PREFIXED_SECRET_LENGTH if key.startswith(KEY_PREFIX) else MIN_SECRET_LENGTH)


class SecretRedactor:
    """Streaming filter that replaces a key by asterisks if the key is a secret, also where the key is split across chunks."""

    def __init__(self, key: str) -> None:
        self._secret = key.encode() if is_secret(key) else b""
        self._pending = b""  # trailing bytes that may be the beginning of the secret

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that can be passed on after this chunk."""
        content = self._pending + chunk
        if self._secret:
            content = content.replace(self._secret, b"*" * len(self._secret))
        longest = min(len(self._secret) - 1, len(content))
        pending = next((length for length in range(longest, 0, -1) if content.endswith(self._secret[:length])), 0)
        self._pending = content[len(content) - pending :]
        return content[: len(content) - pending]

    def end(self) -> bytes:
        """Return the remaining bytes at the end of the response."""
        pending, self._pending = self._pending, b""
        return pending
