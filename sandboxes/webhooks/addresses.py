"""Address filter of webhooks: protection against server-side request forgery."""

from ipaddress import IPv4Address, IPv6Address, ip_network

Address = IPv4Address | IPv6Address
# Cloud metadata services outside the link-local range. These services give out the credentials of this machine.
CLOUD_METADATA_NETWORKS = [
    ip_network(net) for net in ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254")
]
NAT64_NETWORK = ip_network("64:ff9b::/96")
SITE_LOCAL_NETWORK = ip_network("fec0::/10")  # deprecated private range, replaced by fc00::/7


def get_refusal_reason(address: Address, *, internal: bool) -> str:
    """Return the reason why events may not be sent to an address, or "" if they may."""
    address = _extract_ipv4(address)
    if (
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or any(address in net for net in CLOUD_METADATA_NETWORKS)
    ):
        return "link-local, multicast, unspecified and cloud metadata addresses are never allowed."
    if not internal and (not address.is_global or address.is_reserved or address in SITE_LOCAL_NETWORK):
        return 'the address is private or reserved, and "Internal address" is not enabled for this webhook.'
    return ""


def _extract_ipv4(address: Address) -> Address:
    """Return the IPv4 address embedded in an IPv6 address (mapped, 6to4, NAT64), or the address itself."""
    if isinstance(address, IPv6Address):
        if address in NAT64_NETWORK:
            return IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address
