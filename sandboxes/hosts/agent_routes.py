"""Way of this process to the agents that are connected to a gateway over TLS, on this machine or another one."""

import ssl
from functools import cache

from django.conf import settings
from django.utils.crypto import salted_hmac

from sandboxes.agent.addresses import AgentLocation, RoutedGateway
from sandboxes.agent.internal import GatewayTrust
from sandboxes.models import AgentRoute


def locate_agent(ref: str) -> AgentLocation | None:
    """Return the gateway that holds the connection of a sandbox's agent. None if the agent has never connected."""
    found = AgentRoute.objects.filter(ref=ref).values_list("address", "number", "refused_version").first()
    return AgentLocation(*found) if found else None


def derive_gateway_secret() -> bytes:
    """Return the secret between gateways and other processes of this installation."""
    return salted_hmac("leasehold.gateway", "", secret=settings.SECRET_KEY, algorithm="sha256").digest()


@cache
def build_gateway_trust() -> GatewayTrust | None:
    """Return the authority of the gateways' internal ports. None if they do not use TLS."""
    if not settings.GATEWAY_INTERNAL_AUTHORITY:
        return None
    return GatewayTrust(ssl.create_default_context(cafile=settings.GATEWAY_INTERNAL_AUTHORITY), settings.GATEWAY_INTERNAL_NAME)


@cache
def build_routed_gateway() -> RoutedGateway:
    return RoutedGateway(locate_agent, derive_gateway_secret(), build_gateway_trust())
