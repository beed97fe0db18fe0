"""/api/v1/: what agents may ask for."""

from django.urls import path, register_converter

from leases.api import budgets, files, identity, leases, llm_calls, one_shot, processes, snapshots, stores


class Anything:
    """The rest of the URL, also when that is empty: the view says what is wrong with it."""

    regex = r"[\s\S]*"

    def to_python(self, value: str) -> str:
        return value

    to_url = to_python


register_converter(Anything, "anything")

urlpatterns = [
    path("leases", leases.Leases.as_view()),
    path("leases/<uuid:pk>", leases.OneLease.as_view()),
    path("leases/<uuid:pk>/renew", leases.Renew.as_view()),
    path("leases/<uuid:pk>/release", leases.Release.as_view()),
    path("leases/<uuid:pk>/exec", leases.Exec.as_view()),
    path("leases/<uuid:pk>/turns", leases.Turns.as_view()),
    path("leases/<uuid:pk>/runs", leases.Runs.as_view()),
    path("leases/<uuid:pk>/runs/<uuid:run_id>", leases.OneRun.as_view()),
    path("leases/<uuid:pk>/processes", processes.Processes.as_view()),
    path("leases/<uuid:pk>/processes/<uuid:process_id>", processes.OneProcess.as_view()),
    path("leases/<uuid:pk>/processes/<uuid:process_id>/logs", processes.Logs.as_view()),
    path("leases/<uuid:pk>/files", files.Listing.as_view()),
    path("leases/<uuid:pk>/files/<anything:path>", files.OneFile.as_view()),
    path("leases/<uuid:pk>/archive", files.Archive.as_view()),
    path("leases/<uuid:pk>/snapshots", snapshots.Snapshots.as_view()),
    path("leases/<uuid:pk>/restore", snapshots.Restore.as_view()),
    path("leases/<uuid:pk>/fork", snapshots.Fork.as_view()),
    path("leases/<uuid:pk>/chat", stores.Chat.as_view()),
    path("leases/<uuid:pk>/chat/<str:event_id>", stores.OneMessage.as_view()),
    path("leases/<uuid:pk>/artifacts", stores.ArtifactList.as_view()),
    path("leases/<uuid:pk>/artifacts/<str:name>", stores.OneArtifact.as_view()),
    path("leases/<uuid:pk>/audit", stores.Audit.as_view()),
    path("leases/<uuid:pk>/audit/<str:event_id>", stores.OneEntry.as_view()),
    path("leases/<uuid:pk>/sessions", stores.SessionList.as_view()),
    path("leases/<uuid:pk>/sessions/<str:session_id>", stores.OneSession.as_view()),
    path("leases/<uuid:pk>/calls", llm_calls.Calls.as_view()),
    path("leases/<uuid:pk>/service-token", identity.ServiceToken.as_view()),
    path("environments/<str:environment_id>/join", leases.Join.as_view()),
    path("environments/<str:environment_id>/conditions", leases.Conditions.as_view()),
    path("runs", one_shot.Runs.as_view()),
    path("runs/<uuid:run_id>", one_shot.OneRun.as_view()),
    path("budgets", budgets.Budgets.as_view()),
    path("pool", leases.Pools.as_view()),
    path("agents", leases.Agents.as_view()),
    path("agents/<str:did>", leases.OneAgent.as_view()),
]
