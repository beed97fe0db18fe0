"""Fake model provider whose answers are in the prompt, for agent CLIs: Anthropic's messages and OpenAI's responses.

    python -m tests.support.servers.scripted_models PORT

A line `CALL <tool> <JSON arguments>` of the last prompt makes the model call the tool. The calls are made one after the other;
then the model answers with a text that names the number of results. Tokens are always the same, unless a line
`USAGE <JSON usage>` of the last prompt of Anthropic's messages states others."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

CALL_PATTERN = re.compile(r"^CALL (\S+) (\{.*\})$", re.MULTILINE)
USAGE_PATTERN = re.compile(r"^USAGE (\{.*\})$", re.MULTILINE)
INPUT_TOKENS, OUTPUT_TOKENS = 1000, 50


class Step(NamedTuple):
    """Next answer of the model: a tool call or, without a tool, the final text."""

    number: int
    tool: str = ""
    arguments: str = ""  # JSON
    text: str = ""


class ScriptedModelServer(ThreadingHTTPServer):
    """HTTP server on loopback. `requests` has the path with its query, the headers and the body of each request."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> "ScriptedModelServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedModelServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.path, headers, body))
        endpoint = self.path.partition("?")[0].rpartition("/")[2]
        if endpoint == "count_tokens":
            return self._send(200, "application/json", json.dumps({"input_tokens": INPUT_TOKENS}).encode())
        build_events = {"messages": build_message_events, "responses": build_response_events}.get(endpoint)
        if build_events is None or not body.get("stream"):
            problem = {"type": "error", "error": {"type": "not_found_error", "message": f"not scripted: {self.path}"}}
            return self._send(404, "application/json", json.dumps(problem).encode())
        events = build_events(body)
        content = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        return self._send(200, "text/event-stream", content.encode())

    def _send(self, status: int, content_type: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def find_next_step(prompt: str, results: int) -> Step:
    """Return the answer after `results` tool results of a prompt."""
    calls = CALL_PATTERN.findall(prompt)
    if results < len(calls):
        return Step(results + 1, *calls[results])
    return Step(results + 1, text=f"Done after {results} calls.")


def build_message_events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Build the events of Anthropic's streamed answer."""
    prompt, results = _read_messages(body["messages"])
    step = find_next_step(prompt, results)
    stated = USAGE_PATTERN.search(prompt)
    whole = json.loads(stated[1]) if stated else {"output_tokens": OUTPUT_TOKENS}
    usage = {"input_tokens": INPUT_TOKENS, **whole, "output_tokens": 1}
    message = {"id": f"msg_{step.number}", "type": "message", "role": "assistant", "model": body["model"], "content": [],
               "stop_reason": None, "stop_sequence": None, "usage": usage}  # fmt: skip
    yield {"type": "message_start", "message": message}
    if step.tool:
        block = {"type": "tool_use", "id": f"toolu_{len(body['messages'])}_{step.number}", "name": step.tool, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": step.arguments}
    else:
        block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": step.text}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    reason = "tool_use" if step.tool else "end_turn"
    yield {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None},
           "usage": whole}  # fmt: skip
    yield {"type": "message_stop"}


def _read_messages(messages: list[dict[str, Any]]) -> tuple[str, int]:
    """Return the text of the last prompt, and the number of tool results after it."""
    results = 0
    for message in reversed(messages):
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        found = [part for part in parts if part["type"] == "tool_result"]
        results += len(found)
        if message["role"] == "user" and not found:
            return "\n".join(part["text"] for part in parts if part["type"] == "text"), results
    return "", results


def build_response_events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Build the events of OpenAI's streamed response."""
    step = find_next_step(*_read_input(body["input"]))
    response = {"id": f"resp_{step.number}", "object": "response", "created_at": 1, "status": "in_progress",
                "model": body["model"], "output": []}  # fmt: skip
    yield {"type": "response.created", "response": response}
    if step.tool:
        item = {"type": "function_call", "id": f"fc_{step.number}", "call_id": f"call_{len(body['input'])}_{step.number}",
                "name": step.tool, "arguments": step.arguments, "status": "completed"}  # fmt: skip
    else:
        part = {"type": "output_text", "text": step.text, "annotations": []}
        item = {"type": "message", "id": f"msg_{step.number}", "role": "assistant", "status": "completed", "content": [part]}
    yield {"type": "response.output_item.added", "output_index": 0, "item": item}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    usage = {"input_tokens": INPUT_TOKENS, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": OUTPUT_TOKENS,
             "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": INPUT_TOKENS + OUTPUT_TOKENS}  # fmt: skip
    yield {"type": "response.completed", "response": response | {"status": "completed", "output": [item], "usage": usage}}


def _read_input(items: list[dict[str, Any]]) -> tuple[str, int]:
    """Return the text of the last prompt, and the number of tool results after it."""
    results = 0
    for item in reversed(items):
        if item.get("type") in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
            results += 1
        elif item.get("role") == "user":
            text = "\n".join(part.get("text", "") for part in item["content"])
            if "<environment_context>" not in text:
                return text, results
    return "", results


if __name__ == "__main__":
    ScriptedModelServer(int(sys.argv[1])).serve_forever()
