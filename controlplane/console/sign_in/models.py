"""Model of the throttle of sign-ins."""

from django.db import models


class SignInThrottle(models.Model):
    """Failed attempts of one user name, client address, browser or user's codes, and the time of the next permitted attempt."""

    class Kind(models.TextChoices):
        NAME = "name", "user name"
        ADDRESS = "address", "client address"
        BROWSER = "browser", "browser that has signed in before"
        CODE = "code", "second factor of a user"
        USER = "user", "current password of a signed-in user"

    kind = models.CharField(max_length=8, choices=Kind.choices)
    digest = models.CharField(max_length=64)  # of the value: people type passwords in the field of the user name
    failures = models.PositiveIntegerField(default=0)
    next_allowed_at = models.DateTimeField()
    last_attempt_at = models.DateTimeField(db_index=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["kind", "digest"], name="sign_in_throttle_key")]

    def __str__(self) -> str:
        return f"{self.kind} {self.digest[:8]}"
