"""Addresses that the proxy of the allow lists may connect to."""

from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from sandboxes.egress.allow_list.destinations import is_forbidden


def test_a_private_address_needs_a_network_of_the_operator(settings: Any) -> None:
    settings.EGRESS_ALLOWED_NETWORKS = []
    assert is_forbidden(ip_address("10.20.3.4"))
    assert not is_forbidden(ip_address("1.1.1.1"))
    settings.EGRESS_ALLOWED_NETWORKS = [ip_network("10.20.0.0/16"), ip_network("fd00::/8")]
    assert not is_forbidden(ip_address("10.20.3.4"))
    assert not is_forbidden(ip_address("fd00::1"))
    assert is_forbidden(ip_address("10.21.3.4"))


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "169.254.169.254", "100.100.100.200", "fd00:ec2::254", "fe80::1",
     "224.0.0.1", "ff02::1", "0.0.0.0", "::", "100.64.0.1", "192.0.2.1", "255.255.255.255"],
)  # fmt: skip
def test_a_special_address_is_refused(address: str, settings: Any) -> None:
    settings.EGRESS_ALLOWED_NETWORKS = []
    assert is_forbidden(ip_address(address))


@pytest.mark.parametrize("address", ["169.254.169.254", "fe80::1", "224.0.0.1", "0.0.0.0", "100.100.100.200", "fd00:ec2::254"])
def test_no_setting_allows_metadata_link_local_and_multicast(address: str, settings: Any) -> None:
    settings.EGRESS_ALLOWED_NETWORKS = [ip_network("0.0.0.0/0"), ip_network("::/0")]
    assert is_forbidden(ip_address(address))
