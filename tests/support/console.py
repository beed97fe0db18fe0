"""Access to the pages of the console: URLs of rows and actions, content of pages, messages and query counts."""

from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

from django.contrib.messages import get_messages
from django.core.cache import cache
from django.db import connection
from django.db.models import Model
from django.test import Client
from django.test.utils import CaptureQueriesContext

from controlplane.console import dashboard
from sandboxes.admin.base.formatting import SummaryField

MARKUP = """<img src=x onerror=alert(1)> x-data="alert(2)" {{ 7 }}"""
WHY = {"_form_submitted": "on", "reason": "it was agreed"}
ENVIRONMENT_TYPE_FORM = {
    "ttl": "4h", "max_ttl": "1d", "expiry_conditions": "", "turn_argv": "play", "sleep_after": "5m", "turn_timeout": "",
    "snapshot_excludes": "", "pool": "", "policy": "",
    "alternative_pools-TOTAL_FORMS": 0, "alternative_pools-INITIAL_FORMS": 0,
}  # fmt: skip


def row_url(row: Model, act: str = "change") -> str:
    """Return the URL of a row's page, or of one of the row's actions."""
    return f"/admin/{row._meta.label_lower.replace('.', '/')}/{row.pk}/{act}/"


def fetch(client: Client, url: str) -> str:
    """Return the text of a page."""
    answer = client.get(url)
    assert answer.status_code == 200, url
    return (b"".join(answer) if answer.streaming else answer.content).decode()  # type: ignore[arg-type, attr-defined]


def get_fields(client: Client, url: str) -> dict[str, SummaryField]:
    return {fact.label: fact for fact in client.get(url).context["facts"]}


def list_rows(client: Client, url: str) -> list[Any]:
    answer = client.get(url)
    assert answer.status_code == 200, url
    return list(answer.context["cl"].result_list)


class _FormReader(HTMLParser):
    """Names and values that a browser would submit with the fields of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Any] = {}  # of checkboxes with the same name a list
        self.select = self.textarea = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        name, is_box = given.get("name", ""), given.get("type") in ("checkbox", "radio")
        if tag == "select":
            self.select = name
        elif tag == "option" and "selected" in given:
            self.values[self.select] = given.get("value", "")
        elif tag == "textarea":
            self.textarea, self.values[name] = name, ""
        elif tag == "input" and given.get("type") == "checkbox" and "checked" in given and name in self.values:
            self.values[name] = [*self.values[name], given["value"]]
        elif tag == "input" and name and given.get("type") != "submit" and (not is_box or "checked" in given):
            text = given.get("value", "on" if is_box else "")
            self.values[name] = [text] if given.get("type") == "checkbox" and "value" in given else text

    def handle_data(self, data: str) -> None:
        if self.textarea:
            self.values[self.textarea] += data if self.values[self.textarea] else data.removeprefix("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "textarea":
            self.values[self.textarea] = self.values[self.textarea].replace("\n", "\r\n")
            self.textarea = ""


def read_form(client: Client, url: str) -> dict[str, Any]:
    """Return the values that a browser would submit from a page without a change."""
    reader = _FormReader()
    reader.feed(fetch(client, url))
    return reader.values


def list_messages(answer: Any) -> list[str]:
    return [str(message) for message in get_messages(answer.wsgi_request)]


def submit_bulk(client: Client, page: str, action: str, pks: list[object], **more: str) -> Any:
    """Submit a bulk action as its confirmation page does."""
    return client.post(urljoin("/admin/", page), {"action": action, "_selected_action": [str(pk) for pk in pks], **more})


def count_queries(client: Client, url: str) -> int:
    """Return the number of queries of one page, without those of the fleet's summary."""
    cache.set("fleet", dashboard.build_fleet_summary(), 600)  # as in normal operation; it may have expired on a slow machine
    with CaptureQueriesContext(connection) as captured:
        assert client.get(url).status_code == 200
    return len(captured)


def assert_constant_queries(client: Client, pages: list[str], limit: int, create: Callable[[range], object]) -> dict[str, int]:
    """Require as many queries of each page for eight rows as for three, and at most `limit`. Returns the counts by page."""
    urls, counts = {page: urljoin("/admin/", page) for page in pages}, []
    for numbers in (range(3), range(3, 8)):
        create(numbers)
        if not counts:  # ids of content types are read once in a process
            for url in urls.values():
                client.get(url)
        counts.append({page: count_queries(client, url) for page, url in urls.items()})
    assert counts[0] == counts[1], {page: [n[page] for n in counts] for page in urls if counts[0][page] != counts[1][page]}
    assert max(counts[0].values()) <= limit
    return counts[0]
