"""Recording of an agent run: reads the output of its Run, stores the messages, and enforces the policy.

A message is stored at least once: after a crash between its storage and the update of the row it is stored again under the same
sequence number."""

import io
import json
import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import structlog
from django.db import transaction
from django.db.models import QuerySet

from leases.agent_runs import interruption
from leases.agent_runs.clis.base import Message
from leases.agent_runs.clis.registry import CLIS
from leases.agent_runs.models import SESSION_PATTERN, AgentRun, AgentRunState
from leases.agent_runs.ndjson import JsonLine, MalformedLine, NdjsonParser
from leases.agent_runs.policy import AgentPolicy
from leases.agent_runs.results import load_result
from leases.failed_by import classify_agent_run
from sandboxes.claims import Claim
from sandboxes.db.clock import Clock, clock_from
from sandboxes.db.connection_errors import RetriesExhausted, retry_connection_errors
from sandboxes.deferred_writes import end_on_connection_error
from sandboxes.models import Run, RunOutcome, StopReason
from sandboxes.models.webhooks import EventType
from sandboxes.runs import retention
from sandboxes.state.uploads import ContentUploads
from sandboxes.storage.base import StoreError
from sandboxes.stores import lease_stores
from sandboxes.stores.limits import DEFAULT_LIMITS
from sandboxes.streams import rows
from sandboxes.streams.reader import Ended, Gap, KeepAlive, Output, Position, RunReader, StreamItem
from sandboxes.streams.registry import OPEN_STREAMS, StreamSlot
from sandboxes.webhooks import outbox

log = structlog.get_logger(__name__)
T = TypeVar("T")
RECORDER_TTL = timedelta(minutes=1)  # the reader returns at least every 15 seconds
STORE_RETRY_PAUSES_SECONDS = (0.2, 1.0, 5.0, *[15.0] * 40)  # ten minutes, after which a message counts as lost
MAX_RESULT_CHARS = 64 << 10
MAX_INLINE_BYTES = DEFAULT_LIMITS.max_event_bytes - (4 << 10)  # a longer message becomes an artifact


class RecorderReplaced(Exception):
    """Another process records this agent run."""


class RecorderClaim(Claim):
    """Claim of a recorder on the row of its agent run. The deadline that the recorder wrote last is the token."""

    def __init__(self, row: AgentRun, clock: Clock) -> None:
        open_rows = AgentRun.objects.filter(pk=row.pk, ended_at__isnull=True)
        super().__init__(open_rows, deadline=row.recorder_deadline, clock=clock, column="recorder_deadline", ttl=RECORDER_TTL)
        self._row, self._previous = row, row.recorder_deadline

    def advance(self, deadline: datetime | None = None) -> datetime:
        """Set the next deadline in the object of the row, which the caller then writes. Return the previous deadline."""
        self._previous, self._row.recorder_deadline = self._row.recorder_deadline, deadline or self.clock() + self.ttl
        return self._previous

    def _get_rows(self) -> QuerySet[AgentRun]:
        # After a lost answer the row has either deadline.
        return self._rows.filter(recorder_deadline__in=(self._previous, self._row.recorder_deadline))


class Recorder:
    """Recorder of one agent run. It continues after the last recorded message. `on_message` receives each one.

    Queries are repeated while the database does not respond: for FAILOVER_PERIOD, and longer while `is_command_running`,
    because no sweep records the run until its command has ended."""

    def __init__(
        self,
        agent_run: AgentRun,
        *,
        clock: Clock,
        on_message: Callable[[dict[str, Any]], object] = bool,
        is_command_running: Callable[[], bool] = bool,
    ) -> None:
        self._agent_run, self._clock, self._on_message = agent_run, clock, on_message
        self._claim, self._is_command_running = RecorderClaim(agent_run, clock), is_command_running
        self._cli = CLIS[agent_run.cli]
        self._policy = AgentPolicy.from_document(agent_run.policy)
        self._parser = NdjsonParser(agent_run.stdout_offset)
        self._stores = lease_stores.open_stores(agent_run.lease.agent_did, agent_run.lease_id)
        self._store_responds = True
        self._turn_ids = set[str]()  # counted by this recorder

    def record(self) -> None:
        """Record the output up to its end, close the agent run, and let the sandbox drop the output.

        Raise RecorderReplaced, and OutputUnreachable if the rest of the output of an ended command cannot be read now.
        If the database does not respond, end the claim once it does, and raise RetriesExhausted."""
        try:
            with end_on_connection_error(self._claim):
                self._record()
        finally:
            rows.close_if_idle()

    def _record(self) -> None:
        row = self._agent_run
        run = self._retry(partial(rows.fetch_run, row.pk, with_output=True), "run not read")
        slot = StreamSlot(OPEN_STREAMS, row.lease_id, follows_command=True)
        reader = RunReader(run, Position(row.stdout_offset, row.stderr_offset), slot, is_recorder=True)
        try:
            for item in reader.read():
                self._take(item)
        finally:
            reader.close()

    def _retry(self, query: Callable[[], T], message: str) -> T:
        """Return the result of an idempotent query. Raise RetriesExhausted."""
        while True:
            try:
                return retry_connection_errors(query, message, clock=self._clock, run=str(self._agent_run.pk))
            except RetriesExhausted:
                if not self._is_command_running():
                    raise

    def _take(self, item: StreamItem) -> None:
        match item:
            case Output("stdout", content, position):
                for line in self._parser.feed(content):
                    self._record_line(line, position)
            case Output(_, _, position):
                self._agent_run.stderr_offset = position.stderr
            case Gap("stdout", lost_bytes, _):
                self._parser.skip(lost_bytes)
                self._agent_run.lost_bytes += lost_bytes
                self._save("lost_bytes")
            case KeepAlive():
                self._keep_alive()
            case Ended(run, position):
                for line in self._parser.end():
                    self._record_line(line, position)
                self._close(run)
                retention.release(run, now=self._clock())

    def _keep_alive(self) -> None:
        self._save()
        self._refresh("interrupted_at")
        if self._agent_run.interrupted_at:  # the command may have started after the request to interrupt it
            self._kill_command(StopReason.INTERRUPTED)

    def _refresh(self, *fields: str) -> None:
        self._retry(partial(self._agent_run.refresh_from_db, fields=fields), "agent run not read")

    def _kill_command(self, reason: StopReason) -> None:
        self._retry(partial(interruption.kill_command, self._agent_run.pk, reason), "command not killed")

    def _record_line(self, line: JsonLine | MalformedLine, position: Position) -> None:
        row = self._agent_run
        sequence = row.message_count + row.malformed_count + 1
        if isinstance(line, MalformedLine):
            row.malformed_count += 1
            content: dict[str, Any] = {"type": "malformed", "reason": line.reason, "text": line.text, "bytes": line.size}
            self._store("system", content, sequence)
        else:
            message = self._cli.interpret(line.document)
            row.message_count += 1
            self._apply(message)
            self._enforce(message)
            self._store(message.role, line.document, sequence)
            self._on_message(line.document)
        row.stdout_offset, row.stderr_offset = line.end, position.stderr
        self._save("message_count", "malformed_count", "turn_count", "session_id", "result", "is_error", "reported_cost")

    def _apply(self, message: Message) -> None:
        row = self._agent_run
        if re.fullmatch(SESSION_PATTERN, message.session_id, re.ASCII):  # an argument of the next command line
            row.session_id = message.session_id
        if message.turn_id and message.turn_id not in self._turn_ids:
            self._turn_ids.add(message.turn_id)
            row.turn_count += 1
        if message.text:
            row.result = _clean(message.text)
        if message.result:
            row.is_error, row.reported_cost = message.result.is_error, message.result.cost
            if message.result.text is not None:
                row.result = _clean(message.result.text)

    def _enforce(self, message: Message) -> None:
        """Interrupt the run if the message violates the policy."""
        row = self._agent_run
        if row.interrupted_at or not (message.turn_id or message.tool_calls):
            return
        cost = None
        if self._policy.max_cost is not None:
            cost = self._retry(lambda: load_result(row.pk, now=self._clock()), "costs not read").cost
        violation = self._policy.find_violation(message.tool_calls, turns=row.turn_count, cost=cost)
        if violation:
            log.warning("agent run violates its policy", agent_run=str(row.pk), violation=violation)
            row.interrupted_at, row.violation = self._clock(), violation
            self._save("interrupted_at", "violation")
            self._kill_command(StopReason.POLICY)

    def _store(self, role: str, content: dict[str, Any], sequence: int) -> None:
        """Append a message to the chat history. A message that cannot be stored is counted as lost."""

        def store() -> None:
            store_message(self._stores, self._agent_run, role, content, sequence, now=self._clock())

        for pause in (*(STORE_RETRY_PAUSES_SECONDS if self._store_responds else ()), None):
            try:
                self._retry(store, "message not stored")
                self._store_responds = True
                return
            except StoreError as error:
                if pause is None:
                    self._store_responds = False  # further messages do not wait as long again
                    log.error("message not stored", agent_run=str(self._agent_run.pk), sequence=sequence, error=str(error))
                    self._agent_run.lost_bytes += len(json.dumps(content))
                    self._save("lost_bytes")
                else:
                    self._keep_alive()
                    time.sleep(pause)

    def _close(self, run: Run) -> None:
        row = self._agent_run
        self._refresh("interrupted_at", "violation")
        row.state, row.note = classify_state(row, run), run.note
        row.ended_at = run.ended_at
        audit = {"action": "agent_run.ended", "agent_run": str(row.pk), "state": row.state, "violation": row.violation}
        try:
            self._stores.audit.append(audit, now=self._clock(), actor="agent run")
        except StoreError as error:
            log.error("end not in the audit log", agent_run=str(row.pk), error=str(error))
        payload = {
            "run_id": str(row.pk), "lease_id": str(row.lease_id), "agent_did": row.lease.agent_did, "cli": row.cli,
            "state": row.state, "violation": row.violation, "turn_count": row.turn_count, "exit_code": run.exit_code,
            "failed_by": classify_agent_run(row, run),
        }  # fmt: skip
        token, deadline = row.recorder_deadline, self._clock() + RECORDER_TTL  # the same if the end is recorded again

        def record_end() -> None:
            row.recorder_deadline = token  # that of the last committed write, if this call is repeated
            with transaction.atomic():
                self._save("state", "note", "ended_at", deadline=deadline)
                outbox.enqueue_event(EventType.AGENT_RUN_ENDED, key=str(row.pk), payload=payload, now=self._clock())

        self._retry(record_end, "agent run not closed")

    def _save(self, *fields: str, deadline: datetime | None = None) -> None:
        """Store fields of the row, its offsets, and a later deadline. Raise RecorderReplaced.

        The previous deadline is the token of this recorder."""
        row = self._agent_run
        previous = self._claim.advance(deadline)
        values = {name: getattr(row, name) for name in (*fields, "stdout_offset", "stderr_offset", "recorder_deadline")}
        own = AgentRun.objects.filter(pk=row.pk, recorder_deadline=previous, ended_at__isnull=True)
        written = AgentRun.objects.filter(pk=row.pk, recorder_deadline=row.recorder_deadline)
        saved = self._retry(lambda: own.update(**values) or written.count(), "agent run not saved")
        if not saved:
            raise RecorderReplaced


def store_message(
    stores: lease_stores.LeaseStores, row: AgentRun, role: str, content: Any, sequence: int, *, now: datetime
) -> None:
    """Append a message to the chat history of its lease; a large one as an artifact with a reference. Raise StoreError."""
    document: dict[str, Any] = {"role": role, "content": content, "agent_run": str(row.pk), "sequence": sequence}
    size = len(json.dumps(document))
    if size > MAX_INLINE_BYTES:
        name = f"agent-run-{row.pk}-{sequence}.json"
        source = io.BytesIO(json.dumps(content).encode())
        stores.artifacts.put(
            name, source, claims=ContentUploads(clock_from(now)), media_type="application/json", now=now, actor="agent run"
        )
        kind = content.get("type") if isinstance(content, dict) else "prompt"
        document["content"] = {"type": kind, "artifact": name, "bytes": size}
    stores.chat.append(document, now=now, actor="agent run")


def classify_state(row: AgentRun, run: Run) -> AgentRunState:
    """Return the final state of an agent run whose Run has ended."""
    if row.interrupted_at:
        return AgentRunState.INTERRUPTED
    return AgentRunState.COMPLETED if run.outcome == RunOutcome.OK and not row.is_error else AgentRunState.FAILED


def _clean(text: str) -> str:
    """Return text that PostgreSQL accepts: without NUL and lone surrogates, and limited."""
    return text[:MAX_RESULT_CHARS].replace("\0", "\ufffd").encode(errors="replace").decode()
