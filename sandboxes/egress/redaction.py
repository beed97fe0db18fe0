"""Our key is in nothing that a sandbox is answered, whoever put it there: some upstreams quote what they were sent."""

MIN_SECRET_LENGTH = (
    16  # characters of what is a secret: "ollama", which upstreams without keys are given, is a word in answers too
)


class SecretRedactor:
    """Fed the bytes of an answer as they pass; the secret among them comes out as stars, also where it comes in pieces."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode() if len(secret) >= MIN_SECRET_LENGTH else b""
        self._kept = b""  # the end of what was fed, if a secret may begin there

    def feed(self, chunk: bytes) -> bytes:
        whole = self._kept + chunk
        if self._secret:
            whole = whole.replace(self._secret, b"*" * len(self._secret))
        longest = min(len(self._secret) - 1, len(whole))
        kept = next((length for length in range(longest, 0, -1) if whole.endswith(self._secret[:length])), 0)
        self._kept = whole[len(whole) - kept :]
        return whole[: len(whole) - kept]

    def end(self) -> bytes:
        """The answer is complete; what of it has not been passed on yet."""
        kept, self._kept = self._kept, b""
        return kept
