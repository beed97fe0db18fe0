"""Environment variables that the control plane gives to every command, background process and terminal of a sandbox."""

from sandboxes.egress.allow_list.environment import build_proxy_environment
from sandboxes.models import Sandbox
from sandboxes.providers.base import Provider


def build_environment(sandbox: Sandbox, provider: Provider) -> dict[str, str]:
    """Return the identity of the sandbox's agent, and the proxy variables of its policy. A caller's variables override both."""
    identity = {"AGENT_DID": sandbox.agent_did, "ENVIRONMENT_ID": sandbox.environment_id}
    return {**identity, **build_proxy_environment(sandbox, provider)}
