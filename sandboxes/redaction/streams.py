"""Redaction of credentials from the responses of upstreams, because some upstreams quote request headers."""

import base64
import contextlib
import html
import json
import re
from collections.abc import Iterator
from urllib.parse import quote

MIN_SECRET_LENGTH = 16  # characters
MIN_BASE64_LENGTH = 12  # characters; a shorter part may be text
KEY_PREFIX = "sk-"  # of the keys of OpenAI, Anthropic and LiteLLM
MIN_PREFIXED_SECRET_LENGTH = 7  # characters of a key with KEY_PREFIX; a shorter one is part of words such as "task-1"
ALPHANUMERIC = re.compile(r"[0-9A-Za-z]")
BASE64_PARTS = ((0, 0), (1, 2), (2, 3))  # bytes before the secret, and the characters of base64 that depend on them, too


def is_secret(key: str) -> bool:
    """Return whether a key is a secret. Other keys, such as "ollama", are placeholders and may be ordinary words."""
    return len(key) >= (MIN_PREFIXED_SECRET_LENGTH if key.startswith(KEY_PREFIX) else MIN_SECRET_LENGTH)


def list_secrets(authorization: str) -> list[str]:
    """Return the secrets in the value of an Authorization header: its token, or the password of "Basic"."""
    scheme, _, token = authorization.partition(" ")
    secrets = [token]
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):  # otherwise it is sent as it is stored
            secrets += [(decoded := base64.b64decode(token).decode()), decoded.partition(":")[2]]
    return secrets


def list_forms(secret: str) -> Iterator[bytes]:
    """Yield a secret as an upstream may quote it: as it is, escaped for JSON, HTML or a URL, and inside of base64.

    An upstream that encodes it otherwise on purpose is not stopped."""
    yield secret.encode()
    yield html.escape(secret).encode()
    yield json.dumps(secret)[1:-1].encode()
    yield secret.replace("/", "\\/").encode()  # JSON of some encoders
    for digits in ("04x", "04X"):
        yield "".join(char if ALPHANUMERIC.fullmatch(char) else f"\\u{ord(char):{digits}}" for char in secret).encode()
    yield quote(secret, safe="").encode()
    for before, dependent in BASE64_PARTS:
        content = bytes(before) + secret.encode()
        whole = content[: len(content) - len(content) % 3]  # the last characters depend on the byte behind the secret
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            if len(form := encode(whole)[dependent:]) >= MIN_BASE64_LENGTH:
                yield form


class SecretRedactor:
    """Streaming filter that replaces keys by asterisks if they are secrets, also where one is split across chunks."""

    def __init__(self, *keys: str) -> None:
        forms = {form for key in keys if is_secret(key) for form in list_forms(key)}
        self._forms = sorted(forms, key=len, reverse=True)
        self._first_bytes = {form[0] for form in forms}
        self._pattern = re.compile(b"|".join(map(re.escape, self._forms))) if self._forms else None
        self._pending = b""  # trailing bytes that may be the beginning of a secret

    def redact(self, content: bytes) -> bytes:
        """Return complete content without the secrets, and of the same length."""
        return self._pattern.sub(lambda match: b"*" * len(match[0]), content) if self._pattern else content

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes that can be passed on after this chunk."""
        content = self.redact(self._pending + chunk)
        longest = min(len(self._forms[0]) - 1, len(content)) if self._forms else 0
        tail = content[len(content) - longest :]
        starts = (
            at for at in range(longest)
            if tail[at] in self._first_bytes and any(form.startswith(tail[at:]) for form in self._forms)
        )  # fmt: skip
        pending = longest - next(starts, longest)
        self._pending = content[len(content) - pending :]
        return content[: len(content) - pending]

    def end(self) -> bytes:
        """Return the remaining bytes at the end of the response."""
        pending, self._pending = self._pending, b""
        return pending
