"""Records of the Kubernetes provider in the database: the Pod of each sandbox, and the result of the last seal check."""

from django.db.models import QuerySet

from sandboxes.agent import addresses
from sandboxes.agent.runs import AgentClient
from sandboxes.hosts.bound_provider import compute_host_id
from sandboxes.models import Host, Sandbox, SandboxState
from sandboxes.models.names import parse_name
from sandboxes.providers.errors import FailureCause
from sandboxes.providers.kubernetes.endings import Ending

PROVIDER_NAME = "kubernetes"


class PodRows:
    """Implementation of sandboxes.providers.kubernetes.records.PodRecords."""

    def find_agent(self, ref: str) -> AgentClient | None:
        return AgentClient(addresses.get_routed_gateway(), ref)

    def find_uid(self, ref: str) -> str:
        """See PodRecords. A row without a sandbox claims no Pod: one that has taken the name since is an orphan."""
        existing = _find_rows(ref).exclude(state__in=(SandboxState.COLD, SandboxState.DESTROYED))
        return existing.values_list("pod_uid", flat=True).first() or ""

    def store_uid(self, ref: str, uid: str) -> None:
        _find_rows(ref).update(pod_uid=uid, pod_end_cause="", pod_end_message="")

    def find_ending(self, ref: str) -> Ending | None:
        found = _find_rows(ref).exclude(pod_end_cause="").values_list("pod_end_cause", "pod_end_message").first()
        return Ending(FailureCause(found[0]), found[1]) if found else None

    def store_ending(self, ref: str, uid: str, ending: Ending) -> None:
        columns = {"pod_end_cause": ending.cause, "pod_end_message": ending.message}
        _find_rows(ref).filter(pod_uid=uid).exclude(**columns).update(**columns)

    def is_sealed(self, engine_id: str) -> bool:
        return Host.objects.filter(pk=compute_host_id(PROVIDER_NAME, engine_id), sealed=True).exists()


def _find_rows(ref: str) -> QuerySet[Sandbox]:
    """Select the row whose current incarnation has this ref, by its primary key."""
    parts = parse_name(ref)
    return Sandbox.objects.filter(pk=parts.pk, ref=ref) if parts else Sandbox.objects.none()
