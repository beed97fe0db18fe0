"""Credentials by which sandboxes identify themselves at the gateway, and the gateways that hold their connections."""

from django.db import models
from django.db.models import Q

from sandboxes.models.sandboxes import Sandbox


class GatewayToken(models.Model):
    """Current token of one sandbox, as a hash. Each start of the sandbox replaces it, so an earlier token is invalid.

    The token of a sandbox with an agent is good for one join, which exchanges it for the secret of a session."""

    sandbox = models.OneToOneField(Sandbox, on_delete=models.CASCADE, related_name="gateway_token")
    incarnation = models.PositiveIntegerField(help_text="Incarnation of the sandbox that has the token.")
    sha256 = models.CharField(max_length=64, unique=True, editable=False)
    issued_at = models.DateTimeField()
    session_sha256 = models.CharField(
        max_length=64,
        blank=True,
        default="",
        db_default="",
        editable=False,
        help_text="Hash of the secret that the agent chose at its join.",
    )
    joined_at = models.DateTimeField(null=True, blank=True)
    refused_joins = models.PositiveIntegerField(
        default=0, db_default=0, help_text="Attempts to use the token again after the join."
    )
    refused_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=["session_sha256"], condition=~Q(session_sha256=""), name="gateway_token_session"),
        )

    def __str__(self) -> str:
        return f"gateway token of {self.sandbox_id}"


class AgentRoute(models.Model):
    """Gateway that holds the connection of a sandbox's agent, for the processes on other machines."""

    sandbox = models.OneToOneField(Sandbox, on_delete=models.CASCADE, related_name="agent_route")
    ref = models.CharField(max_length=255, unique=True, help_text="Provider's name of the incarnation that is connected.")
    number = models.PositiveBigIntegerField(help_text="Increases with each connection. Earlier connections are closed.")
    address = models.CharField(
        max_length=255, blank=True, db_index=True, help_text="Internal address of the gateway. Empty: not connected."
    )
    opened_at = models.DateTimeField()
    seen_at = models.DateTimeField(help_text="Last time at which the gateway confirmed the connection.")
    refused_version = models.IntegerField(
        null=True,
        help_text="Version of the agent's protocol, if the last connection ended because the gateway does not speak it.",
    )

    def __str__(self) -> str:
        return f"route to the agent of {self.ref}"
