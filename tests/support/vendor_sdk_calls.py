"""Calls of the vendors' SDKs through a unix socket, executed by a Python that has the SDKs.

    python vendor_sdk_calls.py SOCKET < CALLS

CALLS and the output are JSON lists. A call is [SDK, method, arguments]; a result has the usage, or the error, as the SDK's user
sees it. The SDKs retry as they do by default."""

import json
import sys
from typing import Any

import anthropic
import httpx2
import openai

TIMEOUT_SECONDS = 30.0


def build_clients(socket: str) -> dict[str, Any]:
    def build_transport() -> httpx2.Client:
        return httpx2.Client(transport=httpx2.HTTPTransport(uds=socket), timeout=TIMEOUT_SECONDS)

    return {
        "anthropic": anthropic.Anthropic(api_key="none", base_url="http://sandbox", http_client=build_transport()),
        "openai": openai.OpenAI(api_key="none", base_url="http://sandbox/v1", http_client=build_transport()),
    }


def call(client: Any, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
    verb = client
    for name in method.split("."):
        verb = getattr(verb, name)
    try:
        answer = verb(**arguments)
        if arguments.get("stream"):
            found = [usage for event in answer for usage in find_usages(event)]
            return {"usage": [each.to_dict() for each in found]}
        return {"usage": [answer.usage.to_dict()]}
    except (anthropic.APIStatusError, openai.APIStatusError) as error:
        return {
            "error": type(error).__name__,
            "status": error.status_code,
            "retry_after": error.response.headers.get("retry-after"),
        }
    except (anthropic.APIError, openai.APIError) as error:
        return {"error": type(error).__name__}


def find_usages(event: Any) -> list[Any]:
    holders = (event, getattr(event, "message", None), getattr(event, "response", None))
    return [usage for holder in holders if (usage := getattr(holder, "usage", None)) is not None]


if __name__ == "__main__":
    sdks = build_clients(sys.argv[1])
    json.dump([call(sdks[name], method, arguments) for name, method, arguments in json.load(sys.stdin)], sys.stdout)
