"""Effect of each environment variable that `manage.py config` lists: set to a value, it changes what the system does.

EFFECTS has an entry for each variable: a function that observes the behaviour, or the test that changes the variable, where the
effect needs a service or has a test of its own."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone
from rest_framework.exceptions import ValidationError

from controlplane import env, schedules, webserver
from controlplane.management.commands.up import build_children
from leases import execution, leasing, sweeps, turns
from leases.api.agent_runs import NEW_AGENT_RUN_SERIALIZER
from leases.models import Lease
from leases.retention.sweep import delete_expired
from sandboxes import storage
from sandboxes.egress import nginx_config
from sandboxes.hosts import capacity
from sandboxes.models import Pool, Run
from sandboxes.providers.base import SandboxSpec
from sandboxes.providers.kubernetes.configuration import resolve_gateway
from sandboxes.providers.kubernetes.pod_spec import build_pod
from sandboxes.providers.kubernetes.provider import KubernetesProvider
from sandboxes.providers.kubernetes.records import MemoryRecords
from sandboxes.providers.memory import MemoryProvider
from sandboxes.sweeps import passes
from tests.commands.manage import load_settings
from tests.conftest import MINUTE, NOW
from tests.support.leases import evict, run, write

pytestmark = pytest.mark.django_db
HOUR = 60 * MINUTE
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class World:
    """Pool, leases and provider of one observation."""

    grant: Callable[..., Lease]
    pool: Pool
    memory: MemoryProvider
    settings: Any
    patch: pytest.MonkeyPatch
    numbers: Any = field(default_factory=count)

    def lease(self, **fields: Any) -> Lease:
        return self.grant(environment=f"e{next(self.numbers)}", **fields)

    def record_timeouts(self, verb: str) -> list[timedelta]:
        """Return the list to which the timeout of each further call of a provider verb is appended."""
        timeouts: list[timedelta] = []
        original = getattr(self.memory, verb)

        def recorded(*args: Any, timeout: timedelta, **more: Any) -> Any:
            timeouts.append(timeout)
            return original(*args, timeout=timeout, **more)

        self.patch.setattr(self.memory, verb, recorded)
        return timeouts


def status_of_host(world: World) -> int:
    return Client().get("/admin/login/", HTTP_HOST="x.example").status_code


def status_of_origin(world: World) -> int:
    client = Client(enforce_csrf_checks=True)
    client.get("/admin/login/")
    token = client.cookies["csrftoken"].value
    return client.post("/admin/login/", {"csrfmiddlewaretoken": token}, HTTP_ORIGIN="https://x.example").status_code


def cookies_of_console(world: World) -> list[str]:
    return sorted(Client().get("/admin/login/").cookies)


def image_of_sandbox(world: World) -> str:
    return write(world.lease()).image


def start_timeout(world: World) -> set[timedelta]:
    timeouts = world.record_timeouts("wait_ready")
    write(world.lease())
    return set(timeouts)


def size_of_new_pool(world: World) -> tuple[int, int, int]:
    pool = Pool()
    return pool.memory_mib, pool.millicpus, pool.pids


def sleep_after(world: World) -> timedelta:
    return world.lease().sleep_after


def expired_cold_sandboxes(world: World) -> int:
    lease = world.lease()
    write(lease)
    evict(lease)
    return passes.find_expired_cold(now=NOW + 10 * MINUTE).filter(holder=lease.pk).count()


def orphans_after_reconciliation(world: World) -> int:
    owner = str(world.pool.owner)
    write(world.lease())  # a listing without a known sandbox changes nothing
    before = len(world.memory.list(owner))
    world.memory.create(SandboxSpec(f"orphan-{next(world.numbers)}", owner))
    schedules.reconcile(now=timezone.now() + 10 * MINUTE)
    return len(world.memory.list(owner)) - before


def expired_snapshots(world: World) -> int:
    lease = world.lease()
    write(lease)
    evict(lease)
    leasing.release(lease.pk, now=NOW + MINUTE)
    return sweeps.find_expired_snapshots(now=NOW + HOUR).filter(holder=lease.pk).count()


def expired_leases(world: World) -> int:
    lease = world.lease()
    leasing.release(lease.pk, now=NOW)
    sweeps.reclaim(now=NOW)
    return delete_expired(now=NOW + HOUR).counts.get("leases deleted", 0)


def store_address(backend: str, world: World) -> tuple[object, ...]:
    world.settings.STORAGE_BACKEND = backend
    for name in ("S3_BUCKET", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "KV_NAMESPACE", "KV_ACCOUNT_ID", "KV_API_TOKEN"):
        setattr(world.settings, name, getattr(world.settings, name) or "unset")
    world.settings.S3_ENDPOINT = world.settings.S3_ENDPOINT or "http://127.0.0.1:1"
    store: Any = storage.get_store.__wrapped__()
    if backend == "cloudflare_kv":
        return store._base, store._auth._token
    client = store.client()
    credentials = client._request_signer._credentials
    return store.bucket, client.meta.endpoint_url, client.meta.region_name, credentials.access_key, credentials.secret_key


def exec_timeout(world: World) -> set[timedelta]:
    timeouts = world.record_timeouts("exec")
    with suppress(SystemExit):
        call_command("exec", str(world.lease(now=timezone.now()).pk), "true")
    return set(timeouts)


def is_exec_of_40_seconds_accepted(world: World) -> bool:
    try:
        with suppress(SystemExit):
            call_command("exec", str(world.lease(now=timezone.now()).pk), "true", timeout="40s")
    except CommandError:
        return False
    return True


def is_agent_run_of_40_seconds_accepted(world: World) -> bool:
    try:
        NEW_AGENT_RUN_SERIALIZER.run_validation({"prompt": "x", "timeout_seconds": 40})
    except ValidationError:
        return False
    return True


def is_run_of_5000_mib_accepted(world: World) -> bool:
    try:
        with suppress(SystemExit):
            call_command("run_once", "true", agent="did:plc:ada", memory=5000, pool=world.pool.name)
    except CommandError as error:
        return "Must be from" not in str(error)
    return True


def turn_timeout(world: World) -> set[timedelta]:
    timeouts = world.record_timeouts("exec")
    turns.take_turn(world.lease().pk, 1, {}, now=NOW)
    return set(timeouts)


def summarization(world: World) -> dict[str, int]:
    """Read the part of config.json that tells an agent when to summarize."""
    [content] = execution.build_sandbox_request(world.lease(), now=NOW).files.values()
    found: dict[str, int] = json.loads(content)["summarization"]
    return found


def claimed_by(world: World) -> str:
    lease = world.lease()
    run(lease)
    return Run.objects.get(holder=lease.pk).claimed_by


def child_processes(world: World) -> list[str]:
    return [child.name for child in build_children("127.0.0.1", 8000, with_queue=True)]


def web_threads(world: World) -> int:
    return webserver.build_server("127.0.0.1", 8000).blocking_threads


def capacity_of_default_pool(world: World) -> int:
    capacity.update_automatic_capacities(now=NOW)
    return Pool.objects.get(name="default").capacity


def storage_directory(world: World) -> str:
    return str(storage.get_store.__wrapped__().root)


def log_output(world: World) -> object:
    return world.settings.LOGGING


def pod_of_sandbox(world: World) -> dict[str, Any]:
    spec = SandboxSpec(name="s", owner="o", pool="batch")
    return build_pod(spec, world.settings.KUBERNETES, gateway=resolve_gateway(world.settings.KUBERNETES, "https://localhost:1"))


def kubernetes_provider(world: World) -> tuple[Any, ...]:
    provider = KubernetesProvider(world.settings.KUBERNETES, MemoryRecords())
    read = provider.configuration
    return provider.max_lifetime, provider.pending_timeout, type(provider.pods), read.context, read.exec_fallback


def access_of_agent(world: World) -> str:
    """Return the authority that the agent of a new sandbox is told to trust."""
    specs: list[SandboxSpec] = []
    create = world.memory.create
    world.patch.setattr(MemoryProvider, "agents_join", True)
    world.patch.setattr(world.memory, "create", lambda spec: specs.append(spec) or create(spec))
    run(world.lease())
    world.patch.undo()
    assert specs[0].gateway
    return specs[0].gateway.certificate_authority


TESTS = {  # abbreviations of files
    "addresses": "tests/admin/sign_in/test_addresses.py", "proxy_sign_in": "tests/admin/sign_in/test_proxy.py",
    "console_sessions": "tests/admin/sign_in/test_sessions.py",
    "second_factor": "tests/admin/sign_in/test_second_factor.py",
    "config": "tests/commands/test_config.py", "store": "tests/commands/test_storage_config.py",
    "egress": "tests/unit/sandboxes/egress/test_egress_server.py", "snapshots": "tests/unit/sandboxes/test_snapshots.py",
    "mounts": "tests/unit/sandboxes/state/test_mounts.py", "relay": "tests/egress/test_relay.py",
    "destinations": "tests/unit/sandboxes/egress/allow_list/test_destinations.py",
    "keys": "tests/unit/sandboxes/identity/test_signing_keys.py",
    "docker": "tests/docker/test_provider.py", "up": "tests/e2e/test_up.py", "kill": "tests/e2e/test_kill.py",
    "calls": "tests/egress/test_egress_docker.py", "litellm": "tests/egress/test_litellm_docker.py",
    "front": "tests/egress/test_front_docker.py", "logs": "tests/unit/sandboxes/egress/test_log_collection.py",
    "data": "tests/unit/sandboxes/state/test_data_sync.py", "one_shot": "tests/unit/leases/test_one_shot.py",
    "queue": "tests/races/test_queue.py", "runner": "tests/unit/leases/test_runner.py",
    "streams": "tests/api/sandbox/test_streams.py",
    "tracing": "tests/unit/controlplane/test_tracing.py",
    "terminals": "tests/api/sandbox/test_terminals.py",
    "stream_server": "tests/unit/leases/stream_server/test_server.py",
    "limits": "tests/unit/sandboxes/test_run_limits.py",
    "races": "tests/races/test_budget_races.py", "admission": "tests/unit/billing/test_budget_admission.py",
}  # fmt: skip
# variable -> value ({tmp} is a directory of the test), and the observation that changes with it or "file::test"
SHARED_CONNECTIONS = "tests/unit/sandboxes/db/test_postgresql_pool.py::test_threads_share_the_connections_of_their_process"
GATEWAY_LISTENER = "tests/unit/sandboxes/remote/test_gateway.py::test_gateway_settings_reach_the_listener"
INTERNAL_TLS = "tests/unit/sandboxes/agent/test_remote.py::test_internal_port_over_tls_serves_processes_and_other_gateways"
REMOTE_VARIABLES = "tests/unit/sandboxes/remote/test_lifecycle.py::test_variable_of_a_vendor_is_read_and_takes_precedence"
EFFECTS: dict[str, tuple[str, Callable[[World], object] | str]] = {
    "DEBUG": ("0", "config::test_a_provider_that_does_not_isolate_needs_debug"),
    "SECRET_KEY": ("another", "keys::test_encryption_keys_can_be_replaced_without_losing_a_signing_key"),
    "LEASEHOLD_PUBLIC_URL": ("https://x.example", cookies_of_console),
    "ALLOWED_HOSTS": ("x.example", status_of_host),
    "CSRF_TRUSTED_ORIGINS": ("https://x.example", status_of_origin),
    "LEASEHOLD_STATE_DIR": (
        "{tmp}/effects", "up::test_up_refuses_a_second_up_and_finishes_requests_after_sigterm",
    ),
    "LEASEHOLD_RUNTIME_DIR": ("{tmp}/effects", "config::test_each_check_finds_its_unusable_settings"),
    "LEASEHOLD_INSTANCE": ("up-x.web.1", claimed_by),
    "DATABASE_URL": (
        "sqlite:///{tmp}/effects.sqlite3", "kill::test_a_kill_during_concurrent_joins_leaks_no_container_and_loses_no_lease",
    ),
    "LEASEHOLD_DATABASE_POOLER": (
        "transaction", "tests/e2e/test_pooler.py::test_leases_behind_a_pooler_in_transaction_mode_need_the_setting",
    ),
    "LEASEHOLD_DATABASE_CONNECTIONS": ("3", SHARED_CONNECTIONS),
    "LEASEHOLD_DATABASE_IDLE": ("3s", SHARED_CONNECTIONS),
    "LEASEHOLD_DATABASE_WAIT": ("3s", SHARED_CONNECTIONS),
    "SANDBOX_PROVIDER": ("docker", "config::test_each_check_finds_its_unusable_settings"),
    "LEASEHOLD_ALLOW_UNISOLATED": ("1", "config::test_each_check_finds_its_unusable_settings"),
    "LEASEHOLD_SANDBOX_IMAGE": ("other:1", image_of_sandbox),
    "LEASEHOLD_DOCKER_RUNTIME": ("runsc", "docker::test_runtime_setting_is_passed_to_the_engine"),
    "LEASEHOLD_SANDBOX_AUTO_STOP_MINUTES": ("7", REMOTE_VARIABLES),
    "LEASEHOLD_SANDBOX_AUTO_DELETE_MINUTES": ("8", REMOTE_VARIABLES),
    "CLOUDFLARE_SANDBOX_API_KEY": ("k", REMOTE_VARIABLES),
    "CLOUDFLARE_SANDBOX_URL": ("http://127.0.0.1:1", REMOTE_VARIABLES),
    "DAYTONA_SANDBOX_AUTO_STOP_MINUTES": ("9", REMOTE_VARIABLES),
    "DAYTONA_SANDBOX_AUTO_DELETE_MINUTES": ("9", REMOTE_VARIABLES),
    "DAYTONA_SANDBOX_NETWORK": ("open", REMOTE_VARIABLES),
    "DAYTONA_API_KEY": ("k", REMOTE_VARIABLES),
    "DAYTONA_API_URL": ("http://127.0.0.1:1", REMOTE_VARIABLES),
    "DAYTONA_SANDBOX_IMAGE": ("i", REMOTE_VARIABLES),
    "DAYTONA_TARGET": ("eu", REMOTE_VARIABLES),
    "DAYTONA_ORGANIZATION_ID": ("o", REMOTE_VARIABLES),
    "LANGSMITH_SANDBOX_AUTO_STOP_MINUTES": ("9", REMOTE_VARIABLES),
    "LANGSMITH_SANDBOX_AUTO_DELETE_MINUTES": ("9", REMOTE_VARIABLES),
    "LANGSMITH_SANDBOX_NETWORK": ("open", REMOTE_VARIABLES),
    "LANGSMITH_API_KEY": ("k", REMOTE_VARIABLES),
    "LANGSMITH_ENDPOINT": ("http://127.0.0.1:1", REMOTE_VARIABLES),
    "LANGSMITH_SANDBOX_IMAGE": ("i", REMOTE_VARIABLES),
    "LANGSMITH_WORKSPACE_ID": ("w", REMOTE_VARIABLES),
    "MODAL_SANDBOX_AUTO_STOP_MINUTES": ("9", REMOTE_VARIABLES),
    "MODAL_SANDBOX_NETWORK": ("open", REMOTE_VARIABLES),
    "MODAL_TOKEN_SECRET": ("k", REMOTE_VARIABLES),
    "MODAL_SERVER_URL": ("http://127.0.0.1:1", REMOTE_VARIABLES),
    "MODAL_SANDBOX_IMAGE": ("i", REMOTE_VARIABLES),
    "MODAL_TOKEN_ID": ("t", REMOTE_VARIABLES),
    "MODAL_ENVIRONMENT": ("e", REMOTE_VARIABLES),
    "MODAL_SANDBOX_LIFETIME_MINUTES": ("120", REMOTE_VARIABLES),
    "MODAL_SANDBOX_SNAPSHOT_MIN_MIB": ("64", REMOTE_VARIABLES),
    "RUNLOOP_SANDBOX_AUTO_STOP_MINUTES": ("9", REMOTE_VARIABLES),
    "RUNLOOP_SANDBOX_NETWORK": ("open", REMOTE_VARIABLES),
    "RUNLOOP_API_KEY": ("k", REMOTE_VARIABLES),
    "RUNLOOP_BASE_URL": ("http://127.0.0.1:1", REMOTE_VARIABLES),
    "RUNLOOP_SANDBOX_IMAGE": ("i", REMOTE_VARIABLES),
    "RUNLOOP_SANDBOX_SIZE": ("LARGE", REMOTE_VARIABLES),
    "RUNLOOP_ACCOUNT": ("a", REMOTE_VARIABLES),
    "LEASEHOLD_KUBERNETES_CONTEXT": ("other", kubernetes_provider),
    "LEASEHOLD_KUBERNETES_NAMESPACE": ("other", pod_of_sandbox),
    "LEASEHOLD_KUBERNETES_RUNTIME_CLASS": ("gvisor", pod_of_sandbox),
    "LEASEHOLD_KUBERNETES_POOL_RUNTIME_CLASSES": ("batch=kata", pod_of_sandbox),
    "LEASEHOLD_KUBERNETES_PRIORITY_CLASS": ("low", pod_of_sandbox),
    "LEASEHOLD_KUBERNETES_SERVICE_ACCOUNT": ("other", pod_of_sandbox),
    "LEASEHOLD_KUBERNETES_PULL_SECRET": ("registry", pod_of_sandbox),
    "LEASEHOLD_KUBERNETES_GATEWAY_ADDRESS": ("10.96.7.7", pod_of_sandbox),
    "LEASEHOLD_KUBERNETES_USER_NAMESPACES": ("1", pod_of_sandbox),
    "LEASEHOLD_KUBERNETES_DISK_MIB": ("128", pod_of_sandbox),
    "LEASEHOLD_KUBERNETES_GRACE": ("5m", pod_of_sandbox),
    "LEASEHOLD_KUBERNETES_LIFETIME": ("2d", kubernetes_provider),
    "LEASEHOLD_KUBERNETES_SCALE_TIMEOUT": ("3m", kubernetes_provider),
    "LEASEHOLD_KUBERNETES_OBJECT": ("sandbox", kubernetes_provider),
    "LEASEHOLD_KUBERNETES_EXEC_FALLBACK": ("1", kubernetes_provider),
    "LEASEHOLD_PARKED_NETWORKS": (
        "2", "tests/docker/test_parked_networks.py::test_sweep_keeps_as_many_as_the_setting_and_removes_the_rest",
    ),
    "LEASEHOLD_SANDBOX_TIMEOUT_SECONDS": ("7", start_timeout),
    "LEASEHOLD_SANDBOX_MEMORY_MIB": ("64", size_of_new_pool),
    "LEASEHOLD_SANDBOX_MILLICPUS": ("100", size_of_new_pool),
    "LEASEHOLD_SANDBOX_PIDS": ("32", size_of_new_pool),
    "SANDBOX_SLEEP_AFTER": ("9m", sleep_after),
    "LEASEHOLD_MAX_SANDBOXES": ("77", capacity_of_default_pool),
    "LEASEHOLD_MAX_SANDBOXES_PER_AGENT": (
        "2", "tests/api/sandbox/test_pool.py::test_an_agents_key_sees_capacity_and_its_own_quota_only",
    ),
    "LEASEHOLD_IDLE_TIMEOUT": ("40m", sleep_after),
    "LEASEHOLD_KEEP_AWAKE_LIMIT": (
        "1h", "tests/unit/sandboxes/test_suspension.py::test_process_keeps_its_sandbox_awake_up_to_a_limit",
    ),
    "LEASEHOLD_COLD_TTL": ("1m", expired_cold_sandboxes),
    "LEASEHOLD_DESTROY_TRIES": (
        "3", "tests/unit/leases/test_leasing.py::test_a_failed_destroy_is_retried_with_backoff_and_then_quarantined",
    ),
    "LEASEHOLD_ORPHAN_GRACE": ("1h", orphans_after_reconciliation),
    "LEASEHOLD_HOST_TIMEOUT": (
        "1h", "tests/unit/sandboxes/test_hosts.py::test_a_silent_host_keeps_its_leases_until_it_is_declared_lost",
    ),
    "LEASEHOLD_OBSERVE": (
        "1", "tests/unit/controlplane/test_installation.py::test_observe_mode_counts_and_destroys_nothing",
    ),
    "LEASEHOLD_KEEP_SNAPSHOTS": ("1", "snapshots::test_one_snapshot_is_restored_repeatedly_by_its_first_id"),
    "LEASEHOLD_KEEP_ASKED_SNAPSHOTS": ("2", "snapshots::test_oldest_requested_snapshots_are_deleted"),
    "LEASEHOLD_DATA": ("mount", "mounts::test_mounted_agent_claims_only_warm_sandboxes_with_a_mount_directory"),
    "LEASEHOLD_DATA_MOST_FILES": ("10", "data::test_exec_is_refused_while_data_exceeds_a_limit"),
    "LEASEHOLD_DATA_MOST_MIB": ("1", "data::test_exec_is_refused_while_data_exceeds_a_limit"),
    "LEASEHOLD_MIN_FREE_DISK": (
        "1", "tests/unit/sandboxes/state/test_disk_space.py::test_low_disk_starts_no_new_sandbox",
    ),
    "LEASEHOLD_KEEP_STATE": ("10m", expired_snapshots),
    "LEASEHOLD_KEEP_HISTORY": ("10m", expired_leases),
    "LEASEHOLD_KEEP_OPERATOR_ACTIONS": (
        "10m", "tests/unit/sandboxes/test_audit.py::test_an_action_is_deleted_after_its_retention",
    ),
    "STORAGE_BACKEND": ("s3", "store::test_the_settings_select_the_store"),
    "STORAGE_MODE": ("journaled", "tests/api/leases/test_stores.py::test_a_failing_store_is_unavailable"),
    "STORAGE_SYNC": ("0", "store::test_sync_is_refused_on_backends_without_files"),
    "LEASEHOLD_STORAGE_DIR": ("{tmp}/effects", storage_directory),
    "LEASEHOLD_STORAGE_PREFIX": ("ours/", "store::test_the_settings_select_the_store"),
    "R2_BUCKET_BINDING": ("bucket", partial(store_address, "s3")),
    "LEASEHOLD_S3_ENDPOINT": ("http://127.0.0.1:2", partial(store_address, "s3")),
    "LEASEHOLD_S3_REGION": ("eu-central-1", partial(store_address, "s3")),
    "LEASEHOLD_S3_ACCESS_KEY_ID": ("key-id", partial(store_address, "s3")),
    "LEASEHOLD_S3_SECRET_ACCESS_KEY": ("secret", partial(store_address, "s3")),
    "KV_NAMESPACE_BINDING": ("0" * 32, partial(store_address, "cloudflare_kv")),
    "LEASEHOLD_KV_ACCOUNT_ID": ("account", partial(store_address, "cloudflare_kv")),
    "LEASEHOLD_KV_API_TOKEN": ("token", partial(store_address, "cloudflare_kv")),
    "LEASEHOLD_KV_API_URL": ("http://127.0.0.1:2", partial(store_address, "cloudflare_kv")),
    "LEASEHOLD_EXEC_TIMEOUT": ("7s", exec_timeout),
    "LEASEHOLD_EXEC_TIMEOUT_MOST": ("30s", is_exec_of_40_seconds_accepted),
    "LEASEHOLD_AGENT_RUN_TIMEOUT_MOST": ("30s", is_agent_run_of_40_seconds_accepted),
    "LEASEHOLD_RUNNER_THREADS": ("0", "runner::test_process_without_threads_executes_nothing"),
    "LEASEHOLD_QUEUE_MAX_RUNNING": ("2", "queue::test_limit_of_started_runs_frees_a_place_at_the_end"),
    "LEASEHOLD_QUEUE_MAX_RUNNING_PER_AGENT": ("2", "queue::test_limit_of_started_runs_frees_a_place_at_the_end"),
    "LEASEHOLD_QUEUE_MAX_RUNNING_PER_POOL": ("2", "queue::test_limit_of_started_runs_frees_a_place_at_the_end"),
    "LEASEHOLD_QUEUE_MAX_PENDING": ("2", "queue::test_pending_limits"),
    "LEASEHOLD_QUEUE_MAX_PENDING_PER_AGENT": ("2", "queue::test_pending_limits"),
    "LEASEHOLD_EXEC_OUTPUT_CAP_BYTES": ("2048", "one_shot::test_output_beyond_the_cap_is_dropped_and_reported"),
    "LEASEHOLD_RUN_OUTPUT_KEPT_BYTES": ("131072", "one_shot::test_the_complete_output_is_returned_and_a_part_is_stored"),
    "LEASEHOLD_RUN_MEMORY_MOST_MIB": ("8192", is_run_of_5000_mib_accepted),
    "LEASEHOLD_MAX_RUNS_PER_LEASE": ("2", "limits::test_run_above_the_limit_of_its_lease_is_refused_until_one_ends"),
    "LEASEHOLD_MAX_STREAMS": ("2", "streams::test_stream_above_a_limit_is_refused_until_one_is_closed"),
    "LEASEHOLD_MAX_STREAMS_PER_LEASE": ("2", "streams::test_stream_above_a_limit_is_refused_until_one_is_closed"),
    "LEASEHOLD_TURN_TIMEOUT": ("7s", turn_timeout),
    "LEASEHOLD_FALLBACK_TRIGGER_TOKENS": ("5000", summarization),
    "LEASEHOLD_FALLBACK_KEEP_MESSAGES": ("2", summarization),
    "LEASEHOLD_LLM_URL": ("http://127.0.0.1:2/v1", "egress::test_unreachable_upstream_is_a_failed_call"),
    "LEASEHOLD_LLM_API_KEY": ("sk-x", "calls::test_calls_with_curl_match_rows_and_log"),
    "LEASEHOLD_LLM_MODEL": ("m", "litellm::test_egress_server_killed_during_a_call"),
    "LEASEHOLD_LLM_MODELS": ("claude-*", "egress::test_model_outside_the_allow_list_is_refused"),
    "LEASEHOLD_LLM_TIMEOUT": ("1m", lambda world: nginx_config.proxy_timeout_seconds()),
    "LEASEHOLD_LLM_RECORDS": ("{tmp}/effects/records", "logs::test_one_pass_ingests_both_files_and_prices_the_rest_by_rate"),
    "LEASEHOLD_RELAY_URL": ("ws://127.0.0.1:2", "relay::test_watcher_connects_as_its_agent_and_prints_events"),
    "LEASEHOLD_RELAY_AUD": ("did:web:x", "relay::test_watcher_connects_as_its_agent_and_prints_events"),
    "LEASEHOLD_RELAY_LXM": ("a.b.c", "relay::test_watcher_connects_as_its_agent_and_prints_events"),
    "LEASEHOLD_EGRESS_PROXY": ("none", "front::test_nginx_without_a_server_is_removed_after_the_grace_period"),
    "LEASEHOLD_EGRESS_IMAGE": ("other:1", "calls::test_command_restarts_nginx_and_removes_it_at_exit"),
    "LEASEHOLD_EGRESS_SLOTS": ("1", "egress::test_calls_through_a_reused_slot_are_billed_to_its_current_holder"),
    "LEASEHOLD_GATEWAY_LISTEN": ("127.0.0.1:9", GATEWAY_LISTENER),
    "LEASEHOLD_GATEWAY_URL": (
        "https://gateway.example.org",
        "tests/unit/sandboxes/remote/test_gateway.py::test_program_in_a_remote_sandbox_calls_the_model_on_the_bill_of_its_lease",
    ),
    "LEASEHOLD_GATEWAY_CERTIFICATE": ("/etc/c.pem", GATEWAY_LISTENER),
    "LEASEHOLD_GATEWAY_CERTIFICATE_KEY": ("/etc/k.pem", GATEWAY_LISTENER),
    "LEASEHOLD_GATEWAY_AUTHORITY": (str(ROOT / "LICENSE"), access_of_agent),
    "LEASEHOLD_GATEWAY_INTERNAL_LISTEN": ("0.0.0.0:8444", GATEWAY_LISTENER),
    "LEASEHOLD_GATEWAY_INTERNAL_ADDRESS": ("10.0.3.7:8444", GATEWAY_LISTENER),
    "LEASEHOLD_GATEWAY_INTERNAL_CERTIFICATE": ("/etc/ic.pem", GATEWAY_LISTENER),
    "LEASEHOLD_GATEWAY_INTERNAL_CERTIFICATE_KEY": ("/etc/ik.pem", GATEWAY_LISTENER),
    "LEASEHOLD_GATEWAY_INTERNAL_AUTHORITY": ("/etc/ca.pem", INTERNAL_TLS),
    "LEASEHOLD_GATEWAY_INTERNAL_NAME": ("gateway.internal", INTERNAL_TLS),
    "LEASEHOLD_EGRESS_ALLOWED_NETWORKS": (
        "10.20.0.0/16,fd00::/8", "destinations::test_a_private_address_needs_a_network_of_the_operator",
    ),
    "LEASEHOLD_STREAM_HOST": ("127.0.0.2", "stream_server::test_server_listens_where_it_is_configured_to"),
    "LEASEHOLD_STREAM_PORT": ("18765", "stream_server::test_server_listens_where_it_is_configured_to"),
    "LEASEHOLD_STREAM_URL": ("https://streams.example.com/x", "terminals::test_urls_lead_to_the_configured_address"),
    "LEASEHOLD_PREVIEW_DOMAIN": ("preview.example.com", "terminals::test_urls_lead_to_the_configured_address"),
    "LEASEHOLD_MINIMUM_TIME": ("6m", "admission::test_grant_reserves_the_minimum_until_its_lease_ends"),
    "LEASEHOLD_MINIMUM_USD": ("0.1", "races::test_concurrent_acquires_of_a_budget_for_ten_grant_ten"),
    "LEASEHOLD_IDENTITY_KEYS": (
        "MTExMTExMTExMTExMTExMTExMTExMTExMTExMTExMTE=",
        "keys::test_encryption_keys_can_be_replaced_without_losing_a_signing_key",
    ),
    "LEASEHOLD_TRUSTED_PROXIES": ("127.0.0.1", "addresses::test_address_is_the_last_one_of_no_trusted_proxy"),
    "LEASEHOLD_USER_HEADER": ("RemoteUser", "proxy_sign_in::test_trusted_proxy_signs_a_user_in"),
    "LEASEHOLD_SESSION_IDLE_TIMEOUT": ("5m", "console_sessions::test_limits_are_settings"),
    "LEASEHOLD_SESSION_MAX_AGE": ("20m", "console_sessions::test_limits_are_settings"),
    "LEASEHOLD_SECOND_FACTOR": ("all", "second_factor::test_setting_says_who_has_to_set_one_up"),
    "LEASEHOLD_CREATES_PER_MINUTE": ("2", "tests/api/leases/test_leases.py::test_only_new_leases_count_against_the_rate_limit"),
    "LEASEHOLD_MAX_JOIN_WAIT": ("30s", "tests/api/leases/test_join_queue.py::test_wait_seconds_outside_its_range_is_refused"),
    "LEASEHOLD_IDEMPOTENCY_TTL": ("1h", "tests/api/test_idempotency.py::test_a_stored_response_expires"),
    "LEASEHOLD_METRICS_TOKEN": (
        "0123456789abcdef", "tests/unit/controlplane/test_metrics.py::test_a_wrong_token_is_refused_even_from_loopback",
    ),
    "LEASEHOLD_OTLP_ENDPOINT": (
        "http://127.0.0.1:2", "tracing::test_exec_is_a_trace_with_the_id_of_its_run_and_a_link_to_its_caller",
    ),
    "LEASEHOLD_PROFILE": ("small", child_processes),
    "LEASEHOLD_WEB_WORKERS": ("3", child_processes),
    "LEASEHOLD_WEB_THREADS": ("5", web_threads),
    "LEASEHOLD_MAX_RUNS_PER_AGENT": ("2", "limits::test_run_above_the_limit_of_its_agent_is_refused_in_all_its_leases"),
    "LEASEHOLD_DRAIN_DELAY_SECONDS": ("3", "up::test_up_refuses_a_second_up_and_finishes_requests_after_sigterm"),
    "LEASEHOLD_DRAIN_TIMEOUT": ("25s", "up::test_up_refuses_a_second_up_and_finishes_requests_after_sigterm"),
    "LEASEHOLD_QUEUE_WORKERS": ("3", lambda world: world.settings.Q_CLUSTER["workers"]),
    "LEASEHOLD_LOG_FORMAT": ("json", log_output),
    "LEASEHOLD_LOG_LEVEL": ("ERROR", log_output),
}  # fmt: skip


def load_changes(home: Path, **variables: str) -> dict[str, Any]:
    """Return the settings that differ from those without the variables."""
    variables = {name: value.replace("{tmp}", str(home)) for name, value in variables.items()}
    loaded = []
    for values in ({}, variables):
        with pytest.MonkeyPatch.context() as patch:
            module = load_settings(patch, home, **values)
        loaded.append({name: value for name, value in vars(module).items() if name.isupper()})
    return {name: value for name, value in loaded[1].items() if loaded[0].get(name) != value}


def test_each_variable_has_an_effect_in_the_table() -> None:
    assert list(EFFECTS) == list(env.ENV_VARIABLES)


@pytest.mark.parametrize("name", [name for name, (_, effect) in EFFECTS.items() if not isinstance(effect, str)])
def test_a_variable_changes_the_observed_behaviour(
    name: str, tmp_path: Path, grant, pool: Pool, memory: MemoryProvider, settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, observe = EFFECTS[name]
    assert callable(observe)
    changes = load_changes(tmp_path, **{name: value})
    world = World(grant, pool, memory, settings, monkeypatch)
    before = observe(world)
    for setting, changed in changes.items():
        setattr(settings, setting, changed)
    assert observe(world) != before


REQUIRED = {  # by settings themselves
    "STORAGE_BACKEND": {
        "R2_BUCKET_BINDING": "b", "LEASEHOLD_S3_ENDPOINT": "http://127.0.0.1:1", "LEASEHOLD_S3_ACCESS_KEY_ID": "i",
        "LEASEHOLD_S3_SECRET_ACCESS_KEY": "s",
    },
    "DEBUG": {"LEASEHOLD_ALLOW_UNISOLATED": "1"},
    "LEASEHOLD_USER_HEADER": {"LEASEHOLD_TRUSTED_PROXIES": "127.0.0.1"},
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, (_, effect) in EFFECTS.items() if isinstance(effect, str)])
def test_the_named_test_of_a_variable_exists_and_uses_its_setting(name: str, tmp_path: Path) -> None:
    value, effect = EFFECTS[name]
    assert isinstance(effect, str)
    settings_changed = load_changes(tmp_path, **{name: value}, **REQUIRED.get(name, {}))
    assert settings_changed
    file, _, test = effect.partition("::")
    path = ROOT / TESTS.get(file, file)
    assert re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE)
    texts = "".join(each.read_text() for each in path.parent.glob("*.py") if each != Path(__file__))
    assert re.search("|".join(rf"\b{each}\b" for each in [name, *settings_changed]), texts)
