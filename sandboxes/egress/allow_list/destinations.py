"""Resolution of allowed domains, and the check of every resolved address."""

import asyncio
import socket
from concurrent.futures import Executor
from ipaddress import ip_address

from django.conf import settings

from sandboxes.egress.refusals import CallRefused
from sandboxes.webhooks.addresses import Address, get_refusal_reason

RESOLUTION_TIMEOUT_SECONDS = 10.0


async def resolve(host: str, executor: Executor) -> list[Address]:
    """Return the addresses of a domain. Raise CallRefused if there is none, or if any of them is forbidden.

    The caller connects to one of these addresses: a second resolution could return another one."""
    lookup = asyncio.get_running_loop().run_in_executor(executor, _look_up, host)
    try:
        async with asyncio.timeout(RESOLUTION_TIMEOUT_SECONDS):
            addresses = await lookup
    except (OSError, UnicodeError) as error:  # includes TimeoutError
        raise CallRefused(502, "not_resolved", f"The name {host} could not be resolved.") from error
    for address in addresses:
        if is_forbidden(address):
            # Without the address: the answer would tell the sandbox about the internal network.
            raise CallRefused(403, "address_not_allowed", f"{host} resolves to an address that is not allowed.")
    return addresses


def _look_up(host: str) -> list[Address]:
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ip_address(str(info[4][0])) for info in infos))


def is_forbidden(address: Address) -> bool:
    """Return whether no sandbox may reach an address. LEASEHOLD_EGRESS_ALLOWED_NETWORKS allows private networks, but never
    link-local, multicast and metadata addresses."""
    internal = any(address in network for network in settings.EGRESS_ALLOWED_NETWORKS)
    return bool(get_refusal_reason(address, internal=internal))
