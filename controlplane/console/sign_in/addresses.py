"""Address of the client of a request, behind reverse proxies that the configuration names."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from django.conf import settings
from django.http import HttpRequest

IpAddress = IPv4Address | IPv6Address
MAX_HOPS = 20  # of X-Forwarded-For that are read, from the right
UNKNOWN_ADDRESS = "unknown"
IPV6_CLIENT_PREFIX = 64  # bits that one client is given: it chooses the others freely


def parse_address(text: str) -> IpAddress | None:
    """Parse an address, with or without a port or a zone. Return an IPv4-mapped address as IPv4, None for anything else."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_within(address: IpAddress | None, networks: Iterable[IPv4Network | IPv6Network]) -> bool:
    return address is not None and any(address in network for network in networks)


def is_from_trusted_proxy(request: HttpRequest) -> bool:
    """Return whether the peer of the connection is one of LEASEHOLD_TRUSTED_PROXIES."""
    return is_within(parse_address(request.META.get("REMOTE_ADDR", "")), settings.SIGN_IN.trusted_proxies)


def find_client_address(request: HttpRequest) -> str:
    """Return the address of the client, UNKNOWN_ADDRESS if the server states none.

    Each proxy appends the address of its peer to X-Forwarded-For. The list is therefore read from the right, as long as the
    address that appended an entry is a trusted proxy. Entries further left are the client's own words."""
    address = parse_address(request.META.get("REMOTE_ADDR", ""))
    hops = request.META.get("HTTP_X_FORWARDED_FOR", "").split(",")[-MAX_HOPS:]
    while hops and is_within(address, settings.SIGN_IN.trusted_proxies):
        previous = parse_address(hops.pop())
        if previous is None:
            break
        address = previous
    return str(address) if address else UNKNOWN_ADDRESS


def find_client_network(address: str) -> str:
    """Return the network that counts as one client: the address itself, of an IPv6 address the first 64 bits."""
    parsed = parse_address(address)
    if isinstance(parsed, IPv6Address):
        return str(ip_network((parsed, IPV6_CLIENT_PREFIX), strict=False))
    return str(parsed) if parsed else address
