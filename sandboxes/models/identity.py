"""Signing keys and service tokens: columns, constraints and indexes. The verbs are in sandboxes.identity."""

import uuid

from django.db import models
from django.db.models import Q

from sandboxes.db.message_fields import MessageField
from sandboxes.db.prefix_index import PrefixIndex

ACTIVE_KEY_FILTER = Q(retired_at__isnull=True, revoked_at__isnull=True)


class SigningKey(models.Model):
    """One signing key of an agent. At most one is active. Retiring or revoking a key deletes its private half."""

    class Algorithm(models.TextChoices):
        ES256K = "ES256K", "ES256K (secp256k1)"
        ES256 = "ES256", "ES256 (P-256)"

    agent_did = models.CharField(max_length=255, verbose_name="agent")
    algorithm = models.CharField(max_length=8, choices=Algorithm.choices, default=Algorithm.ES256K)
    public_key = models.CharField(max_length=64, unique=True, help_text="Multibase, as in did:key.")
    sealed = models.BinaryField(null=True, editable=False, help_text="Private key, encrypted by sandboxes.db.encryption.")
    created_at = models.DateTimeField()
    created_by = MessageField(max_length=255, blank=True)
    retired_at = models.DateTimeField(null=True, blank=True, help_text="Time of rotation to another key.")
    revoked_at = models.DateTimeField(null=True, blank=True)
    ended_by = MessageField(max_length=255, blank=True, help_text="Operator or agent that retired or revoked the key.")

    class Meta:
        default_permissions = ("view",)
        permissions = [("manage_identity", "Can create, rotate and revoke signing keys")]
        ordering = ["-created_at", "-pk"]
        constraints = [
            models.UniqueConstraint(fields=["agent_did"], condition=ACTIVE_KEY_FILTER, name="signingkey_one_active"),
            models.CheckConstraint(
                condition=Q(retired_at__isnull=True) | Q(revoked_at__isnull=True), name="signingkey_ended_once"
            ),
            models.CheckConstraint(
                condition=(ACTIVE_KEY_FILTER & Q(sealed__isnull=False)) | (~ACTIVE_KEY_FILTER & Q(sealed__isnull=True)),
                name="signingkey_private_iff_active",
            ),
        ]
        indexes = [
            models.Index(fields=["-created_at", "-id"], name="signingkey_newest"),
            models.Index(fields=["agent_did", "-id"], name="signingkey_agent"),
        ]

    def __str__(self) -> str:
        return self.did_key

    @property
    def did_key(self) -> str:
        return f"did:key:{self.public_key}"

    @property
    def is_active(self) -> bool:
        return self.retired_at is None and self.revoked_at is None


class MintedToken(models.Model):
    """Record of one minted service token: issuer, audience, method and expiry. The token itself is not stored."""

    jti = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    holder = models.UUIDField(null=True, blank=True)
    agent_did = models.CharField(max_length=255, verbose_name="agent")
    key = models.ForeignKey(SigningKey, on_delete=models.PROTECT, related_name="tokens", db_index=False)
    aud = models.CharField(max_length=320, verbose_name="audience")
    lxm = models.CharField(max_length=317, verbose_name="method")
    at = models.DateTimeField()
    expires_at = models.DateTimeField()
    actor = MessageField(max_length=255, blank=True)

    class Meta:
        verbose_name = "service token"
        default_permissions = ("view",)
        ordering = ["-at", "-pk"]
        constraints = [models.CheckConstraint(condition=Q(expires_at__gt=models.F("at")), name="mintedtoken_ends_later")]
        indexes = [
            models.Index(fields=["-at", "-jti"], name="mintedtoken_newest"),
            models.Index(fields=["key", "-at"], name="mintedtoken_key"),
            models.Index(fields=["holder", "-at"], name="mintedtoken_holder"),
            # Also for prefix searches: PostgreSQL cannot use an index in the order of a language for LIKE.
            models.Index(
                fields=["agent_did", "-at"],
                opclasses=["varchar_pattern_ops", "timestamptz_ops"],
                name="mintedtoken_agent_prefix",
            ),
            PrefixIndex(fields=["aud"], name="mintedtoken_aud_prefix"),
            PrefixIndex(fields=["lxm"], name="mintedtoken_lxm_prefix"),
        ]

    def __str__(self) -> str:
        return self.jti.hex
