from django.apps import AppConfig


class ControlplaneConfig(AppConfig):
    """Wiring of the apps: settings, URLs, errors, schedules, health, and commands that span apps."""

    name = "controlplane"

    def ready(self) -> None:
        from controlplane import checks, path_checks  # noqa: F401 - importing registers the checks
