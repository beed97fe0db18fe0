"""Configuration of the providers of remote sandboxes, from the settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_network
from typing import NamedTuple
from urllib.parse import urlsplit

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from sandboxes.providers.base import Network


@dataclass(frozen=True)
class RemoteConfiguration:
    """Account at a vendor, and defaults of its sandboxes. A duration of None is off.

    `auto_stop` and `auto_delete` are carried out by the vendor and take effect if no control plane cleans up: a sandbox stops
    when it was idle for `auto_stop`, and is deleted when it was stopped for `auto_delete`. With `network`
    GATEWAY the vendor lets a sandbox reach this installation's gateway alone. `options` are of one vendor."""

    api_key: str
    api_url: str
    image: str = ""
    network: Network = Network.OPEN
    auto_stop: timedelta | None = None
    auto_delete: timedelta | None = None
    options: Mapping[str, str] = field(default_factory=dict)


def get_configuration(provider_name: str) -> RemoteConfiguration:
    """Return the configuration of a vendor. Raise ImproperlyConfigured, naming the variable, if a required one is not set."""
    if variable := find_missing_variable(provider_name):
        raise ImproperlyConfigured(f"The {provider_name} provider needs {variable}, which is not set.")
    configuration: RemoteConfiguration = settings.REMOTE_PROVIDERS[provider_name]
    return configuration


KEY_VARIABLES = {
    "cloudflare": "CLOUDFLARE_SANDBOX_API_KEY",
    "daytona": "DAYTONA_API_KEY",
    "langsmith": "LANGSMITH_API_KEY",
    "modal": "MODAL_TOKEN_SECRET",
    "runloop": "RUNLOOP_API_KEY",
}
URL_VARIABLES = {"cloudflare": "CLOUDFLARE_SANDBOX_URL"}  # without a default
OPTION_VARIABLES = {"modal": {"token_id": "MODAL_TOKEN_ID"}}  # required options: the API key has a public part


def find_missing_variable(provider_name: str) -> str:
    """Return the first variable that a vendor requires and that is not set. Empty: none."""
    configuration: RemoteConfiguration = settings.REMOTE_PROVIDERS[provider_name]
    required = {KEY_VARIABLES[provider_name]: configuration.api_key}
    required |= {
        variable: configuration.options[option] for option, variable in OPTION_VARIABLES.get(provider_name, {}).items()
    }
    if provider_name in URL_VARIABLES:
        required[URL_VARIABLES[provider_name]] = configuration.api_url
    return next((variable for variable, value in required.items() if not value), "")


def is_configured(provider_name: str) -> bool:
    """Return whether a provider can be used as far as the settings tell: a vendor needs credentials."""
    return provider_name not in settings.REMOTE_PROVIDERS or not find_missing_variable(provider_name)


def round_up_minutes(duration: timedelta | None) -> int:
    """Return a duration in whole minutes, rounded up; 0 for None."""
    return -(-duration // timedelta(minutes=1)) if duration else 0


class GatewayDestination(NamedTuple):
    """Destination of sandboxes that reach the gateway alone. Both fields are empty without a gateway."""

    cidr: str = ""
    domain: str = ""


def find_gateway_destination() -> GatewayDestination:
    """Return the address of this installation's gateway as a network of one address, or its domain."""
    host = urlsplit(settings.GATEWAY_URL).hostname or ""
    try:
        return GatewayDestination(cidr=str(ip_network(host)))
    except ValueError:
        return GatewayDestination(domain=host)
