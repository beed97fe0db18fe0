"""/api/v1/: what agents may ask for."""

from django.urls import path, register_converter

from leases import api, api_budgets, api_calls, api_files, api_identity, api_once, api_processes, api_snapshots, api_stores


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
    path("leases/<uuid:pk>/processes", api_processes.Processes.as_view()),
    path("leases/<uuid:pk>/processes/<uuid:process_id>", api_processes.OneProcess.as_view()),
    path("leases/<uuid:pk>/processes/<uuid:process_id>/logs", api_processes.Logs.as_view()),
    path("leases/<uuid:pk>/files", api_files.Listing.as_view()),
    path("leases/<uuid:pk>/files/<anything:path>", api_files.OneFile.as_view()),
    path("leases/<uuid:pk>/archive", api_files.Archive.as_view()),
    path("leases/<uuid:pk>/snapshots", api_snapshots.Snapshots.as_view()),
    path("leases/<uuid:pk>/restore", api_snapshots.Restore.as_view()),
    path("leases/<uuid:pk>/fork", api_snapshots.Fork.as_view()),
    path("leases/<uuid:pk>/chat", api_stores.Chat.as_view()),
    path("leases/<uuid:pk>/chat/<str:event_id>", api_stores.OneMessage.as_view()),
    path("leases/<uuid:pk>/artifacts", api_stores.ArtifactList.as_view()),
    path("leases/<uuid:pk>/artifacts/<str:name>", api_stores.OneArtifact.as_view()),
    path("leases/<uuid:pk>/audit", api_stores.Audit.as_view()),
    path("leases/<uuid:pk>/audit/<str:event_id>", api_stores.OneEntry.as_view()),
    path("leases/<uuid:pk>/sessions", api_stores.SessionList.as_view()),
    path("leases/<uuid:pk>/sessions/<str:session_id>", api_stores.OneSession.as_view()),
    path("leases/<uuid:pk>/calls", api_calls.Calls.as_view()),
    path("leases/<uuid:pk>/service-token", api_identity.ServiceToken.as_view()),
    path("environments/<str:environment_id>/join", api.Join.as_view()),
    path("environments/<str:environment_id>/conditions", api.Conditions.as_view()),
    path("runs", api_once.Runs.as_view()),
    path("runs/<uuid:run_id>", api_once.OneRun.as_view()),
    path("budgets", api_budgets.Budgets.as_view()),
    path("pool", api.Pools.as_view()),
    path("agents", api.Agents.as_view()),
    path("agents/<str:did>", api.OneAgent.as_view()),
]
