"""Crawl of the console: every link leads to a page."""

import re
from html import unescape

import pytest
from django.test import Client
from django.utils import timezone

from sandboxes.providers.memory import MemoryProvider
from tests.admin.seed import seed

pytestmark = pytest.mark.django_db
LEAVE = ("/admin/logout/", "/admin/password_change/", "/admin/jsi18n/")


def list_kinds(url: str) -> set[str]:
    """Reduce a URL to the kind of page and each of its filters. An export is one kind."""
    path, _, query = url.partition("?")
    page = re.sub(r"[0-9a-f-]{36}|/\d+/", "*", path)
    filters = re.findall(r"(?:^|&)(slice=\w+|only=\w+|agent_did|q)", query) if "/export/" not in path else []
    return {page, *(f"{page}?{name}" for name in filters)}


def test_every_link_leads_to_a_page(superuser: Client, memory: MemoryProvider) -> None:
    seed(timezone.now())
    seen: set[str] = set()
    ahead = ["/admin/"]
    while ahead:
        url = ahead.pop()
        if list_kinds(url) <= seen or url.startswith(LEAVE):
            continue
        seen |= list_kinds(url)
        shown = superuser.get(url)
        assert shown.status_code == 200, url
        if shown.headers["Content-Type"].startswith("text/html"):
            for link in map(unescape, re.findall(r'(?:href|hx-get)="([^"#]+)', shown.content.decode())):
                ahead += (
                    [url.partition("?")[0] + link] if link.startswith("?") else [link] if link.startswith("/admin/") else []
                )
    assert len(seen) > 80
