"""Address of a client behind proxies, and what a client states itself."""

from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.test import RequestFactory

from controlplane.console.sign_in.addresses import find_client_address, find_client_network

PROXIES = ("127.0.0.1/32", "10.0.0.0/8", "fd00::/8")


@pytest.mark.parametrize(
    ("peer", "forwarded", "expected"),
    [
        ("192.0.2.1", None, "192.0.2.1"),
        ("192.0.2.1", "198.51.100.7", "192.0.2.1"),  # a client that states another address
        ("127.0.0.1", None, "127.0.0.1"),
        ("127.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("127.0.0.1", "1.1.1.1, 198.51.100.7", "198.51.100.7"),  # the client's own address stands before the proxy's
        ("127.0.0.1", "198.51.100.7, 10.1.2.3", "198.51.100.7"),  # two proxies
        ("127.0.0.1", "1.1.1.1, 198.51.100.7,10.1.2.3 ", "198.51.100.7"),
        ("127.0.0.1", "10.9.9.9, 198.51.100.7", "198.51.100.7"),  # a client that poses as behind a further proxy
        ("127.0.0.1", "10.9.9.9", "10.9.9.9"),
        ("::1", "198.51.100.7", "::1"),
        ("::ffff:127.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("fd00::2", "2001:db8::5", "2001:db8::5"),
        ("127.0.0.1", "[2001:db8::5]:4711", "2001:db8::5"),
        ("127.0.0.1", "198.51.100.7:4711", "198.51.100.7"),
        ("127.0.0.1", "fe80::1%eth0", "fe80::1"),
        ("127.0.0.1", "unknown", "127.0.0.1"),
        ("127.0.0.1", "198.51.100.7, unknown", "127.0.0.1"),
        ("127.0.0.1", ",,,", "127.0.0.1"),
        ("127.0.0.1", "\x00\n, é", "127.0.0.1"),
        ("127.0.0.1", "10.0.0.1, " * 5000 + "10.0.0.2", "10.0.0.1"),
        ("", "198.51.100.7", "unknown"),
        ("unix:", "198.51.100.7", "unknown"),
    ],
)
def test_address_is_the_last_one_of_no_trusted_proxy(peer: str, forwarded: str | None, expected: str, settings: Any) -> None:
    settings.SIGN_IN = replace(settings.SIGN_IN, trusted_proxies=tuple(ip_network(each) for each in PROXIES))
    headers = {"HTTP_X_FORWARDED_FOR": forwarded} if forwarded is not None else {}
    assert find_client_address(RequestFactory().get("/", REMOTE_ADDR=peer, **headers)) == expected


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "10.0.0.1", "192.0.2.1"])
def test_by_default_no_proxy_is_trusted(peer: str) -> None:
    assert django_settings.SIGN_IN.trusted_proxies == ()
    request = RequestFactory().get("/", REMOTE_ADDR=peer, HTTP_X_FORWARDED_FOR="198.51.100.7")
    assert find_client_address(request) == peer


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("unknown", "unknown"),
    ],
)
def test_an_ipv6_client_is_its_network(address: str, network: str) -> None:
    assert find_client_network(address) == network
