"""Where nothing of ours is sent because somebody wrote it down: addresses that are not what they seem, and not public."""

from ipaddress import IPv4Address, IPv6Address, ip_network

Address = IPv4Address | IPv6Address
# What answers there gives credentials to whoever asks from this machine: clouds' metadata outside of link-local addresses.
CLOUD_METADATA_NETWORKS = [
    ip_network(net) for net in ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254")
]
NAT64_NETWORK = ip_network("64:ff9b::/96")
SITE_LOCAL_NETWORK = ip_network("fec0::/10")  # as private as fc00::/7, which took its place


def get_refusal_reason(address: Address, *, internal: bool) -> str:
    """Why nothing is sent to an address, "" if it may be."""
    address = _extract_ipv4(address)
    if (
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or any(address in net for net in CLOUD_METADATA_NETWORKS)
    ):
        return "nothing is ever sent there."
    if not internal and (not address.is_global or address.is_reserved or address in SITE_LOCAL_NETWORK):
        return "it is not public, and the webhook is not marked as internal."
    return ""


def _extract_ipv4(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, if it does."""
    if isinstance(address, IPv6Address):
        if address in NAT64_NETWORK:
            return IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address
