"""Catalog of runnable agents: a harness with its model, its limits and the environment type in which it runs."""

from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils import timezone

from leases.agent_runs.clis.base import PERMISSION_MODES, AgentOptions
from leases.agent_runs.clis.registry import CLIS
from leases.agent_runs.policy import MAX_PATTERNS, AgentPolicy
from leases.errors import InvalidRequest

ID_PREFIX = "sandbox:"
ENVIRONMENT_ID_PREFIX = "catalog:"  # environment of runs that name none, followed by the agent's name


def check_words(value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(word, str) and "\0" not in word for word in value):
        raise ValidationError("Must be a list of strings.")


def check_patterns(value: Any) -> None:
    fits = isinstance(value, list) and len(value) <= MAX_PATTERNS
    if not fits or not all(isinstance(word, str) and 0 < len(word) <= 200 and "\0" not in word for word in value):
        raise ValidationError(f"Must be a list of at most {MAX_PATTERNS} names or patterns, each of at most 200 characters.")


class CatalogAgent(models.Model):
    """Agent that clients run by its id, `sandbox:<name>`. Its environment type has the pack, the pool and the policy."""

    name = models.SlugField(max_length=63, unique=True)
    title = models.CharField(max_length=100)
    description = models.CharField(max_length=500, blank=True)
    environment_type = models.ForeignKey("leases.EnvironmentType", on_delete=models.PROTECT, related_name="+")
    cli = models.CharField(
        max_length=32, choices=[(name, name) for name in sorted(CLIS)], default="claude-code", verbose_name="agent CLI"
    )
    argv = models.JSONField(
        default=list, blank=True, validators=[check_words], help_text="With the CLI program: the program and its arguments."
    )
    model = models.CharField(max_length=200, blank=True, help_text="Empty: that of the CLI.")
    permission_mode = models.CharField(max_length=32, choices=[(mode, mode) for mode in PERMISSION_MODES], default="default")
    system_prompt = models.TextField(blank=True, help_text="Appended to that of the CLI.")
    allowed_tools = models.JSONField(
        default=list,
        blank=True,
        validators=[check_patterns],
        help_text="Tools that the agent may use. Empty: all that the policy allows.",
    )
    denied_commands = models.JSONField(
        default=list,
        blank=True,
        validators=[check_patterns],
        help_text='Shell commands that interrupt a run, such as "git push*".',
    )
    max_turns = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(1), MaxValueValidator(10_000)], help_text="Empty: no limit."
    )
    max_cost = models.DecimalField(
        max_digits=18, decimal_places=9, null=True, blank=True, validators=[MinValueValidator(0)],
        help_text="Of the model calls of one run, USD. Empty: no limit.",
    )  # fmt: skip
    created_at = models.DateTimeField(default=timezone.now, editable=False)  # noqa: TID251 - decides nothing
    enabled = models.BooleanField(default=True, help_text="Listed, and can be run by clients.")

    class Meta:
        ordering = ["name"]
        verbose_name = "catalog agent"

    def __str__(self) -> str:
        return self.catalog_id

    @property
    def catalog_id(self) -> str:
        return f"{ID_PREFIX}{self.name}"

    @property
    def limits(self) -> AgentPolicy:
        return AgentPolicy(tuple(self.allowed_tools), tuple(self.denied_commands), self.max_turns, self.max_cost)

    def clean(self) -> None:
        if self.cli not in CLIS:
            return  # reported by the field's own validation
        options = AgentOptions(
            "", model=self.model, permission_mode=self.permission_mode, system_prompt=self.system_prompt, argv=tuple(self.argv)
        )
        try:
            CLIS[self.cli].check(options)
        except InvalidRequest as error:
            raise ValidationError({str(error.extra["field"]): str(error)}) from None
