"""Vendor of a model by the model's name."""

import pytest

from billing.model_providers import find_model_provider


@pytest.mark.parametrize(
    ("model", "vendor"),
    [
        ("claude-opus-4-5-20251101", "anthropic"), ("eu.anthropic.claude-sonnet-4-5-20250929-v1:0", "anthropic"),
        ("vertex_ai/claude-sonnet-4-5@20250929", "anthropic"), ("openrouter/anthropic/claude-opus-4.5", "anthropic"),
        ("gpt-4.1-mini", "openai"), ("o3", "openai"), ("o4-mini-2025-04-16", "openai"), ("ft:gpt-4o:org::id", "openai"),
        ("text-embedding-3-large", "openai"), ("groq/openai/gpt-oss-120b", "openai"), ("gemini-2.5-pro", "google"),
        ("models/gemini-2.5-flash", "google"), ("grok-4", "xai"), ("deepseek-chat", "deepseek"),
        ("us.deepseek.r1-v1:0", "deepseek"),
        ("kimi-k2", "moonshot"), ("moonshotai/Kimi-K2-Instruct", "moonshot"), ("mistral-large-latest", "mistral"),
        ("codestral-2508", "mistral"), ("Qwen/Qwen3-Coder", "alibaba"), ("meta-llama/Llama-3.3-70B", "meta"),
        ("o4x", ""), ("my-claude-proxy", ""), ("", ""),
    ],
)  # fmt: skip
def test_vendor_follows_from_the_name(model: str, vendor: str) -> None:
    assert find_model_provider(model) == vendor
