"""What an operator may loosen for sandboxes: a named policy, never a flag of one request. Without one they are sealed."""

from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db.models import BooleanField, CharField, CheckConstraint, JSONField, Model, PositiveIntegerField, Q, SlugField

SEALED_POLICY_NAME = "sealed"  # the policy that loosens nothing, which also holds where none is named
MAX_BODY_KIB = 1 << 16  # of any policy: a request is held in memory


def check_models(value: Any) -> None:
    fits = isinstance(value, list) and len(value) <= 64
    if not fits or not all(isinstance(name, str) and 0 < len(name) <= 200 for name in value):
        raise ValidationError("A list of at most 64 names or patterns, each of at most 200 characters.")


class Policy(Model):
    """What sandboxes of some environment types may do beyond the rest. The defaults are the seal."""

    name = SlugField(max_length=63, unique=True)
    description = CharField(max_length=200, blank=True, help_text="Who needs it, and for what.")
    writable_root = BooleanField(
        default=False,
        help_text="Programs may write wherever the image lets their user, not only in /workspace, /data and memory. What they "
        "write elsewhere is not stored: it is gone once the sandbox sleeps, and nothing limits its size. A change holds for "
        "sandboxes that start or wake afterwards. None that was started ahead of demand fits: each start takes its time.",
    )
    models = JSONField(
        default=list, blank=True, validators=[check_models],
        help_text='The models that may be called: names, or patterns such as "gpt-4o*". Empty: what LEASEHOLD_LLM_MODELS says.',
    )  # fmt: skip
    calls_per_minute = PositiveIntegerField(
        default=600, validators=[MinValueValidator(1)], help_text="Calls of one sandbox that may begin within a minute."
    )
    most_calls_at_once = PositiveIntegerField(
        default=8, validators=[MinValueValidator(1)], help_text="Calls of one sandbox that may be under way."
    )
    largest_body_kib = PositiveIntegerField(
        default=4096, validators=[MinValueValidator(1), MaxValueValidator(MAX_BODY_KIB)],
        help_text=f"Of one request to a model, in KiB; at most {MAX_BODY_KIB:,}.",
    )  # fmt: skip
    relay = BooleanField(default=False, help_text="May connect to the relay, and so publish in its agent's name.")

    class Meta:
        verbose_name_plural = "policies"
        default_permissions = ("add", "change", "view")
        ordering = ["name"]
        constraints = [
            CheckConstraint(
                condition=~Q(name=SEALED_POLICY_NAME)
                | Q(
                    writable_root=False, relay=False, calls_per_minute=600, most_calls_at_once=8, largest_body_kib=4096
                ),
                name="policy_sealed_loosens_nothing",
                violation_error_message=f"{SEALED_POLICY_NAME} loosens nothing: give another policy another name.",
            ),
        ]  # fmt: skip

    def __str__(self) -> str:
        return self.name

    @property
    def built_in(self) -> bool:
        return self.name == SEALED_POLICY_NAME
