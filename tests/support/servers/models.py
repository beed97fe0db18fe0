"""Fake model provider: OpenAI's chat completions, responses and embeddings, and Anthropic's messages, whole and streamed.

    python -m tests.support.servers.models PORT

It is LiteLLM's upstream in the tests. The model's name selects the behaviour: `slow` pauses after each piece of the answer,
`slowest` pauses long enough for crash tests, `failing` answers 500, `breaking` ends a stream with an error after its usage."""

import json
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANSWER_CHUNKS = ("An ", "answer ", "in ", "pieces.")
TOKEN_COUNTS = {"in": 1000, "cached": 400, "out": 50}  # usage of every complete response; `in` includes `cached`
PAUSES_SECONDS = {"slowest": 5.0, "slow": 0.4}


class ModelServer(ThreadingHTTPServer):
    """HTTP server on loopback."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _ModelHandler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _ModelHandler(BaseHTTPRequestHandler):
    server: ModelServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pause = next((pause for name, pause in PAUSES_SECONDS.items() if name in body["model"]), 0)
        shape = API_BY_ENDPOINT[self.path.rpartition("/")[2]]
        if "failing" in body["model"]:
            return self._send_json(500, {"type": "error", "error": {"type": "api_error", "message": "no"}})
        if not body.get("stream"):
            time.sleep(10 * pause)
            return self._send_json(200, shape.whole(body["model"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if "breaking" in body["model"]:
            error = {"error": {"message": "overloaded", "type": "server_error", "code": 503}}
            for event in ([*shape.events(body["model"])][-1], error):
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
                time.sleep(0.3)  # the usage has arrived before the error
            return None
        for event in shape.events(body["model"]):
            named = f"event: {event['type']}\n" if "type" in event else ""
            self.wfile.write(f"{named}data: {json.dumps(event)}\n\n".encode())
            time.sleep(pause)
        if shape is ChatCompletionsApi:
            self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _send_json(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class ChatCompletionsApi:
    """OpenAI's chat completions."""

    usage = {"prompt_tokens": TOKEN_COUNTS["in"], "completion_tokens": TOKEN_COUNTS["out"],
             "total_tokens": TOKEN_COUNTS["in"] + TOKEN_COUNTS["out"],
             "prompt_tokens_details": {"cached_tokens": TOKEN_COUNTS["cached"]}}  # fmt: skip

    @classmethod
    def whole(cls, model: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(ANSWER_CHUNKS)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model, "choices": [choice],
                "usage": cls.usage}  # fmt: skip

    @classmethod
    def events(cls, model: str) -> Iterator[dict[str, Any]]:
        start = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}
        for piece in ANSWER_CHUNKS:
            delta = {"role": "assistant", "content": piece}
            yield start | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield start | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        yield start | {"choices": [], "usage": cls.usage}


class MessagesApi:
    """Anthropic's messages."""

    usage = {"input_tokens": TOKEN_COUNTS["in"] - TOKEN_COUNTS["cached"], "cache_read_input_tokens": TOKEN_COUNTS["cached"],
             "cache_creation_input_tokens": 0}  # fmt: skip

    @classmethod
    def whole(cls, model: str) -> dict[str, Any]:
        return {"id": "msg_1", "type": "message", "role": "assistant", "model": model, "stop_reason": "end_turn",
                "stop_sequence": None, "content": [{"type": "text", "text": "".join(ANSWER_CHUNKS)}],
                "usage": cls.usage | {"output_tokens": TOKEN_COUNTS["out"]}}  # fmt: skip

    @classmethod
    def events(cls, model: str) -> Iterator[dict[str, Any]]:
        message = cls.whole(model) | {"content": [], "stop_reason": None, "usage": cls.usage | {"output_tokens": 1}}
        yield {"type": "message_start", "message": message}
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        for piece in ANSWER_CHUNKS:
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
        yield {"type": "content_block_stop", "index": 0}
        yield {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None},
               "usage": {"output_tokens": TOKEN_COUNTS["out"]}}  # fmt: skip
        yield {"type": "message_stop"}


class ResponsesApi:
    """OpenAI's responses."""

    usage = {"input_tokens": TOKEN_COUNTS["in"], "output_tokens": TOKEN_COUNTS["out"],
             "total_tokens": TOKEN_COUNTS["in"] + TOKEN_COUNTS["out"], "output_tokens_details": {"reasoning_tokens": 0},
             "input_tokens_details": {"cached_tokens": TOKEN_COUNTS["cached"]}}  # fmt: skip

    @classmethod
    def whole(cls, model: str) -> dict[str, Any]:
        text = {"type": "output_text", "text": "".join(ANSWER_CHUNKS), "annotations": []}
        message = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [text]}
        return cls._response(model, "completed") | {"output": [message], "usage": cls.usage}

    @classmethod
    def events(cls, model: str) -> Iterator[dict[str, Any]]:
        yield {"type": "response.created", "sequence_number": 0, "response": cls._response(model, "in_progress")}
        for number, piece in enumerate(ANSWER_CHUNKS):
            yield {"type": "response.output_text.delta", "sequence_number": number + 1, "item_id": "msg_1", "output_index": 0,
                   "content_index": 0, "delta": piece, "logprobs": []}  # fmt: skip
        yield {"type": "response.completed", "sequence_number": len(ANSWER_CHUNKS) + 1, "response": cls.whole(model)}

    @staticmethod
    def _response(model: str, status: str) -> dict[str, Any]:
        return {"id": "resp_1", "object": "response", "created_at": 1, "status": status, "model": model, "output": [],
                "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}  # fmt: skip


class EmbeddingsApi:
    """OpenAI's embeddings."""

    @staticmethod
    def whole(model: str) -> dict[str, Any]:
        vector = {"object": "embedding", "index": 0, "embedding": [0.25, 0.5]}
        usage = {"prompt_tokens": TOKEN_COUNTS["in"], "total_tokens": TOKEN_COUNTS["in"]}
        return {"object": "list", "model": model, "data": [vector], "usage": usage}


API_BY_ENDPOINT: dict[str, Any] = {"completions": ChatCompletionsApi, "responses": ResponsesApi, "embeddings": EmbeddingsApi,
                                   "messages": MessagesApi}  # fmt: skip

if __name__ == "__main__":
    ModelServer(int(sys.argv[1])).serve_forever()
