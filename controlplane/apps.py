from django.apps import AppConfig


class ControlplaneConfig(AppConfig):
    """Wiring only: settings, urls, errors, schedules, health, and the commands that span apps."""

    name = "controlplane"
