"""Vendor of a model, derived from the model's name."""

import re

# By the name of a vendor, as in "mistralai/mistral-large" (routers) and "eu.anthropic.claude-sonnet-4-5-v1:0" (Bedrock).
VENDORS = {
    "ai21": "ai21", "alibaba": "alibaba", "amazon": "amazon", "anthropic": "anthropic", "cohere": "cohere",
    "deepseek": "deepseek", "deepseek-ai": "deepseek", "gemini": "google", "google": "google", "meta": "meta",
    "meta-llama": "meta", "minimax": "minimax", "minimaxai": "minimax", "mistral": "mistral", "mistralai": "mistral",
    "moonshot": "moonshot", "moonshotai": "moonshot", "nvidia": "nvidia", "openai": "openai", "perplexity": "perplexity",
    "qwen": "alibaba", "x-ai": "xai", "xai": "xai", "z-ai": "zai", "zai": "zai", "zai-org": "zai",
}  # fmt: skip
FAMILIES = (
    ("anthropic", r"claude"),
    (
        "openai",
        r"(chat)?gpt|o[134](?![0-9a-z])|text-embedding-(3|ada)|davinci|babbage|dall-e|whisper|tts-|codex|omni-moderation",
    ),
    ("google", r"gemini|gemma|text-embedding-00|palm|imagen"),
    ("xai", r"grok"),
    ("deepseek", r"deepseek"),
    ("moonshot", r"kimi|moonshot"),
    ("mistral", r"mistral|mixtral|ministral|magistral|codestral|devstral|pixtral|open-mi[sx]tral"),
    ("meta", r"(meta-)?llama"),
    ("alibaba", r"qwen|qwq|qvq"),
    ("cohere", r"command-|c4ai|embed-(english|multilingual|v4)|rerank-"),
    ("amazon", r"nova-|titan-"),
    ("zai", r"glm-"),
    ("minimax", r"minimax"),
    ("perplexity", r"sonar"),
)
FAMILY_PATTERNS = [(vendor, re.compile(pattern)) for vendor, pattern in FAMILIES]


def find_model_provider(model: str) -> str:
    """Return the vendor of a model such as "anthropic", or an empty string if the name does not tell.

    A vendor in the name counts ("openai/gpt-5"), else the family of the model ("claude-sonnet-4-5"). A cloud or a router that
    serves the model is ignored: "vertex_ai/claude-sonnet-4-5" is a model of Anthropic."""
    *route, name = model.lower().removeprefix("ft:").split("/")
    stated = (VENDORS.get(part, "") for part in (*route, *name.split(".")[:2]))
    by_family = (vendor for vendor, pattern in FAMILY_PATTERNS if pattern.match(name))
    return next(filter(None, stated), None) or next(by_family, "")
