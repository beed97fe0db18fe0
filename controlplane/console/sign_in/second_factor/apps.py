from django.apps import AppConfig


class SecondFactorConfig(AppConfig):
    name = "controlplane.console.sign_in.second_factor"
    label = "second_factor"
