"""Facts about Pods that the control plane keeps in its database. Providers import no models: a class of the app is."""

from typing import Protocol

from django.utils.module_loading import import_string

from sandboxes.agent.runs import AgentClient
from sandboxes.providers.kubernetes.endings import Ending


class PodRecords(Protocol):
    """Facts by ref of the sandbox, or about the cluster."""

    def find_agent(self, ref: str) -> AgentClient | None:
        """Return a client for the agent of a sandbox; None without a gateway that could know it."""

    def find_uid(self, ref: str) -> str:
        """Return the uid of the sandbox's Pod. Empty: not known, as for a sandbox without a row."""

    def store_uid(self, ref: str, uid: str) -> None:
        """Store the uid of the sandbox's Pod."""

    def find_ending(self, ref: str) -> Ending | None:
        """Return the reason that was stored for the sandbox's Pod."""

    def store_ending(self, ref: str, uid: str, ending: Ending) -> None:
        """Store why a Pod ended or is about to, unless the sandbox has another Pod now."""

    def is_sealed(self, engine_id: str) -> bool:
        """Return whether the last check has shown that sandboxes of this engine reach the gateway alone."""


class MemoryRecords:
    """Records of one process, for a provider without a database."""

    def __init__(self) -> None:
        self._uids: dict[str, str] = {}
        self._endings: dict[str, Ending] = {}

    def find_agent(self, ref: str) -> AgentClient | None:
        return None

    def find_uid(self, ref: str) -> str:
        return self._uids.get(ref, "")

    def store_uid(self, ref: str, uid: str) -> None:
        self._uids[ref] = uid
        self._endings.pop(ref, None)

    def find_ending(self, ref: str) -> Ending | None:
        return self._endings.get(ref)

    def store_ending(self, ref: str, uid: str, ending: Ending) -> None:
        if self._uids.get(ref) == uid:
            self._endings[ref] = ending

    def is_sealed(self, engine_id: str) -> bool:
        return False


_factory_path = ""


def register_factory(path: str) -> None:
    """Set the dotted path of the class behind `create_records`, in an app that reads the database."""
    global _factory_path
    _factory_path = path


def create_records() -> PodRecords:
    """Return the records of this installation."""
    found: PodRecords = import_string(_factory_path)()
    return found
