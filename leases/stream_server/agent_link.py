"""Requests to the agent of a sandbox from the event loop of the gateway's process."""

import asyncio
import itertools
import json
from collections.abc import Mapping
from typing import Any

from sandboxes.agent.client import AgentOutdated, ConnectionLost, NotConnected
from sandboxes.agent.gateway import AgentGateway, Session
from sandboxes.agent.protocol import Frame, FrameReader, ProtocolError, RawFrame, RunState, parse_hello, parse_state

CONNECT_SECONDS = 0.5  # for an agent to connect
RESPONSE_SECONDS = 5.0  # beyond the time that the request itself may wait
WAIT_SECONDS = 20.0  # of a request for output


class AgentLink:
    """Connection to the agent of one container, as gateway.ClientSession is one for another process.

    Requests may be concurrent. Cancelling one leaves the others unaffected."""

    def __init__(self, session: Session) -> None:
        self._session, self._reader, self._ids = session, FrameReader(), itertools.count(1)
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        [greeting] = FrameReader().feed(session.hello)
        self.boot = parse_hello(greeting.parse())
        self.is_open = True
        session.attach(self)

    @classmethod
    async def open(cls, gateway: AgentGateway, container: str) -> "AgentLink":
        """Connect to the agent of a container. Raise NotConnected, AgentOutdated."""
        session = await gateway.open_session(container, CONNECT_SECONDS)
        if session is None:
            if gateway.find_outdated(container):
                raise AgentOutdated("The agent of the sandbox is of another version.")
            raise NotConnected("The agent of the sandbox is not connected.")
        return cls(session)

    async def request(
        self, run_id: str, head: Mapping[str, Any], body: bytes = b"", *, wait: float = 0.0
    ) -> tuple[Frame, RunState]:
        """Send a request about a run and return its response. The agent may wait for `wait` seconds.

        Raise TimeoutError without a response in time, as from a suspended sandbox; ConnectionLost; or ProtocolError, which ends
        the agent's session."""
        if not self.is_open:
            raise ConnectionLost("The connection to the agent has ended.")
        request_id = next(self._ids)
        future = self._pending[request_id] = asyncio.get_running_loop().create_future()
        content = json.dumps({**head, "run": run_id, "wait": wait}, separators=(",", ":")).encode()
        try:
            self._session.forward_request(self, RawFrame(request_id, content, body))
            async with asyncio.timeout(wait + RESPONSE_SECONDS):  # wait_for of Python 3.11 may lose a cancellation
                frame = await future
            return frame, parse_state(run_id, frame)
        except ProtocolError as error:
            self._session.end(str(error))
            raise
        finally:
            self._pending.pop(request_id, None)

    def send(self, content: bytes) -> None:
        """Accept a response. Called by the agent's session."""
        for raw in self._reader.feed(content):
            future = self._pending.get(raw.request_id)
            if future is None or future.done():
                continue  # the request was cancelled
            try:
                future.set_result(raw.parse())
            except ProtocolError as error:
                future.set_exception(error)

    def end(self) -> None:
        """Fail all requests. Called when the agent's session has ended."""
        self.close()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ConnectionLost("The agent has disconnected."))

    def close(self) -> None:
        """Detach from the agent's session. Idempotent."""
        self.is_open = False
        self._session.detach(self)
