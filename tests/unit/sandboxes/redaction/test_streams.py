"""Redaction of a credential that is split across chunks of a response."""

import base64
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.redaction.streams import SecretRedactor, list_secrets

KEY = "sk-aabaabaaabaabaaab"
PIECES = st.lists(
    st.sampled_from([KEY.encode(), KEY[:7].encode(), KEY[3:].encode(), b"sk-", b"a", b"b", b"", b"{}"]), max_size=20
)


def redact(pieces: list[bytes], secret: str = KEY) -> list[bytes]:
    redactor = SecretRedactor(secret)
    return [*map(redactor.feed, pieces), redactor.end()]


@given(PIECES, st.integers(1, 9))
def test_secret_is_replaced_by_asterisks_and_other_bytes_are_unchanged(pieces: list[bytes], size: int) -> None:
    content = b"".join(pieces)
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    assert b"".join(redact(chunks)) == content.replace(KEY.encode(), b"*" * len(KEY))


def test_secret_that_repeats_its_beginning_is_redacted_at_every_split() -> None:
    """Several beginnings of such a secret can end a chunk. The longest one has to be held back."""
    secret = "ab" * 10
    for at in range(len(secret)):
        assert b"".join(redact([secret[:at].encode(), secret[at:].encode()], secret)) == b"*" * len(secret)


def test_bytes_that_cannot_begin_the_secret_are_passed_on_immediately() -> None:
    assert redact([b"data: a\n\n", b"data: s", b"t\n\n"]) == [b"data: a\n\n", b"data: ", b"st\n\n", b""]


@pytest.mark.parametrize("key", ["", "ollama", "lm-studio", "1234", "sk-1", "k" * 15])
def test_placeholder_key_is_not_redacted(key: str) -> None:
    content = f"task-1234 runs {key} in".encode()
    assert redact([content], key) == [content, b""]


@pytest.mark.parametrize("key", ["sk-1234", "k" * 16])
def test_shortest_secret_key_is_redacted(key: str) -> None:
    assert redact([f"Received key {key}.".encode()], key) == [b"Received key " + b"*" * len(key) + b".", b""]


@given(
    st.text(st.characters(codec="latin-1"), max_size=5), st.text(st.characters(codec="latin-1"), max_size=5), st.integers(1, 9)
)
def test_secret_in_base64_and_with_escapes_is_redacted_wherever_it_stands(before: str, behind: str, size: int) -> None:
    secret = "sk-lh/7+Qz_04yB=end"
    text = (before + secret + behind).encode()
    quoted = {
        "base64": base64.b64encode(text), "base64url": base64.urlsafe_b64encode(text),
        "json": "".join(char if char.isalnum() else f"\\u{ord(char):04x}" for char in secret).encode(),
        "url": quote(secret, safe="").encode(),
    }  # fmt: skip
    for form, content in quoted.items():
        passed = b"".join(redact([content[at : at + size] for at in range(0, len(content), size)], secret))
        assert len(passed) == len(content)
        assert passed.count(b"*") >= 20, form


def test_secrets_of_an_authorization_header_are_its_token_and_the_password() -> None:
    header = "Basic " + base64.b64encode(b"robot:Pa55word-of-the-robot").decode()
    content = f"{header} robot:Pa55word-of-the-robot Pa55word-of-the-robot".encode()
    assert b"Pa55" not in SecretRedactor(*list_secrets(header)).redact(content)
    assert header.split()[1].encode() not in SecretRedactor(*list_secrets(header)).redact(content)
    assert list_secrets("Bearer token") == ["token"]
    assert list_secrets("Basic no-base64!") == ["no-base64!"]
