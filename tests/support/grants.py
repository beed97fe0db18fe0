"""Changes of an API key of Ada after which none of its grants is alive, by any clock of a test."""

from datetime import UTC, datetime

import pytest

from tests.support.billing import BOB

PAST = datetime(2000, 1, 1, tzinfo=UTC)
KEY_ENDS = [
    pytest.param({"revoked_at": PAST}, id="revoked"),
    pytest.param({"expires_at": PAST}, id="expired"),
    pytest.param({"scopes": ["costs"]}, id="scope taken"),
    pytest.param({"dids": [BOB]}, id="agent taken"),
    pytest.param({"digest": "f" * 64}, id="rotated without an overlap"),
]
