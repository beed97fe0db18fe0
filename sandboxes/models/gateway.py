"""Tokens by which remote sandboxes identify themselves at the gateway."""

from django.db import models

from sandboxes.models.sandboxes import Sandbox


class GatewayToken(models.Model):
    """Current token of one sandbox, as a hash. Each start of the sandbox replaces it, so an earlier token is invalid."""

    sandbox = models.OneToOneField(Sandbox, on_delete=models.CASCADE, related_name="gateway_token")
    incarnation = models.PositiveIntegerField(help_text="Incarnation of the sandbox that has the token.")
    sha256 = models.CharField(max_length=64, unique=True, editable=False)
    issued_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"gateway token of {self.sandbox_id}"
