"""Tables of agents and API keys."""

from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Value
from django.utils import timezone

from leases.projects.models import DEFAULT_PROJECT_ID, Project
from sandboxes.models.resource_limits import ResourceLimits

DID_PATTERN = r"did:[a-z0-9]+:[A-Za-z0-9._:%-]*[A-Za-z0-9._-]"
MAX_DID_CHARS = 255
DID_DESCRIPTION = "a DID such as did:plc:abc123: letters, digits and . _ : % - after did:<method>:, at most 255 characters"

# Django %-formats the message of a validator.
validate_did = RegexValidator(rf"\A{DID_PATTERN}\Z", f"Not {DID_DESCRIPTION}.".replace("%", "%%"))


def require_did(text: str) -> None:
    """Raise ValidationError unless the text is a DID that its columns can store. The validator does not limit the length."""
    validate_did(text)
    if len(text) > MAX_DID_CHARS:
        raise ValidationError(f"Not {DID_DESCRIPTION}.")


class Agent(models.Model):
    """API principal. Other tables refer to an agent by its DID; the row is for the console and the agent API."""

    did = models.CharField(max_length=255, unique=True, validators=[validate_did], verbose_name="DID")
    name = models.CharField(max_length=100, blank=True)
    project = models.ForeignKey(
        Project, on_delete=models.PROTECT, default=DEFAULT_PROJECT_ID, db_default=Value(DEFAULT_PROJECT_ID), related_name="+",
        help_text="The agent enters environments of this project only.",
    )  # fmt: skip
    created_at = models.DateTimeField(default=timezone.now, editable=False)  # noqa: TID251 - decides nothing

    class Meta:
        ordering = ["did"]

    def __str__(self) -> str:
        return self.name or self.did


class KeyScope(models.TextChoices):
    """Part of the HTTP API that a key may use."""

    LEASES = "leases", "leases: work with leases and their sandboxes"
    READ = "read", "read: read leases and their sandboxes, change nothing"
    COSTS = "costs", "costs: read costs, budgets and statements"
    TEMPLATES = "templates", "templates: build and remove image templates, with an operator's key"


def default_key_scopes() -> list[str]:
    """Return the scopes that together permit every request but builds of images. `leases` includes `read`.

    A build runs commands as root, with a network: a key needs `templates` explicitly."""
    return [KeyScope.LEASES, KeyScope.COSTS]


class AgentKey(ResourceLimits):
    """API key. Only the SHA-256 of its random secret is stored, so the key can be shown only when it is issued or rotated.

    A rotation replaces the secret; everything that refers to the row stays."""

    prefix = models.CharField(max_length=16, unique=True, editable=False)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    first_digest = models.CharField(
        max_length=64, default="", db_default="", editable=False,
        help_text="Digest of the first secret, for run ids of repeated requests. Empty: `digest` is the first one.",
    )  # fmt: skip
    previous_digest = models.CharField(max_length=64, blank=True, default="", db_default="", editable=False)
    previous_valid_until = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="The secret before the last rotation is accepted until then."
    )
    rotated_at = models.DateTimeField(null=True, blank=True, editable=False)
    name = models.CharField(max_length=100, blank=True, help_text="Purpose of the key.")
    dids = models.JSONField(default=list, blank=True, help_text="Agents that the key may act for.", verbose_name="DIDs")
    operator = models.BooleanField(default=False, help_text="The key may act for all agents, in every project.")
    project = models.ForeignKey(
        Project, on_delete=models.PROTECT, default=DEFAULT_PROJECT_ID, db_default=Value(DEFAULT_PROJECT_ID), related_name="+",
        help_text="Project of the key's agents. Without effect for an operator's key.",
    )  # fmt: skip
    scopes = models.JSONField(
        default=default_key_scopes,
        db_default=Value(default_key_scopes(), models.JSONField()),
        help_text="Requests that the key permits.",
    )
    allowed_environment_types = models.JSONField(
        default=list, db_default=Value([], models.JSONField()), blank=True,
        help_text="Environment types of new leases. Empty: every environment type that is not restricted.",
    )  # fmt: skip
    allowed_pools = models.JSONField(
        default=list, db_default=Value([], models.JSONField()), blank=True,
        help_text="Pools of new leases. Empty: every pool that is not restricted, and the pool that the environment type sets.",
    )  # fmt: skip
    created_at = models.DateTimeField(default=timezone.now, editable=False)  # noqa: TID251 - decides nothing
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False, help_text="Accurate to one minute.")
    expires_at = models.DateTimeField(null=True, blank=True, help_text="The key is rejected from then on. Empty: never.")
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)
    tokens = models.FloatField(default=0, editable=False, help_text="Level of the token bucket that limits new leases.")
    tokens_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        verbose_name = "API key"
        default_permissions = ("add", "change", "view")
        permissions = [("revoke_key", "Can revoke API keys")]
        ordering = ["-created_at", "-pk"]

    def __str__(self) -> str:
        return f"{self.prefix}…"
