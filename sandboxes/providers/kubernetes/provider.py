"""Kubernetes provider: sandboxes as Pods of one namespace, without an operator or resources of its own in the cluster.

The name of the Pod is the name of the sandbox and its ref. Process 1 is the agent, which joins the gateway over TLS; commands,
files and processes go through it and never through the API server. A Pod is not restarted: one that has ended is lost, with
everything that was not stored. Its volumes are directories of its node."""

import time
import uuid
from abc import ABC
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import BinaryIO

import structlog
from django.conf import settings

from sandboxes.agent.client import AgentOutdated, ConnectionLost, NotConnected
from sandboxes.agent.protocol import ProtocolError
from sandboxes.agent.runs import RESPONSE_SECONDS, AgentClient, AgentRun, NotStarted
from sandboxes.providers.agent import runs
from sandboxes.providers.agent.commands import AgentCommandProvider
from sandboxes.providers.agent.files import AgentFilesProvider
from sandboxes.providers.agent.liveness import AgentLivenessProvider
from sandboxes.providers.agent.processes import AgentProcessesProvider
from sandboxes.providers.answer_guard import guard_answers
from sandboxes.providers.arguments import check_command
from sandboxes.providers.base import WORKSPACE, Network, ProviderSandbox, ResourceUsage, SandboxSpec
from sandboxes.providers.command_results import ExecResult, ExecState, OutputView
from sandboxes.providers.engine_reports import EngineQuota, SealReport, SetupProblem
from sandboxes.providers.errors import FailureCause, Missing, ProviderError, Rejected, Unavailable
from sandboxes.providers.file_verbs import raise_for_exit_code
from sandboxes.providers.kubernetes.agent_sandboxes import SandboxObjectClient
from sandboxes.providers.kubernetes.configuration import KubernetesConfiguration, ObjectKind, get_configuration
from sandboxes.providers.kubernetes.permissions import find_problems
from sandboxes.providers.kubernetes.pod_exec import run_in_pod
from sandboxes.providers.kubernetes.pod_spec import ANY_OWNER, OWNER_LABEL
from sandboxes.providers.kubernetes.pod_watch import PodWatch
from sandboxes.providers.kubernetes.pods import PodClient, to_sandbox
from sandboxes.providers.kubernetes.readiness import Readiness
from sandboxes.providers.kubernetes.records import PodRecords, create_records
from sandboxes.providers.kubernetes.resource_quotas import read_quotas
from sandboxes.providers.kubernetes.seal import SealCheck
from sandboxes.providers.launcher import PYTHON_COMMAND

log = structlog.get_logger(__name__)
PING_TIMEOUT = timedelta(seconds=2)
KILL_TIMEOUT = timedelta(seconds=20)  # of a command that kills the processes of another one
CHECK_INTERVAL_SECONDS = 2.0  # between two looks at the Pod of a sandbox whose agent does not respond
FILE_SECONDS, MAX_FILE_BYTES = 60.0, 64 << 20  # of one file operation by pods/exec
HOME = f"{WORKSPACE}/.home"
KILL_ALL_SCRIPT = "import os, signal; os.kill(-1, signal.SIGKILL)"  # all but process 1 and the script itself


@guard_answers
class PodCommandProvider(AgentCommandProvider, ABC):
    """Command verbs of KubernetesProvider: by the agent alone."""

    def __init__(self, configuration: KubernetesConfiguration | None = None, records: PodRecords | None = None) -> None:
        self.configuration = configuration or get_configuration()
        self.records = records or create_records()
        is_plain = self.configuration.object_kind == ObjectKind.POD
        self.pods = (PodClient if is_plain else SandboxObjectClient)(self.configuration, self.records)
        self.pod_watch = PodWatch(self.pods)
        self._checked_at: dict[str, float] = {}  # ref -> monotonic time of the last look at a Pod without a response

    def exec(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str = WORKSPACE,
        stdin: bytes = b"",
        timeout: timedelta,
        cap: int = 1 << 20,
        mark: str,
        output: OutputView | None = None,
        retain: bool = False,
        digest_data: bool = False,
    ) -> ExecResult:
        check_command(argv, env, cwd)
        run = self._build_run(argv, env, cwd, stdin, timeout, cap, mark, retain=retain, digest_data=digest_data)
        run = replace(run, may_stream=True)  # there is no other way into the sandbox
        result = self._exec_by_agent(ref, run, output or OutputView(), retain=retain)
        if result is None and self.configuration.exec_fallback:
            return self._exec_by_api_server(ref, run)
        if result is None:
            raise self._build_unreachable_error(ref)
        return result

    def _exec_by_api_server(self, ref: str, run: AgentRun) -> ExecResult:
        """Execute a command without the agent, see pod_exec."""
        path = self.pods.path("pods", ref)
        return run_in_pod(
            self.pods.api, path, run.argv, env=run.env, cwd=run.cwd, stdin=run.stdin, timeout=run.timeout, cap=run.cap
        )

    def _build_unreachable_error(self, ref: str) -> Unavailable:
        """Build the error of a sandbox whose agent is not connected. Raise Missing if the sandbox has ended."""
        self.pods.read_live(ref)
        message = f"The agent of {ref} is not connected to the gateway."
        return Unavailable(message, cause=FailureCause.AGENT_NOT_CONNECTED)

    def _find_agent(self, ref: str) -> AgentClient | None:
        return self.records.find_agent(ref)

    def _require_running(self, ref: str, since: float) -> None:
        """See AgentCommandProvider. A look at the Pod is not repeated within CHECK_INTERVAL_SECONDS.

        An API server that does not respond proves nothing: the agent may connect again all the same."""
        now = time.monotonic()
        if now - self._checked_at.get(ref, -CHECK_INTERVAL_SECONDS) < CHECK_INTERVAL_SECONDS:
            return
        if len(self._checked_at) > 10_000:
            self._checked_at.clear()
        self._checked_at[ref] = now
        try:
            self.pods.read_live(ref)
        except Missing:
            raise
        except ProviderError as error:
            log.info("Pod not read", ref=ref, error=str(error))

    def _has_stopped(self, ref: str, since: float) -> bool:
        self.pods.read_live(ref)  # a Pod is not restarted
        return False

    def _kill_from_outside(self, ref: str, mark: str) -> None:
        """Do nothing: no one else reaches the processes. The agent kills a command at its deadline, connected or not."""

    def _note_fallback(self, ref: str, error: NotStarted, mark: str = "") -> None:
        """Raise the error, unless pods/exec is permitted for debugging. Raise Missing if the sandbox has ended."""
        self.pods.read_live(ref)
        if self.configuration.exec_fallback and error.reason == "not_connected":
            log.warning("exec by the API server", ref=ref, run=mark, reason=str(error))
            return
        raise Unavailable(f"The agent of {ref} has started nothing: {error}") from error  # whose cause states why

    def find_exec(self, ref: str, mark: str) -> ExecState | None:
        """See Provider. An agent that does not respond may connect to another gateway: the state is not known until then."""
        agent = self._find_agent(ref)
        try:
            return runs.read_state(agent, mark) if agent else None
        except AgentOutdated as error:
            self.pods.read_live(ref)
            raise Unavailable(f"The agent of {ref} is not spoken with: {error}") from error
        except (NotConnected, ConnectionLost) as error:
            raise self._build_unreachable_error(ref) from error

    def kill(self, ref: str, mark: str) -> None:
        self.pods.read_live(ref)
        agent = self._find_agent(ref)
        if agent is not None and runs.kill(agent, mark):
            return
        argv = [*PYTHON_COMMAND, "/opt/leasehold/reap.py", mark]  # a command of the control plane has another id than its mark
        result = self.exec(ref, argv, env={}, cwd="/", timeout=KILL_TIMEOUT, mark=f"kill-{uuid.uuid4().hex}")
        if result.exit_code != 0:
            raise Unavailable(f"The processes of exec {mark} in {ref} could not be killed.")


@guard_answers
class KubernetesProvider(PodCommandProvider, AgentFilesProvider, AgentProcessesProvider, AgentLivenessProvider):
    """Provider for one namespace of a cluster: LEASEHOLD_KUBERNETES_NAMESPACE."""

    name = "kubernetes"
    network = Network.SEALED
    proves_isolation = True
    agents_join = True
    announces_end = True
    watches_ends = True
    has_quotas = True
    enforces_limits = True  # no field of a Pod limits the number of processes: limits_processes is false
    measures_usage = True
    streams_output = True
    has_terminals = True
    can_set_disk = True
    no_builds_reason = "Build the image elsewhere, and set its name in a registry of the cluster as the image of the pool."
    can_suspend = False

    @property
    def isolated(self) -> bool:  # type: ignore[override]
        """Return whether the last check has shown that a sandbox reaches the gateway alone."""
        return self.records.is_sealed(self.last_engine_id())

    @property
    def max_lifetime(self) -> timedelta:  # type: ignore[override]
        return self.configuration.lifetime

    @property
    def pending_timeout(self) -> timedelta:  # type: ignore[override]
        return self.configuration.scale_timeout

    def engine_id(self) -> str:
        """Return the uid of the namespace, which no other cluster has."""
        try:
            namespace = self.pods.api.read(f"/api/v1/namespaces/{self.configuration.namespace}", "Namespace")
        except Missing as error:  # of the namespace, and not of a sandbox
            raise Unavailable(str(error), cause=FailureCause.ENGINE_ERROR) from error
        self._engine_id = str(namespace["metadata"]["uid"])
        return self._engine_id

    def last_engine_id(self) -> str:
        return getattr(self, "_engine_id", "") or self.engine_id()

    def ping(self) -> None:
        self.engine_id()

    def watch_ends(self, *, timeout: timedelta) -> Generator[ProviderSandbox, None, None]:
        return self.pod_watch.iter_ends(timeout)

    def read_quotas(self) -> Sequence[EngineQuota]:
        return read_quotas(self.pods.api, self.configuration)

    def find_setup_problems(self) -> Sequence[SetupProblem]:
        return find_problems(self.pods.api, self.configuration)

    def check_seal(self) -> SealReport:
        return SealCheck(self.pods, str(settings.SANDBOX_IMAGE), str(settings.GATEWAY_URL)).run()

    # Lifecycle

    def create(self, spec: SandboxSpec) -> str:
        self.pods.create(spec)
        return spec.name

    def wait_ready(self, ref: str, *, timeout: timedelta) -> None:
        Readiness(self.pods, ref, timeout=timeout).wait(lambda: self._has_joined(ref))
        self.make_directory(ref, HOME)  # the volume is empty

    def _has_joined(self, ref: str) -> bool:
        """Return whether the agent of a new Pod responds. Raise Rejected if its image has the agent of another version."""
        agent = self._find_agent(ref)
        try:
            if agent is not None:
                agent.ping(timeout=PING_TIMEOUT.total_seconds())
        except AgentOutdated as error:
            message = f"{ref} cannot be used: its image has the agent of another version of Leasehold. Build the image again."
            raise Rejected(message, cause=FailureCause.AGENT_OUTDATED) from error
        except (NotConnected, ConnectionLost, ProtocolError):
            return False
        return agent is not None

    def restart(self, ref: str) -> None:
        """Kill all processes but the agent. A Pod whose agent does not respond cannot be restarted with its files."""
        argv = [*PYTHON_COMMAND, "-c", KILL_ALL_SCRIPT]
        self.exec(ref, argv, env={}, cwd="/", timeout=KILL_TIMEOUT, mark=f"restart-{uuid.uuid4().hex}")

    def destroy(self, ref: str) -> None:
        self.pods.destroy(ref)
        self._checked_at.pop(ref, None)

    def inspect(self, ref: str) -> ProviderSandbox:
        return to_sandbox(self.pods.read_live(ref))

    def _require_existing(self, ref: str) -> None:
        self.pods.read_live(ref)

    # Without an equivalent

    def suspend(self, ref: str) -> None:
        raise Rejected("Pods cannot be suspended.")

    def resume(self, ref: str) -> None:
        self.pods.read_live(ref)

    # Measurement and files

    def stats(self, ref: str) -> ResourceUsage | None:
        agent = self._find_agent(ref)
        try:
            if agent is not None:
                with agent.open(0.0) as connection:
                    head = connection.request({"verb": "stats"}, timeout=RESPONSE_SECONDS).head
                return ResourceUsage(int(head["cpu_micros"]), int(head["memory_bytes"]))
        except (NotConnected, ConnectionLost, ProtocolError, KeyError, ValueError, TypeError):
            pass
        self.pods.read_live(ref)
        return None

    def list_all(self) -> list[ProviderSandbox]:
        return self.pods.list_sandboxes(ANY_OWNER)

    def list(self, owner: str) -> list[ProviderSandbox]:
        return self.pods.list_sandboxes(f"{OWNER_LABEL}={owner}")

    def _stream_output_by_engine(self, ref: str, words: Sequence[str], stdin: BinaryIO | None) -> Iterator[bytes]:
        if not self.configuration.exec_fallback:
            raise self._build_unreachable_error(ref)
        run = AgentRun("", (*PYTHON_COMMAND, "/opt/leasehold/files.py", *words), {}, "/", FILE_SECONDS)
        run = replace(run, stdin=stdin.read() if stdin else b"", cap=MAX_FILE_BYTES)
        result = self._exec_by_api_server(ref, run)
        raise_for_exit_code(result.exit_code, result.stderr.decode(errors="replace"))
        yield result.stdout
