"""Agent runs of one history: clients that start and interrupt them, the messages that their program prints, and the checks.

The program reads its order from the prompt. A recorder of the product reads its messages while it prints them."""

import json
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from django.conf import settings

from leases.agent_runs.models import AgentRun
from leases.agent_runs.recorder import classify_state
from sandboxes.models import Event, Run
from sandboxes.models.webhooks import EventType
from sandboxes.state.run_outputs import load_output
from sandboxes.stores import lease_stores
from tests.simulation.http_clients import ClientRequest, read_json
from tests.simulation.ports import PROGRAM

if TYPE_CHECKING:
    from tests.simulation.workload import Seat, Workload
    from tests.simulation.world import World

PAGE_SIZE = 100  # events of a chat history


def build_body(order: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a request for an agent run."""
    return {"cli": "program", "argv": [PROGRAM], "prompt": json.dumps(order), "timeout_seconds": int(order["timeout"])}


class AgentRuns:
    """Clients that start agent runs without the queue."""

    def __init__(self, workload: "Workload") -> None:
        self.workload, self.world, self.random = workload, workload.world, workload.random
        self.started: dict[uuid.UUID, tuple[uuid.UUID, str]] = {}  # acknowledged run -> its lease and the name of its request

    def start(self, seat: "Seat", name: str, order: Mapping[str, Any]) -> None:
        """Start an agent run. The client is answered once its command has begun."""
        lease = seat.lease
        assert lease

        def answered(response: Any) -> None:
            self.started[uuid.UUID(read_json(response)["run_id"])] = lease, name

        body = json.dumps(build_body(order)).encode()
        self.workload.http.send(ClientRequest(name, "POST", f"/leases/{lease}/agent-runs", body, answered, seat.hold()))

    def interrupt(self, name: str) -> None:
        """A client interrupts a run in any state."""
        if not self.started:
            return
        pk = self.random.choice([*self.started])
        lease, operation = self.started[pk]
        self.world.promises.interrupted.add(operation)
        path = f"/leases/{lease}/agent-runs/{pk}/interrupt"
        self.workload.http.send(ClientRequest(name, "POST", path, b"", lambda response: None, lambda: None))

    def check(self) -> None:
        """Promise 11: each run has ended as its command did, its messages are recorded, and its end is announced once."""
        rows = {row.pk: row for row in AgentRun.objects.select_related("lease")}
        for pk, (_, operation) in self.started.items():
            if pk not in rows:
                self.world.promises.violate(11, f"the agent run {operation} ({pk}) was acknowledged and has no row")
        for row in rows.values():
            if row.started_at < self.world.scheduler.time - settings.KEEP_STATE:
                continue
            if problem := find_problem(self.world, row):
                self.world.promises.violate(11, f"the agent run {row.pk} ({row.state}): {problem}")


def find_problem(world: "World", row: AgentRun) -> str:
    if row.ended_at is None:
        return f"open for ever, its recorder until {row.recorder_deadline}"
    run = Run.objects.filter(pk=row.pk).first()
    if run is None:
        return "executed, and it counts as not begun" if world.promises.executions[str(row.pk)] else ""
    if row.state != classify_state(row, run) or row.ended_at != run.ended_at:
        return f"ended at {row.ended_at}, its command {run.outcome} at {run.ended_at}"
    ends = Event.objects.filter(kind=EventType.AGENT_RUN_ENDED, payload__run_id=str(row.pk))
    if [event.payload["state"] for event in ends] != [row.state]:
        return f"announced as {[event.payload for event in ends]}"
    return find_problem_of_messages(world, row, run)


def find_problem_of_messages(world: "World", row: AgentRun, run: Run) -> str:
    printed = world.promises.messages.get(str(row.pk), [])
    recorded = read_chat(row)
    if repeated := [sequence for sequence, contents in recorded.items() if len(contents) > 1]:
        return f"the messages {repeated} were stored with different contents"
    if row.lost_bytes:
        return ""
    if row.message_count > len(printed):
        return f"{row.message_count} messages were recorded, and {len(printed)} printed"
    for sequence in range(1, row.message_count + 1):
        if recorded.get(sequence) != {printed[sequence - 1]}:
            return f"message {sequence} is recorded as {recorded.get(sequence)}, and was printed as {printed[sequence - 1]}"
    available = load_output(run).stdout.count(b"\n")
    if row.message_count < available:
        return f"{row.message_count} messages were recorded, and {available} are in the output of the command"
    return ""


def read_chat(row: AgentRun) -> dict[int, set[str]]:
    """Return the contents of an agent run in the chat history of its lease, by sequence number."""
    chat = lease_stores.open_stores(row.lease.agent_did, row.lease_id).chat
    found: dict[int, set[str]] = {}
    after, more = None, True
    while more:
        page, more = chat.page(after=after, newest_first=False, limit=PAGE_SIZE)
        for event in page:
            if event.document.get("agent_run") == str(row.pk):
                found.setdefault(event.document["sequence"], set()).add(json.dumps(event.document["content"]))
        after = page[-1].stamp if page else None
    return found
