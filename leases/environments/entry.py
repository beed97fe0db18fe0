"""Entry of agents into environments: the permission to hold a lease there. `leasing.grant` calls this in its transaction.

An agent may enter an open environment of its project, and one of which it is a participant. An operator's request adds the
agent to the participants. The first lease of an agent creates the environment if there is none, with the agent as participant.
The next entry opens an environment again that the sweep has ended as unused (lifecycle.UNUSED_AFTER), but none that an operator
or a condition has ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db import IntegrityError

from leases.allow_lists import AllowLists
from leases.environments.models import Environment, Participant
from leases.errors import Conflict, EnvironmentEnded, EnvironmentNotFound, InvalidRequest
from leases.models import Agent, EnvironmentType
from leases.projects.models import DEFAULT_PROJECT_ID
from sandboxes.db import dialect, sql
from sandboxes.db.message_fields import fit_column

UNUSED = "unused"  # end reason of environments that are opened again by the next entry
IS_PARTICIPANT_SQL = "SELECT EXISTS (SELECT 1 FROM leases_participant WHERE environment_id = %s AND agent_did = %s)"
# The guards of an entry. The locks make a concurrent end of the environment, removal of the participant or move of the agent
# wait for the lease, which it then finds, or make the statement find no row.
ENTER_OPEN_SQL = (
    "SELECT 1 FROM leases_environment JOIN leases_agent ON leases_agent.project_id = leases_environment.project_id "
    "WHERE leases_environment.id = %s AND leases_environment.type_id = %s AND leases_environment.ended_at IS NULL "
    "AND leases_agent.did = %s AND leases_environment.open_to_project"
)
ENTER_AS_PARTICIPANT_SQL = (
    "SELECT 1 FROM leases_environment JOIN leases_agent ON leases_agent.project_id = leases_environment.project_id "
    "JOIN leases_participant ON leases_participant.environment_id = leases_environment.id "
    "AND leases_participant.agent_did = leases_agent.did "
    "WHERE leases_environment.id = %s AND leases_environment.type_id = %s AND leases_environment.ended_at IS NULL "
    "AND leases_agent.did = %s"
)
ADD_PARTICIPANT_SQL = (
    "INSERT INTO leases_participant (environment_id, agent_did, added_at, added_by) VALUES (%s, %s, %s, %s) "
    "ON CONFLICT DO NOTHING"
)
REOPEN_UNUSED_SQL = "ended_at = NULL, end_reason = '' WHERE id = %s AND end_reason = %s"


class EntryChanged(IntegrityError):
    """A row that decides about the entry was changed since it was read. The caller reads again."""


@dataclass(frozen=True)
class Entry:
    """Request of an agent to enter an environment, with the rows that decide about it."""

    environment_id: str
    agent_did: str
    environment: Environment | None  # None: the entry creates it
    agent: Agent | None  # None: the entry creates the row
    is_participant: bool
    allowed: AllowLists | None  # of the caller's API key; None: an operator's command

    def check(self, environment_type: EnvironmentType) -> None:
        """Raise EnvironmentNotFound if the agent may not enter, EnvironmentEnded, or Conflict for a wrong type.

        Only reads what was read before: `enter` compares again, in the transaction that grants the lease."""
        environment = self.environment
        if environment is None:
            return
        if environment.project_id != self._get_project_id():
            if self._may_admit():
                raise InvalidRequest("agent_did", "The agent and the environment belong to different projects.")
            raise EnvironmentNotFound()
        if not (environment.open_to_project or self.is_participant or self._may_admit()):
            raise EnvironmentNotFound()
        if environment.ended_at and environment.end_reason != UNUSED:
            raise EnvironmentEnded()
        if environment.type_id != environment_type.name:
            raise Conflict(f'This environment has the type "{environment.type_id}".', field="environment_type")

    def enter(self, environment_type: EnvironmentType, *, now: datetime, actor: str = "") -> None:
        """Enter the environment in the caller's transaction, and lock the rows that permit it. Raise EntryChanged."""
        if self.agent is None:
            self._insert_agent(now=now)
        if self.environment is None:
            self._create(environment_type, now=now, actor=actor)
            return
        if self.environment.ended_at:
            sql.update(Environment, REOPEN_UNUSED_SQL, self.environment_id, UNUSED)
        guard = ENTER_OPEN_SQL if self.environment.open_to_project else ENTER_AS_PARTICIPANT_SQL
        if not (self.environment.open_to_project or self.is_participant):
            add_participants(self.environment_id, [self.agent_did], now=now, actor=actor)
        statement = f"{guard} {dialect.share_lock()}"
        if not sql.fetch_all(statement, self.environment_id, environment_type.name, self.agent_did):
            raise EntryChanged("The environment was changed by a concurrent request.")

    def _create(self, environment_type: EnvironmentType, *, now: datetime, actor: str) -> None:
        row = Environment(
            id=self.environment_id, type=environment_type, project_id=self._get_project_id(),
            open_to_project=environment_type.open_to_project, created_by_agent=not self._may_admit(),
            created_at=now, started_at=now,
        )  # fmt: skip
        if not sql.insert_if_absent(row):
            raise EntryChanged("The environment was created by a concurrent request.")
        add_participants(self.environment_id, [self.agent_did], now=now, actor=actor)

    def _insert_agent(self, *, now: datetime) -> None:
        agent, _ = Agent.objects.get_or_create(
            did=self.agent_did, defaults={"project_id": self._get_project_id(), "created_at": now}
        )
        if agent.project_id != self._get_project_id():
            raise EntryChanged("The agent was created by a concurrent request.")

    def _may_admit(self) -> bool:
        return self.allowed is None or self.allowed.is_operator

    def _get_project_id(self) -> int | None:
        """Return the project of the agent, or the one that a new agent gets."""
        if self.agent:
            return self.agent.project_id
        if self.allowed and not self.allowed.is_operator:
            return self.allowed.project_id
        return self.environment.project_id if self.environment else DEFAULT_PROJECT_ID


def add_participants(environment_id: str, agents: Sequence[str], *, now: datetime, actor: str = "") -> int:
    """Add agents to the participants of an environment, and return how many are new. Their projects are not checked."""
    added_by = fit_column(Participant, "added_by", actor)
    return sum(sql.execute(ADD_PARTICIPANT_SQL, environment_id, did, now, added_by) for did in agents)
