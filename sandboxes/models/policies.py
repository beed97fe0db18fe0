"""Sandbox policies: named exceptions from the sealed default, assigned to environment types by operators."""

import re
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db.models import (
    BooleanField,
    CharField,
    CheckConstraint,
    DecimalField,
    JSONField,
    Model,
    PositiveIntegerField,
    Q,
    SlugField,
    Value,
)

from sandboxes.egress.allow_list.domains import check_allowed_domains
from sandboxes.nsid import MAX_NSID_LENGTH, NSID_DESCRIPTION, NSID_PATTERN

SEALED_POLICY_NAME = "sealed"  # policy without exceptions; applies wherever no policy is named
MAX_BODY_KIB = 1 << 16  # upper bound for every policy: request bodies are held in memory

MCP_TOOLS = ("lease_status", "budget", "put_artifact", "get_artifact", "post_condition", "service_token", "create_record")


def check_models(value: Any) -> None:
    fits = isinstance(value, list) and len(value) <= 64
    if not fits or not all(isinstance(name, str) and 0 < len(name) <= 200 for name in value):
        raise ValidationError("A list of at most 64 names or patterns, each of at most 200 characters.")


def check_mcp_tools(value: Any) -> None:
    if not isinstance(value, list) or not all(name in MCP_TOOLS for name in value) or len({*value}) < len(value):
        raise ValidationError(f"A list of different names out of {', '.join(MCP_TOOLS)}.")


def check_collections(value: Any) -> None:
    if not isinstance(value, list) or len(value) > 64 or not all(isinstance(name, str) for name in value):
        raise ValidationError("A list of at most 64 NSIDs.")
    for name in value:
        if len(name) > MAX_NSID_LENGTH or not re.fullmatch(NSID_PATTERN, name):
            raise ValidationError(f"{name[:80]} is not {NSID_DESCRIPTION}.")


class Policy(Model):
    """Named exceptions for the sandboxes of environment types. The defaults of the fields are the sealed policy."""

    name = SlugField(max_length=63, unique=True)
    description = CharField(max_length=200, blank=True, help_text="Purpose of the policy.")
    writable_root = BooleanField(
        default=False,
        help_text="Writable root file system, as far as the image's permissions allow. Files outside /workspace and /data are "
        "not stored and not limited in size; eviction deletes them. A change applies to sandboxes that start or wake "
        "afterwards. Pre-warmed sandboxes are sealed, so every start is a cold start.",
    )
    models = JSONField(
        default=list, blank=True, validators=[check_models],
        help_text='Allowed models: names or patterns such as "gpt-4o*". Empty: LEASEHOLD_LLM_MODELS.',
    )  # fmt: skip
    calls_per_minute = PositiveIntegerField(
        default=600, validators=[MinValueValidator(1)], help_text="Maximum number of calls of one sandbox within a minute."
    )
    most_calls_at_once = PositiveIntegerField(
        default=8, validators=[MinValueValidator(1)], help_text="Maximum number of concurrent calls of one sandbox."
    )
    largest_body_kib = PositiveIntegerField(
        default=4096, validators=[MinValueValidator(1), MaxValueValidator(MAX_BODY_KIB)],
        help_text=f"Maximum size of one model request, KiB; at most {MAX_BODY_KIB:,}.",
    )  # fmt: skip
    agent_tools = JSONField(
        default=list, db_default=Value([], JSONField()), blank=True, validators=[check_models],
        help_text='Tools that agent CLIs may use, such as "Read" and "Bash". Empty: all.',
    )  # fmt: skip
    agent_denied_commands = JSONField(
        default=list, db_default=Value([], JSONField()), blank=True, validators=[check_models],
        help_text='Shell commands that interrupt an agent CLI: patterns such as "git push*" or "rm -rf *".',
    )  # fmt: skip
    agent_max_turns = PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(1)],
        help_text="Maximum number of model answers in one run of an agent CLI. Empty: no limit.",
    )  # fmt: skip
    agent_max_cost = DecimalField(
        max_digits=18, decimal_places=9, null=True, blank=True, validators=[MinValueValidator(0)],
        help_text="Maximum cost of the model calls of one run of an agent CLI, USD. Empty: no limit.",
    )  # fmt: skip
    previews = BooleanField(
        default=False,
        db_default=False,
        help_text="Preview URLs: programs that listen on a TCP port in the sandbox can be reached from outside by signed URLs.",
    )
    mcp_tools = JSONField(
        default=list, db_default=Value([], JSONField()), blank=True, validators=[check_mcp_tools],
        help_text=f"Tools of the control plane that programs in the sandbox may call: {', '.join(MCP_TOOLS)}. Empty: none.",
    )  # fmt: skip
    record_collections = JSONField(
        default=list, db_default=Value([], JSONField()), blank=True, validators=[check_collections],
        help_text='Collections of the agent\'s AT Protocol repository in which records are created: NSIDs such as '
        '"org.example.game.action". Empty: none.',
    )  # fmt: skip
    relay = BooleanField(default=False, help_text="Access to the relay. Sandboxes can publish in their agent's name.")

    allowed_domains = JSONField(
        default=list, db_default=Value([], JSONField()), blank=True, validators=[check_allowed_domains],
        help_text='Domains that the sandbox reaches through the proxy: "pypi.org", "*.example.org" (names below it) or '
        '"git.example.org:8443"; ports 443 and 80 unless stated. Empty: no network.',
    )  # fmt: skip
    max_connections = PositiveIntegerField(
        default=16, db_default=16, validators=[MinValueValidator(1), MaxValueValidator(64)],
        help_text="Maximum number of concurrent connections of one sandbox to these domains.",
    )  # fmt: skip
    max_connection_mib = PositiveIntegerField(
        default=1024,
        db_default=1024,
        validators=[MinValueValidator(1)],
        help_text="Maximum bytes of one connection in both directions, MiB.",
    )
    max_lease_mib = PositiveIntegerField(
        default=10240, db_default=10240, validators=[MinValueValidator(1)],
        help_text="Maximum bytes of all connections of one lease in both directions, MiB.",
    )  # fmt: skip

    class Meta:
        verbose_name_plural = "policies"
        default_permissions = ("add", "change", "view")
        ordering = ["name"]
        constraints = [
            CheckConstraint(
                condition=~Q(name=SEALED_POLICY_NAME)
                | Q(
                    writable_root=False, relay=False, previews=False, calls_per_minute=600, most_calls_at_once=8,
                    largest_body_kib=4096, mcp_tools=[], allowed_domains=[], record_collections=[],
                ),
                name="policy_sealed_loosens_nothing",
                violation_error_message=f"The {SEALED_POLICY_NAME} policy cannot have exceptions. Add another policy.",
            ),
        ]  # fmt: skip

    def __str__(self) -> str:
        return self.name

    @property
    def built_in(self) -> bool:
        return self.name == SEALED_POLICY_NAME
