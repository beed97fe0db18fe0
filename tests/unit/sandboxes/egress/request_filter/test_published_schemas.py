"""Bodies of both vendors' published schemas: forwarded as they are, and never with a URL or a foreign id outside of texts."""

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandboxes.egress.request_filter import InvalidRequest, sanitize_request
from tests.support.search import budget
from tests.unit.sandboxes.egress.request_filter.schemas import BODIES, ArgumentList, Arguments, CallId, NotForwarded, Text

EXAMPLES = budget(fast=25, full=200)
HOST, FOREIGN_ID, PROVIDER_TOOL = "planted.test", "file-PLANTED123", "planted_search_20260101"
MARKS = (HOST, FOREIGN_ID, PROVIDER_TOOL, "planted_key")
URLS = (
    f"http://{HOST}/x", f"HTTPS://{HOST}", f"https:/{HOST}", f"https:\\\\{HOST}", f"//{HOST}/x", f" https://{HOST}",
    f"ht\ntps://{HOST}", f"gs://{HOST}/o", f"s3://{HOST}/o", f"file:///{HOST}", f"data:image/png,https://{HOST}",
    f"data:image/png;base64,AA==https://{HOST}", f"AA==\nhttps://{HOST}",
)  # fmt: skip
URL_KEYS = ("url", "uri", "image_url", "file_url", "file_data", "data", "source", "server_url", "title", "planted_key", "type")
ID_KEYS = ("file_id", "file_ids", "id", "container", "container_id", "vector_store_ids", "fileId", "planted_key")
TOOLS: tuple[Any, ...] = (
    {"type": PROVIDER_TOOL}, {PROVIDER_TOOL: {}}, {PROVIDER_TOOL: True},
    {"type": "namespace", "name": "n", "tools": [{"type": PROVIDER_TOOL}]},
)  # fmt: skip
OBJECT_KEYS = ("planted_key", "tool", "source", "tools")
OBJECTS: tuple[Any, ...] = (
    {"type": "item_reference", "id": FOREIGN_ID}, {"id": FOREIGN_ID}, {"type": None, "id": FOREIGN_ID},
    {"type": "file", "file": {"file_id": FOREIGN_ID}}, {"type": "file", "file_id": FOREIGN_ID},
    {"type": "input_file", "file_id": FOREIGN_ID}, {"type": "input_image", "file_id": FOREIGN_ID},
    {"type": "container_upload", "file_id": FOREIGN_ID}, {"type": "image", "source": {"type": "file", "file_id": FOREIGN_ID}},
    {"type": "document", "source": {"type": "url", "url": f"https://{HOST}"}}, {"image_url": {"url": f"https://{HOST}"}},
    {"type": "image_url", "image_url": f"https://{HOST}"}, {"type": "input_file", "file_url": f"https://{HOST}"},
    {"type": "mcp", "server_url": f"https://{HOST}"}, [f"https://{HOST}"], f"https://{HOST}",
)  # fmt: skip
ADDED: dict[str, tuple[tuple[str, ...], list[Any]]] = {
    "url key": (URL_KEYS, [*URLS, {"url": URLS[0]}, [URLS[0]]]),
    "id key": (ID_KEYS, [FOREIGN_ID, [FOREIGN_ID], {"id": FOREIGN_ID}]),
    "object key": (OBJECT_KEYS, [{}, [[]], {"a": {"b": 1}}, *OBJECTS, [TOOLS[0]], *TOOLS]),
}
TEXT_LIST_PATHS = ("/v1/completions", "/v1/embeddings")  # their lists have texts
NEVER_REPLACED = (Text, Arguments, ArgumentList, CallId)
SCALARS = (True, 7, 0.5, "high", "")


def find_containers(value: Any) -> Iterator[Any]:
    """Yield the objects and lists of a body outside of texts and arguments."""
    if isinstance(value, dict | list) and not isinstance(value, Arguments | ArgumentList):
        yield value
        for child in value.values() if isinstance(value, dict) else value:
            yield from find_containers(child)


def find_values(body: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return (container, key) of the strings, numbers and booleans outside of texts.

    A string in the place of a list or of a token number would be a text."""
    found = []
    for node in find_containers(body):
        kinds: Any = str | int | float if isinstance(node, dict) else str
        for key in node if isinstance(node, dict) else range(len(node)):
            if isinstance(node[key], kinds) and not isinstance(node[key], Text):
                found.append((node, key))
    return found


def plant(data: st.DataObject, path: str, body: dict[str, Any]) -> None:
    """Put a URL, an id of another tenant or a tool of the provider at a random place outside of texts."""
    nodes, values = list(find_containers(body)), find_values(body)
    objects = [node for node in nodes if isinstance(node, dict)]
    lists = [node for node in nodes if isinstance(node, list) and path not in TEXT_LIST_PATHS]
    way = data.draw(st.sampled_from(["value", "url key", "id key", "object key", "item"]))
    if way == "value" and values:
        node, key = data.draw(st.sampled_from(values))
        node[key] = copy.deepcopy(data.draw(st.sampled_from([*URLS, *OBJECTS])))
    elif way == "item" and lists:
        chosen = data.draw(st.sampled_from(lists))
        chosen.insert(data.draw(st.integers(0, len(chosen))), copy.deepcopy(data.draw(st.sampled_from([*OBJECTS, *TOOLS]))))
    else:
        added_keys, planted = ADDED.get(way, ADDED["url key"])
        node = data.draw(st.sampled_from(objects))
        key = data.draw(st.sampled_from([each for each in added_keys if not isinstance(node.get(each), NEVER_REPLACED)]))
        node[key] = copy.deepcopy(data.draw(st.sampled_from(planted)))


def has_mark(value: Any) -> bool:
    return any(mark in json.dumps(value) for mark in MARKS)


def without_unforwarded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_unforwarded(child) for name, child in value.items() if not isinstance(child, NotForwarded)}
    return [*map(without_unforwarded, value)] if isinstance(value, list) else value


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_valid_body_is_forwarded_without_unknown_scalars(path: str, data: st.DataObject) -> None:
    body = copy.deepcopy(data.draw(BODIES[path]))
    expected = without_unforwarded(body) | {"model": "m"} | ({"store": False} if path == "/v1/responses" else {})
    objects = [node for node in find_containers(body) if isinstance(node, dict)]
    changed = data.draw(st.lists(st.sampled_from(range(len(objects))), unique=True, max_size=3))
    if any("50256" in objects[number] or objects[number] == {} for number in changed):
        changed = []  # a map of tokens, which has no keys of its own
    for number in changed:
        objects[number]["planted_key"] = data.draw(st.sampled_from(SCALARS))
    result = sanitize_request(path, body, default_model="m")
    assert (result.body, result.dropped_count) == (expected, len(changed))


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_no_url_and_no_foreign_id_leaves_outside_of_texts(path: str, data: st.DataObject) -> None:
    body = copy.deepcopy(data.draw(BODIES[path]))
    plant(data, path, body)
    with suppress(InvalidRequest):
        forwarded = sanitize_request(path, body, default_model="m").body
        assert not has_mark(forwarded), forwarded
