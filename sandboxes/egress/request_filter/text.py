"""Tables of OpenAI's completions and embeddings: strings, or lists of token numbers."""

from sandboxes.egress.request_filter.chat import IGNORED_FIELDS, STOP, STREAM_OPTIONS
from sandboxes.egress.request_filter.shapes import Either, Leaf, RequestShape, TokenMap


def texts_or_tokens(text: Leaf) -> Either:
    """Declare a string, a list of strings, a list of token numbers, or a list of such lists."""
    return Either(string=text, items=Either(string=text, number=Leaf.NUMBER, items=Leaf.NUMBER))


COMPLETIONS_REQUEST = RequestShape(
    required="prompt",
    fields={
        **dict.fromkeys(
            (
                "model", "stream", "temperature", "top_p", "max_tokens", "n", "seed", "logprobs", "echo", "presence_penalty",
                "frequency_penalty", "best_of",
            ),
            Leaf.VALUE,
        ),
        "prompt": texts_or_tokens(Leaf.TEXT),
        "suffix": Leaf.TEXT,
        "stop": STOP,
        "logit_bias": TokenMap(Leaf.NUMBER),
        "stream_options": STREAM_OPTIONS,
        **dict.fromkeys(IGNORED_FIELDS, Leaf.IGNORED),
    },
)  # fmt: skip
EMBEDDINGS_REQUEST = RequestShape(
    required="input",
    fields={
        **dict.fromkeys(("model", "dimensions", "encoding_format"), Leaf.VALUE),
        "input": texts_or_tokens(Leaf.INPUT),
        **dict.fromkeys(IGNORED_FIELDS, Leaf.IGNORED),
    },
)
