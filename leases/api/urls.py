"""Routes of the HTTP API for agents under /api/v1/."""

from django.urls import path, register_converter

from leases.api import (
    agent_run_streams,
    agent_runs,
    agents,
    budgets,
    catalog,
    coding,
    egress_connections,
    environment_events,
    environment_rows,
    environments,
    event_streams,
    identity,
    leases,
    llm_calls,
    one_shot,
    pools,
    processes,
    queued_runs,
    records,
    runs,
    shells,
    snapshots,
    streams,
    terminals,
    timeline,
    turns,
)
from leases.api.files import archives, content, operations, signed_urls, watch
from leases.api.stores import artifacts, events, sessions


class AnyPathConverter:
    """Rest of the URL, possibly empty. The view validates the path and reports errors."""

    regex = r"[\s\S]*"

    def to_python(self, value: str) -> str:
        return value

    to_url = to_python


register_converter(AnyPathConverter, "anything")

urlpatterns = [
    path("leases", leases.LeaseListView.as_view()),
    path("leases/renew", leases.LeaseRenewManyView.as_view()),
    path("leases/<uuid:pk>", leases.LeaseView.as_view()),
    path("leases/<uuid:pk>/timeline", timeline.LeaseTimelineView.as_view()),
    path("leases/<uuid:pk>/renew", leases.LeaseRenewView.as_view()),
    path("leases/<uuid:pk>/release", leases.LeaseReleaseView.as_view()),
    path("leases/<uuid:pk>/exec", runs.ExecView.as_view()),
    path("leases/<uuid:pk>/exec/stream", streams.ExecStreamView.as_view()),
    path("leases/<uuid:pk>/turns", turns.TurnListView.as_view()),
    path("leases/<uuid:pk>/runs", runs.RunListView.as_view()),
    path("leases/<uuid:pk>/runs/<uuid:run_id>", runs.RunView.as_view()),
    path("leases/<uuid:pk>/runs/<uuid:run_id>/stream", streams.RunStreamView.as_view()),
    path("leases/<uuid:pk>/agent-runs", agent_runs.AgentRunListView.as_view()),
    path("leases/<uuid:pk>/agent-runs/<uuid:run_id>", agent_runs.AgentRunView.as_view()),
    path("leases/<uuid:pk>/agent-runs/<uuid:run_id>/interrupt", agent_runs.AgentRunInterruptView.as_view()),
    path("leases/<uuid:pk>/agent-runs/<uuid:run_id>/stream", agent_run_streams.AgentRunStreamView.as_view()),
    path("leases/<uuid:pk>/restart", processes.SandboxRestartView.as_view()),
    path("leases/<uuid:pk>/processes", processes.ProcessListView.as_view()),
    path("leases/<uuid:pk>/processes/<uuid:process_id>", processes.ProcessView.as_view()),
    path("leases/<uuid:pk>/processes/<uuid:process_id>/logs", processes.ProcessLogView.as_view()),
    path("leases/<uuid:pk>/processes/<uuid:process_id>/wait", processes.ProcessWaitView.as_view()),
    path("leases/<uuid:pk>/processes/<uuid:process_id>/signal", processes.ProcessSignalView.as_view()),
    path("leases/<uuid:pk>/processes/<uuid:process_id>/stdin", processes.ProcessStdinView.as_view()),
    path("leases/<uuid:pk>/terminals", terminals.TerminalListView.as_view()),
    path("leases/<uuid:pk>/terminals/<uuid:process_id>/url", terminals.TerminalUrlView.as_view()),
    path("leases/<uuid:pk>/previews", terminals.PreviewListView.as_view()),
    path("leases/<uuid:pk>/checkout", coding.CheckoutView.as_view()),
    path("leases/<uuid:pk>/submissions", coding.SubmissionListView.as_view()),
    path("leases/<uuid:pk>/shells", shells.ShellListView.as_view()),
    path("leases/<uuid:pk>/shells/<str:name>", shells.ShellView.as_view()),
    path("leases/<uuid:pk>/files", content.FileListView.as_view()),
    path("leases/<uuid:pk>/mkdir", operations.DirectoryView.as_view()),
    path("leases/<uuid:pk>/move", operations.MoveView.as_view()),
    path("leases/<uuid:pk>/file-urls", signed_urls.FileUrlListView.as_view()),
    path("leases/<uuid:pk>/watch", watch.FileWatchView.as_view()),
    path("signed-files", signed_urls.SignedFileView.as_view()),
    path("leases/<uuid:pk>/files/<anything:path>", content.FileView.as_view()),
    path("leases/<uuid:pk>/archive", archives.ArchiveView.as_view()),
    path("leases/<uuid:pk>/snapshots", snapshots.SnapshotListView.as_view()),
    path("leases/<uuid:pk>/restore", snapshots.SnapshotRestoreView.as_view()),
    path("leases/<uuid:pk>/fork", snapshots.LeaseForkView.as_view()),
    path("leases/<uuid:pk>/chat", events.ChatListView.as_view()),
    path("leases/<uuid:pk>/chat/<str:event_id>", events.ChatMessageView.as_view()),
    path("leases/<uuid:pk>/artifacts", artifacts.ArtifactListView.as_view()),
    path("leases/<uuid:pk>/artifacts/<str:name>", artifacts.ArtifactView.as_view()),
    path("leases/<uuid:pk>/audit", events.AuditListView.as_view()),
    path("leases/<uuid:pk>/audit/<str:event_id>", events.AuditEntryView.as_view()),
    path("leases/<uuid:pk>/sessions", sessions.SessionListView.as_view()),
    path("leases/<uuid:pk>/sessions/<str:session_id>", sessions.SessionView.as_view()),
    path("leases/<uuid:pk>/calls", llm_calls.CallListView.as_view()),
    path("leases/<uuid:pk>/connections", egress_connections.ConnectionListView.as_view()),
    path("leases/<uuid:pk>/records", records.RecordListView.as_view()),
    path("leases/<uuid:pk>/service-token", identity.ServiceTokenView.as_view()),
    path("environments", environment_rows.EnvironmentListView.as_view()),
    path("environments/<str:environment_id>", environment_rows.EnvironmentView.as_view()),
    path("environments/<str:environment_id>/start", environment_rows.EnvironmentStartView.as_view()),
    path("environments/<str:environment_id>/end", environment_rows.EnvironmentEndView.as_view()),
    path("environments/<str:environment_id>/join", environments.EnvironmentJoinView.as_view()),
    path("environments/<str:environment_id>/conditions", environments.EnvironmentConditionView.as_view()),
    path("environments/<str:environment_id>/coding-task", coding.CodingTaskView.as_view()),
    path("environments/<str:environment_id>/secrets", environment_events.EnvironmentSecretListView.as_view()),
    path("environments/<str:environment_id>/events", environment_events.EnvironmentEventListView.as_view()),
    path("runs", one_shot.OneShotRunCreateView.as_view()),
    path("runs/queued", queued_runs.QueuedRunListView.as_view()),
    path("runs/queued/interrupt", queued_runs.QueueInterruptView.as_view()),
    path("runs/queued/<uuid:pk>", queued_runs.QueuedRunView.as_view()),
    path("runs/queued/<uuid:pk>/interrupt", queued_runs.QueuedRunInterruptView.as_view()),
    path("runs/stats", queued_runs.QueueStatsView.as_view()),
    path("agent-catalog", catalog.CatalogView.as_view()),
    path("agent-catalog/<str:catalog_id>", catalog.CatalogAgentView.as_view()),
    path("agent-catalog/<str:catalog_id>/runs", catalog.CatalogRunListView.as_view()),
    path("runs/<uuid:run_id>", one_shot.OneShotRunView.as_view()),
    path("events/stream", event_streams.EventStreamView.as_view()),
    path("budgets", budgets.BudgetListView.as_view()),
    path("pool", pools.PoolListView.as_view()),
    path("agents", agents.AgentListView.as_view()),
    path("agents/<str:did>", agents.AgentView.as_view()),
]
