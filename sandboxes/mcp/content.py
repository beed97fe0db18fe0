"""Contents of files in arguments and results of tools: text, or any bytes in base64."""

import base64

ENCODINGS = ("utf-8", "base64")


def encode_content(content: bytes, encoding: str) -> str:
    """Return content as text. utf-8 replaces invalid bytes."""
    return base64.b64encode(content).decode() if encoding == "base64" else content.decode("utf-8", "replace")


def decode_content(text: str, encoding: str) -> bytes:
    """Return the bytes of an argument. Raises ValueError."""
    return base64.b64decode(text, validate=True) if encoding == "base64" else text.encode()
