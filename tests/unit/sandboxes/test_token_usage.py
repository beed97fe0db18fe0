"""Tokens are counted alike, whoever counts them: input has what came from the cache in it."""

from typing import Any

import pytest

from sandboxes.egress.token_usage import TokenUsage
from tests.support.models import TOKEN_COUNTS, ChatCompletionsApi, MessagesApi


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 4}}, (3, None, 4)),
        ({"usage": {"input_tokens": 3, "output_tokens": 4, "cache_read_input_tokens": 2}}, (5, 2, 4)),
        ({"usage": {"input_tokens": 3, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 7}}, (12, 2, None)),
        ({"usage": {"input_tokens": 3, "cache_read_input_tokens": None, "cache_creation_input_tokens": -7}}, (3, None, None)),
        ({"usage": {"prompt_tokens": 3, "input_tokens": 1, "cache_read_input_tokens": 2}}, (3, 2, None)),
        ({"usage": {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 2}}}, (3, 2, None)),
        ({"response": {"usage": {"input_tokens": 3, "output_tokens": 0}}}, (3, None, 0)),
        ({"usage": {"prompt_tokens": -3, "completion_tokens": True}}, (None, None, None)),
        ({"usage": {"prompt_tokens": 1 << 60, "completion_tokens": "4"}}, (None, None, None)),
        ({"usage": {"input_tokens": (1 << 53) - 1, "cache_read_input_tokens": 1}}, (None, 1, None)),
        ({"usage": []}, (None, None, None)),
        ([], (None, None, None)),
    ],
)
def test_tokens_are_read_in_every_shape_and_nonsense_is_none(said: Any, counted: tuple[int | None, ...]) -> None:
    usage = TokenUsage()
    usage.take(said)
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == counted


@pytest.mark.parametrize("shape", [ChatCompletionsApi, MessagesApi])
@pytest.mark.parametrize("streamed", [False, True])
def test_what_a_provider_says_whole_or_in_events_is_the_same(shape: Any, streamed: bool) -> None:
    usage = TokenUsage()
    for said in shape.events("m") if streamed else [shape.whole("m")]:
        usage.take(said)
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (
        TOKEN_COUNTS["in"],
        TOKEN_COUNTS["cached"],
        TOKEN_COUNTS["out"],
    )
