"""Address, key and behaviour of the client, from arguments or the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .errors import ConfigurationError
from .exchange import RetryPolicy

URL_VARIABLE, KEY_VARIABLE, AGENT_VARIABLE = "LEASEHOLD_URL", "LEASEHOLD_API_KEY", "LEASEHOLD_AGENT"
API_PATH = "/api/v1"


@dataclass(frozen=True)
class Settings:
    """Address of a control plane and an API key."""

    base_url: str
    api_key: str = field(repr=False)
    retries: RetryPolicy

    @classmethod
    def load(cls, url: str | None, api_key: str | None, retries: RetryPolicy | None) -> Settings:
        """Return the settings. Raise ConfigurationError if an address or a key is given by neither argument nor environment."""
        url, api_key = url or os.environ.get(URL_VARIABLE), api_key or os.environ.get(KEY_VARIABLE)
        if not url:
            raise ConfigurationError(f"No address of the control plane. Pass `url`, or set {URL_VARIABLE}.")
        if not api_key:
            raise ConfigurationError(f"No API key. Pass `api_key`, or set {KEY_VARIABLE}.")
        base_url = url.rstrip("/").removesuffix(API_PATH) + API_PATH
        return cls(base_url, api_key, retries or RetryPolicy())


def load_agent(agent: str | None) -> str | None:
    """Return the DID of the agent from the argument or the environment, or None."""
    return agent or os.environ.get(AGENT_VARIABLE) or None
