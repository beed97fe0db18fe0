"""WebSocket client of a terminal, for tests."""

import json
from types import TracebackType
from typing import Any, Self

import aiohttp

TIMEOUT_SECONDS = 30.0


class TerminalClient:
    """One connection to a terminal. `output` has all output so far."""

    def __init__(self, url: str, offset: int = 0) -> None:
        self._url = f"{url}?offset={offset}" if offset else url
        self.output, self.messages = b"", list[dict[str, Any]]()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        try:
            self._socket = await self._session.ws_connect(self._url)
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._socket.close()
        await self._session.close()

    async def type(self, text: str) -> None:
        await self._socket.send_bytes(text.encode())

    async def send(self, **fields: Any) -> None:
        await self._socket.send_str(json.dumps(fields))

    async def read_until(self, text: str) -> None:
        """Receive until the output contains `text`."""
        while text.encode() not in self.output:
            assert await self._receive(), (self._socket.close_code, self.output)

    async def wait_for(self, kind: str) -> dict[str, Any]:
        """Receive until the first text message of this type."""
        while not (found := [message for message in self.messages if message["type"] == kind]):
            assert await self._receive(), (self._socket.close_code, self.output)
        return found[0]

    async def read_to_end(self) -> int:
        """Receive until the server closes the connection. Return the close code."""
        while await self._receive():
            pass
        return self._socket.close_code or 0

    async def _receive(self) -> bool:
        message = await self._socket.receive(TIMEOUT_SECONDS)
        if message.type == aiohttp.WSMsgType.BINARY:
            self.output += message.data
        elif message.type == aiohttp.WSMsgType.TEXT:
            self.messages.append(json.loads(message.data))
        else:
            return False
        return True
