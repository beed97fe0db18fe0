"""Signed grants in URLs of terminals and previews."""

import re
import uuid
from datetime import timedelta
from typing import Any

import pytest

from leases.grants.issuers import Issuer
from leases.stream_server.grants import InvalidGrant, PreviewGrant, TerminalGrant
from tests.conftest import NOW

END = int((NOW + timedelta(hours=1)).timestamp())
PREVIEW = PreviewGrant(uuid.UUID(int=7), 8080, END, key_id=9)
TERMINAL = TerminalGrant(
    uuid.UUID(int=7), uuid.UUID(int=8), END, read_only=True, actor="key 01234567", issuer=Issuer.of_key(9, "lh_x")
)  # fmt: skip


@pytest.mark.parametrize("grant", [PREVIEW, TERMINAL])
def test_grant_is_valid_until_its_end(grant: Any) -> None:
    text = grant.encode()
    assert type(grant).decode(text, now=NOW) == grant
    with pytest.raises(InvalidGrant):
        type(grant).decode(text, now=NOW + timedelta(hours=1))


@pytest.mark.parametrize("grant", [PREVIEW, TERMINAL])
def test_changed_grant_is_invalid(grant: Any) -> None:
    text = grant.encode()
    for index in range(len(text) - 1):  # the last character of base 32 has a bit without a meaning
        changed = text[:index] + ("a" if text[index] != "a" else "b") + text[index + 1 :]
        with pytest.raises(InvalidGrant):
            type(grant).decode(changed, now=NOW)
    for changed in ("", "a", text[:-9], text + "aaaaaaaa", "1" * len(text), "ü", "\0"):
        with pytest.raises(InvalidGrant):
            type(grant).decode(changed, now=NOW)


def test_grant_of_one_kind_is_invalid_for_the_other() -> None:
    with pytest.raises(InvalidGrant):
        PreviewGrant.decode(TERMINAL.encode(), now=NOW)
    with pytest.raises(InvalidGrant):
        TerminalGrant.decode(PREVIEW.encode(), now=NOW)


def test_preview_grant_is_one_label_of_a_host_name_in_any_case() -> None:
    text = PREVIEW.encode()
    assert re.fullmatch(r"[a-z2-7]{63}", text)
    last = PreviewGrant(uuid.UUID(int=(1 << 128) - 1), 65535, END, key_id=(1 << 32) - 1)
    assert PreviewGrant.decode(last.encode(), now=NOW) == last
    assert PreviewGrant.decode(text.upper(), now=NOW) == PREVIEW


@pytest.mark.parametrize("grant", [PREVIEW, TERMINAL])
def test_grant_stays_valid_while_its_key_is_a_fallback(grant: Any, settings: Any) -> None:
    text, previous = grant.encode(), settings.SECRET_KEY
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "another key", [previous]
    assert type(grant).decode(text, now=NOW) == grant
    settings.SECRET_KEY_FALLBACKS = []
    with pytest.raises(InvalidGrant):
        type(grant).decode(text, now=NOW)
