"""Token usage in the formats of different providers. Input tokens always include cached tokens."""

from typing import Any

import pytest

from sandboxes.egress.token_usage import TokenUsage
from tests.support.servers.models import TOKEN_COUNTS, ChatCompletionsApi, MessagesApi


@pytest.mark.parametrize(
    ("document", "counts"),
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
        ({"usage": {"input_tokens": 10**9, "cache_read_input_tokens": 1}}, (None, 1, None)),
        ({"usage": []}, (None, None, None)),
        ([], (None, None, None)),
    ],
)
def test_tokens_are_read_in_every_format_and_invalid_counts_are_none(document: Any, counts: tuple[int | None, ...]) -> None:
    usage = TokenUsage()
    usage.add(document)
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == counts


@pytest.mark.parametrize("shape", [ChatCompletionsApi, MessagesApi])
@pytest.mark.parametrize("streamed", [False, True])
def test_streamed_and_whole_responses_report_the_same_usage(shape: Any, streamed: bool) -> None:
    usage = TokenUsage()
    for document in shape.events("m") if streamed else [shape.whole("m")]:
        usage.add(document)
    assert [usage.input_tokens, usage.cached_tokens, usage.output_tokens] == [*TOKEN_COUNTS.values()]
