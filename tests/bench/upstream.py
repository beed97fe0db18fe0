"""Upstream without latency, for measuring the egress proxy: `python -m tests.bench.upstream PORT`."""

import json
import sys

from aiohttp import web

USAGE = {"prompt_tokens": 120, "completion_tokens": 7, "total_tokens": 127}
CHUNK_TEMPLATE = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt"}
COMPLETION_BODY = json.dumps({
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "gpt", "usage": USAGE,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "An answer."}, "finish_reason": "stop"}],
}).encode()  # fmt: skip
STREAM_EVENTS = [
    *(CHUNK_TEMPLATE | {"choices": [{"index": 0, "delta": {"content": text}}]} for text in ("An ", "answer", ".")),
    CHUNK_TEMPLATE | {"choices": [], "usage": USAGE},
]


async def handle_completion(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if not body.get("stream"):
        cost = {"x-litellm-response-cost": "0.0000123"}
        return web.Response(body=COMPLETION_BODY, content_type="application/json", headers=cost)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in STREAM_EVENTS:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


if __name__ == "__main__":
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle_completion)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
