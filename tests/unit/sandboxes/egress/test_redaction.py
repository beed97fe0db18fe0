"""Redaction of a credential that is split across chunks of a response."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.egress.redaction import SecretRedactor

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
