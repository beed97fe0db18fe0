"""Types of the HTTP API. Generated from controlplane/openapi.yaml by .ci/client-schemas: do not edit."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

AgentRunStateEnum = Literal["running", "completed", "failed", "interrupted"]
CliEnum = Literal["claude-code", "codex", "program"]
FailedByEnum = Literal["task", "infrastructure", "limit", "interruption"]
FileEntryKindEnum = Literal["file", "directory", "link", "other"]
LeaseStatusEnum = Literal["active", "expired", "destroyed"]
NetworkEnum = Literal["sealed", "gateway", "open"]
PermissionModeEnum = Literal["default", "acceptEdits", "plan", "bypassPermissions"]
ProcessStateEnum = Literal["running", "exited", "killed", "gone", "failed"]
RestartPolicyEnum = Literal["never", "on_failure", "always"]
StateEnum = Literal["warming", "warm", "running", "waiting", "suspended", "evicting", "cold", "destroying", "destroyed"]
StopFailureKindEnum = Literal["lease", "queued_run", "agent_run", "command", "process"]
UnitEnum = Literal["usd", "hours", "tokens"]


class Agent(TypedDict):
    did: str
    name: str
    project: str
    created_at: str


class AgentRun(TypedDict):
    run_id: str
    lease_id: str
    cli: str
    model: str
    state: AgentRunStateEnum
    failed_by: FailedByEnum | None
    session_id: str
    resumed: bool | None
    policy: dict[str, Any]
    started_at: str
    ended_at: str | None
    interrupted_at: str | None
    violation: str
    message_count: int
    malformed_count: int
    lost_bytes: int
    turn_count: int
    result: str
    is_error: bool | None
    cost_usd: str
    reported_cost_usd: str | None
    exit_code: int | None
    note: str


class EffectiveResources(TypedDict):
    memory_mib: int
    millicpus: int
    disk_mib: int | None
    gpu: int
    gpu_type: str | None
    image: str


class ExecRequest(TypedDict):
    argv: list[str]
    env: NotRequired[dict[str, str]]
    cwd: NotRequired[str]
    shell: NotRequired[str | None]
    run_id: NotRequired[str | None]
    stdin: NotRequired[str]
    timeout_seconds: NotRequired[int | None]


class ExecResult(TypedDict):
    run_id: str
    exit_code: int
    failed_by: FailedByEnum | None
    stdout: str
    stderr: str
    timed_out: bool
    oom: bool
    truncated: bool
    duration_seconds: float
    note: str


class FieldProblem(TypedDict):
    field: str
    detail: str


class FileEntry(TypedDict):
    name: str
    kind: FileEntryKindEnum
    size: int
    mode: str
    mtime: str
    target: str


class FileListing(TypedDict):
    root: str
    path: str
    entries: list[FileEntry]


class JoinRequest(TypedDict):
    agent_did: str
    environment_type: str
    ttl_seconds: NotRequired[int | None]
    max_ttl_seconds: NotRequired[int | None]
    sleep_after: NotRequired[int | str | None]
    auto_stop_seconds: NotRequired[int | None]
    auto_delete_seconds: NotRequired[int | None]
    expiry_conditions: NotRequired[list[str] | None]
    pool: NotRequired[str | None]
    resources: NotRequired[ResourcesRequest | None]
    wait_seconds: NotRequired[int | None]


class Lease(TypedDict):
    id: str
    sandbox_id: str
    agent_did: str
    environment_id: str
    environment_type: str
    status: LeaseStatusEnum
    is_new: bool
    leased_at: str
    last_activity: str
    ttl_seconds: int
    expires_at: str
    max_expires_at: str
    sleep_after: int
    auto_stop_seconds: int | None
    auto_delete_seconds: int | None
    expiry_conditions: list[str]
    ended_at: str | None
    end_reason: str
    failed_by: FailedByEnum | None
    resources: LeaseResources
    sandbox: Sandbox | None


class LeaseResources(TypedDict):
    requested: RequestedResources
    effective: EffectiveResources | None


class NewAgentRunRequest(TypedDict):
    queued: NotRequired[bool]
    priority: NotRequired[int]
    repeatable: NotRequired[bool]
    max_attempts: NotRequired[int]
    pending_timeout_seconds: NotRequired[int]
    run_id: NotRequired[str | None]
    cli: NotRequired[CliEnum]
    prompt: str
    model: NotRequired[str | None]
    permission_mode: NotRequired[PermissionModeEnum]
    system_prompt: NotRequired[str]
    session_id: NotRequired[str | None]
    resume: NotRequired[bool]
    allowed_tools: NotRequired[list[str]]
    denied_commands: NotRequired[list[str]]
    max_turns: NotRequired[int | None]
    max_cost_usd: NotRequired[str | None]
    argv: NotRequired[list[str] | None]
    env: NotRequired[dict[str, str]]
    shell: NotRequired[str | None]
    cwd: NotRequired[str]
    timeout_seconds: NotRequired[int | None]


class NewProcessRequest(TypedDict):
    argv: list[str]
    env: NotRequired[dict[str, str]]
    cwd: NotRequired[str]
    shell: NotRequired[str | None]
    name: NotRequired[str]
    wait_for: NotRequired[str | None]
    wait_for_port: NotRequired[int | None]
    wait_seconds: NotRequired[int]
    keep_awake: NotRequired[bool]
    stdin: NotRequired[bool]
    restart: NotRequired[RestartPolicyEnum]
    max_restarts: NotRequired[int]
    restart_window_seconds: NotRequired[int]
    restart_after_wake: NotRequired[bool]


class PageOfAgent(TypedDict):
    results: list[Agent]
    next: str | None


class PageOfLease(TypedDict):
    results: list[Lease]
    next: str | None


class PageOfProcess(TypedDict):
    results: list[Process]
    next: str | None


class Problem(TypedDict):
    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    operation: str
    provider: str | None
    cause: str | None
    field: NotRequired[str]
    errors: NotRequired[list[FieldProblem]]
    end_reason: NotRequired[str]
    ended_at: NotRequired[str]
    sandbox_reason: NotRequired[str]
    sandbox_detail: NotRequired[str]
    run_id: NotRequired[str]
    outcome: NotRequired[str]
    failed_by: NotRequired[FailedByEnum]
    exit_code: NotRequired[int]
    limit: NotRequired[int | str]
    spent: NotRequired[str]
    unit: NotRequired[UnitEnum]
    resets_at: NotRequired[str | None]
    position: NotRequired[int]
    queue_length: NotRequired[int]
    workspace_bytes: NotRequired[int]
    host: NotRequired[str]
    limit_bytes: NotRequired[int]


class Process(TypedDict):
    process_id: str
    name: str
    argv: list[str]
    cwd: str
    env_names: list[str]
    state: ProcessStateEnum
    keep_awake: bool
    is_terminal: bool
    started_at: str
    ended_at: str | None
    exit_code: int | None
    restart: RestartPolicyEnum
    max_restarts: int
    restart_window_seconds: int
    restart_after_wake: bool
    restarts: int
    restarted_at: str | None
    next_restart_at: str | None
    note: str


class ProcessLog(TypedDict):
    content: str
    start: int
    next: int
    found: bool | None


class RequestedResources(TypedDict):
    memory_mib: int | None
    millicpus: int | None
    size: str | None
    disk_mib: int | None
    gpu: int | None
    gpu_type: str | None
    image: str | None


class ResourcesRequest(TypedDict):
    memory_mib: NotRequired[int | None]
    millicpus: NotRequired[int | None]
    size: NotRequired[str | None]
    disk_mib: NotRequired[int | None]
    gpu: NotRequired[int | None]
    gpu_type: NotRequired[str | None]
    image: NotRequired[str | None]


class Sandbox(TypedDict):
    id: str
    state: StateEnum
    provider: str
    isolated: bool
    runtime: str | None
    network: NetworkEnum
    sealed: bool


class StartedProcess(TypedDict):
    process_id: str
    name: str
    argv: list[str]
    cwd: str
    env_names: list[str]
    state: ProcessStateEnum
    keep_awake: bool
    is_terminal: bool
    started_at: str
    ended_at: str | None
    exit_code: int | None
    restart: RestartPolicyEnum
    max_restarts: int
    restart_window_seconds: int
    restart_after_wake: bool
    restarts: int
    restarted_at: str | None
    next_restart_at: str | None
    note: str
    found: bool | None


class StopFailure(TypedDict):
    kind: StopFailureKindEnum
    id: str
    detail: str


class Stopped(TypedDict):
    queued_runs: int
    agent_runs: int
    commands: int
    processes: int
    leases: list[str]
    failures: list[StopFailure]
