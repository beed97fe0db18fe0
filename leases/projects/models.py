"""Table of projects."""

from django.db import models
from django.utils import timezone

DEFAULT_PROJECT_ID = 1  # inserted by a migration


class Project(models.Model):
    """Tenant of an installation. Its agents' keys see nothing of another project.

    An agent belongs to one project, and so do an API key and all agents of its list. Billing accounts are independent of
    projects: an account pays, and its memberships are dated."""

    name = models.SlugField(max_length=63, unique=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)  # noqa: TID251 - decides nothing

    class Meta:
        default_permissions = ("add", "view")
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name
