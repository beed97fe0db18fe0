"""A key in an answer, however that is cut into pieces."""

from hypothesis import given
from hypothesis import strategies as st

from sandboxes.egress.redaction import SecretRedactor

KEY = "sk-aabaabaaabaabaaab"
PIECES = st.lists(
    st.sampled_from([KEY.encode(), KEY[:7].encode(), KEY[3:].encode(), b"sk-", b"a", b"b", b"", b"{}"]), max_size=20
)


def passed(pieces: list[bytes], secret: str = KEY) -> list[bytes]:
    censor = SecretRedactor(secret)
    return [*map(censor.feed, pieces), censor.end()]


@given(PIECES, st.integers(1, 9))
def test_it_comes_out_as_stars_and_all_else_as_it_came(pieces: list[bytes], size: int) -> None:
    whole = b"".join(pieces)
    again = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert b"".join(passed(again)) == whole.replace(KEY.encode(), b"*" * len(KEY))


def test_what_cannot_be_the_beginning_of_it_is_passed_on_at_once() -> None:
    assert passed([b"data: a\n\n", b"data: s", b"t\n\n"]) == [b"data: a\n\n", b"data: ", b"st\n\n", b""]


def test_a_key_that_is_a_word_stays_one() -> None:
    assert passed([b"run it in ollama"], "ollama") == [b"run it in ollama", b""]
    assert passed([b"no key"], "") == [b"no key", b""]
