"""Offline policy: a deterministic stand-in for a chat model, so that a demo needs no credentials.

The policy chooses one of the `legal_actions` of the state, which is the content of the last user message. Every response names
the offline policy, as the model and in the action."""

import hashlib
import json
import time
import uuid
from typing import Any

MODEL_NAME = "leasehold-offline-policy"

# Order of preference by action type. Types in neither list rank between the two.
PREFERRED_ACTIONS = ("BUILD_CITY", "BUILD_SETTLEMENT", "BUY_DEVELOPMENT_CARD", "BUILD_ROAD", "ROLL", "MARITIME_TRADE")
AVOIDED_ACTIONS = ("END_TURN",)


def complete_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Build a chat completion in OpenAI's format whose content is one legal action as JSON."""
    return {
        "id": f"offline-{uuid.uuid4()}",
        "object": "chat.completion",
        "created": int(time.time()),  # noqa: TID251 - of an answer
        "model": MODEL_NAME,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": json.dumps(choose_action(_extract_state(body)))},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def build_stream_events(completion: dict[str, Any]) -> list[dict[str, Any] | str]:
    """Convert a chat completion to the events of a stream, without the `data:` prefix."""
    common = {**{name: completion[name] for name in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    delta = completion["choices"][0]["message"]
    return [
        {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**common, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        "[DONE]",
    ]


def choose_action(state: Any) -> dict[str, Any]:
    """Choose one of the state's legal actions, deterministically. Return a skip_turn action if there is none."""
    legal = state.get("legal_actions") if isinstance(state, dict) else None
    if not isinstance(legal, list) or not legal:
        return {"action": "skip_turn", "reason": "The offline policy found no legal_actions in the state.", "by": MODEL_NAME}
    best = min(map(_rank_action, legal))
    choices = [action for action in legal if _rank_action(action) == best]
    seed = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).digest()
    chosen = choices[int.from_bytes(seed[:8]) % len(choices)]
    return {**chosen, "by": MODEL_NAME} if isinstance(chosen, dict) else {"action": chosen, "by": MODEL_NAME}


def _rank_action(action: Any) -> int:
    kind = action.get("type") if isinstance(action, dict) else action
    if kind in PREFERRED_ACTIONS:
        return PREFERRED_ACTIONS.index(kind)
    return len(PREFERRED_ACTIONS) + (kind in AVOIDED_ACTIONS)


def _extract_state(body: dict[str, Any]) -> Any:
    for message in reversed(body.get("messages", [])):
        if isinstance(message, dict) and message.get("role") == "user":
            try:
                return json.loads(message.get("content") or "")
            except (ValueError, TypeError, RecursionError):
                return None
    return None
