"""/api/v1/: what agents may ask for."""

from django.urls import path, register_converter

from leases import api


class Anything:
    """The rest of the URL, also when that is empty: the view says what is wrong with it."""

    regex = r"[\s\S]*"

    def to_python(self, value: str) -> str:
        return value

    to_url = to_python


register_converter(Anything, "anything")

urlpatterns = [
    path("leases", api.Leases.as_view()),
    path("leases/<uuid:pk>", api.OneLease.as_view()),
    path("leases/<uuid:pk>/renew", api.Renew.as_view()),
    path("leases/<uuid:pk>/release", api.Release.as_view()),
    path("leases/<uuid:pk>/exec", api.Exec.as_view()),
    path("leases/<uuid:pk>/turns", api.Turns.as_view()),
    path("leases/<uuid:pk>/runs", api.Runs.as_view()),
    path("leases/<uuid:pk>/runs/<uuid:run_id>", api.OneRun.as_view()),
    path("leases/<uuid:pk>/files/<anything:path>", api.Files.as_view()),
    path("environments/<str:environment_id>/join", api.Join.as_view()),
    path("environments/<str:environment_id>/conditions", api.Conditions.as_view()),
    path("pool", api.Pools.as_view()),
    path("agents", api.Agents.as_view()),
    path("agents/<str:did>", api.OneAgent.as_view()),
]
