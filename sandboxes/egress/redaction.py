"""Redaction of the upstream's credential from its responses, because some upstreams quote request headers."""

MIN_SECRET_LENGTH = 16  # characters; shorter keys, such as the placeholder "ollama", are ordinary words and are not redacted


class SecretRedactor:
    """Streaming filter that replaces a secret by asterisks, also where the secret is split across chunks."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode() if len(secret) >= MIN_SECRET_LENGTH else b""
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
