"""A server that answers like model providers do, without thinking: OpenAI's chat completions and Anthropic's messages, whole
and streamed. `python -m tests.models PORT`. LiteLLM stands before it in the tests.

What the model's name has in it decides: `slow` pauses before each piece of its answer, `failing` answers 500."""

import json
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PIECES = ("An ", "answer ", "in ", "pieces.")
TOKENS = {"in": 1000, "cached": 400, "out": 50}  # what every whole answer says that it took; `in` has `cached` in it
PAUSE = 0.3  # seconds


class Models(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Models

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shape = OpenAI if self.path.endswith("/chat/completions") else Anthropic
        if "failing" in body["model"]:
            return self._whole(500, {"type": "error", "error": {"type": "api_error", "message": "no"}})
        if not body.get("stream"):
            time.sleep(10 * PAUSE if "slow" in body["model"] else 0)
            return self._whole(200, shape.whole(body["model"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event in shape.events(body["model"]):
            named = f"event: {event['type']}\n" if "type" in event else ""
            self.wfile.write(f"{named}data: {json.dumps(event)}\n\n".encode())
            time.sleep(PAUSE if "slow" in body["model"] else 0)
        if shape is OpenAI:
            self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _whole(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class OpenAI:
    usage = {
        "prompt_tokens": TOKENS["in"], "completion_tokens": TOKENS["out"], "total_tokens": TOKENS["in"] + TOKENS["out"],
        "prompt_tokens_details": {"cached_tokens": TOKENS["cached"]},
    }  # fmt: skip

    @classmethod
    def whole(cls, model: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(PIECES)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model, "choices": [choice],
                "usage": cls.usage}  # fmt: skip

    @classmethod
    def events(cls, model: str) -> Iterator[dict[str, Any]]:
        start = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}
        for piece in PIECES:
            delta = {"role": "assistant", "content": piece}
            yield start | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield start | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        yield start | {"choices": [], "usage": cls.usage}


class Anthropic:
    taken = {"input_tokens": TOKENS["in"] - TOKENS["cached"], "cache_read_input_tokens": TOKENS["cached"],
             "cache_creation_input_tokens": 0}  # fmt: skip

    @classmethod
    def whole(cls, model: str) -> dict[str, Any]:
        return {"id": "msg_1", "type": "message", "role": "assistant", "model": model, "stop_reason": "end_turn",
                "stop_sequence": None, "content": [{"type": "text", "text": "".join(PIECES)}],
                "usage": cls.taken | {"output_tokens": TOKENS["out"]}}  # fmt: skip

    @classmethod
    def events(cls, model: str) -> Iterator[dict[str, Any]]:
        message = cls.whole(model) | {"content": [], "stop_reason": None, "usage": cls.taken | {"output_tokens": 1}}
        yield {"type": "message_start", "message": message}
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        for piece in PIECES:
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
        yield {"type": "content_block_stop", "index": 0}
        yield {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None},
               "usage": {"output_tokens": TOKENS["out"]}}  # fmt: skip
        yield {"type": "message_stop"}


if __name__ == "__main__":
    Models(int(sys.argv[1])).serve_forever()
