"""Environment of commands in sandboxes whose policy has an allow list: pip, npm, git and curl read these variables."""

from sandboxes.models import Sandbox
from sandboxes.providers.base import PROXY_LOOPBACK_ADDRESS, Provider

NO_PROXY = "127.0.0.1,localhost"  # includes the LLM egress proxy
PROXY_ENVIRONMENT = {
    **dict.fromkeys(["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"], f"http://{PROXY_LOOPBACK_ADDRESS}"),
    **dict.fromkeys(["NO_PROXY", "no_proxy"], NO_PROXY),
}


def build_proxy_environment(sandbox: Sandbox, provider: Provider) -> dict[str, str]:
    """Return the proxy variables, or none without an allow list or a bridge to the proxy."""
    has_allow_list = sandbox.policy_id is not None and bool(sandbox.rules.allowed_domains)
    return PROXY_ENVIRONMENT if has_allow_list and provider.bridges_proxy else {}
