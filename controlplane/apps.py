from django.apps import AppConfig
from django.conf import settings


class ControlplaneConfig(AppConfig):
    """Wiring of the apps: settings, URLs, errors, schedules, health, and commands that span apps."""

    name = "controlplane"

    def ready(self) -> None:
        from controlplane import checks, supervisor  # noqa: F401 - importing registers the checks

        if settings.INSTANCE.startswith(supervisor.INSTANCE_PREFIX):
            supervisor.tie_descendants()
