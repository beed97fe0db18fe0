"""System checks of the sign-in."""

from collections.abc import Callable
from ipaddress import ip_network
from typing import Any

import pytest
from django.core.checks import run_checks

ORIGINS = ["https://leasehold.example.com"]
PROXY = (ip_network("127.0.0.1"),)


def list_ids() -> set[str]:
    found = run_checks(tags=["configuration"], include_deployment_checks=True)
    return {each.id or "" for each in found} & {"leasehold.E016", "leasehold.W008", "leasehold.W009"}


@pytest.mark.parametrize(
    ("values", "origins", "expected"),
    [
        ({}, [], {"leasehold.W009"}),
        ({}, ORIGINS, {"leasehold.W008", "leasehold.W009"}),
        ({"trusted_proxies": PROXY}, ORIGINS, {"leasehold.W009"}),
        ({"trusted_proxies": PROXY, "user_header": "RemoteUser"}, ORIGINS, set()),
        ({"trusted_proxies": PROXY, "second_factor": "enrolled"}, ORIGINS, {"leasehold.W009"}),
        ({"trusted_proxies": PROXY, "second_factor": "superusers"}, ORIGINS, set()),
        ({"trusted_proxies": PROXY, "second_factor": "all"}, ORIGINS, set()),
        ({"trusted_proxies": (*PROXY, ip_network("0.0.0.0/0")), "second_factor": "all"}, ORIGINS, {"leasehold.E016"}),
        ({"trusted_proxies": (*PROXY, ip_network("::/0")), "second_factor": "all"}, ORIGINS, {"leasehold.E016"}),
    ],
)
def test_checks_name_what_is_missing(
    values: dict[str, Any], origins: list[str], expected: set[str], configure: Callable[..., None], settings: Any
) -> None:
    configure(**values)
    settings.CSRF_TRUSTED_ORIGINS = origins
    assert list_ids() == expected
