from django.apps import AppConfig


class SignInConfig(AppConfig):
    name = "controlplane.console.sign_in"
    label = "sign_in"

    def ready(self) -> None:
        from controlplane.console.sign_in import audit, browsers, checks  # noqa: F401 - importing registers receivers and checks
