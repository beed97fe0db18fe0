from django.apps import AppConfig
from django.conf import settings


class ControlplaneConfig(AppConfig):
    """Wiring only: settings, urls, errors, schedules, health, and the commands that span apps."""

    name = "controlplane"

    def ready(self) -> None:
        from controlplane import checks, supervisor  # noqa: F401 - checks register themselves

        if settings.INSTANCE.startswith(supervisor.INSTANCE_PREFIX):
            supervisor.tie_descendants()
