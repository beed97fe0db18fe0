"""Leases, sandboxes and processes of the benchmarks that run on a Docker Engine."""

from concurrent.futures import ThreadPoolExecutor

from django.utils import timezone

from leases import api_keys
from sandboxes import destruction
from sandboxes.models import Sandbox, SandboxState, TransitionReason
from tests.bench.cases import Execute, adapt_uuid, list_database_pids
from tests.bench.measure import list_process_tree
from tests.bench.server import ApiClient

GONE_SQL = "SELECT 1 FROM sandboxes_sandbox WHERE holder = %s AND state = 'destroyed'"
MAX_JOINS = 4  # concurrent


def create_key(*dids: str) -> str:
    return api_keys.issue_key(list(dids), now=timezone.now())[1]


def join(api: ApiClient, environment: str, did: str, *, pool: str = "default") -> str:
    """Join an environment, which starts or claims a sandbox. Return the id of the new lease."""
    request = {"agent_did": did, "environment_type": "coding", "pool": pool}
    lease = api.post(f"/environments/{environment}/join", request)
    assert lease["is_new"]
    return str(lease["id"])


def join_many(port: int, key: str, environments: dict[str, str]) -> list[str]:
    """Join each environment with its agent, a few at a time. Return the ids of the leases, in the same order."""

    def join_one(environment: str) -> str:
        return join(ApiClient(port, key), environment, environments[environment])

    with ThreadPoolExecutor(MAX_JOINS) as threads:
        return list(threads.map(join_one, environments))


def find_refs(leases: list[str]) -> list[str]:
    """Return the provider's names of the sandboxes of these leases."""
    refs = {str(holder): ref for holder, ref in Sandbox.objects.filter(holder__in=leases).values_list("holder", "ref")}
    return [refs[lease] for lease in leases]


def destroy(lease: str) -> None:
    """Destroy the sandbox of a lease in this process, until its container is confirmed gone."""
    sandbox = Sandbox.objects.exclude(state=SandboxState.DESTROYED).get(holder=lease)
    assert destruction.schedule_destroy(sandbox.pk, now=timezone.now(), code=TransitionReason.OPERATOR)
    assert destruction.destroy(sandbox.pk, now=timezone.now())


def is_gone(execute: Execute, lease: str) -> bool:
    """Return whether the sandbox of a lease is destroyed. `execute` is that of open_driver."""
    return bool(execute(GONE_SQL, [adapt_uuid(lease)]))


def list_server_pids(up: int) -> set[int]:
    """Process ids of a control plane and of PostgreSQL's backends for its database."""
    return list_process_tree(up) | set(list_database_pids())
