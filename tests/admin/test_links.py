"""Every link of the console leads to a page, from whichever page it is found on."""

import re
from html import unescape

import pytest
from django.test import Client
from django.utils import timezone

from sandboxes.providers.memory import MemoryProvider
from tests.admin.seed import seed

pytestmark = pytest.mark.django_db
LEAVE = ("/admin/logout/", "/admin/password_change/", "/admin/jsi18n/")


def shape(url: str) -> str:
    """What pages of one kind have in common: of each kind, one is opened."""
    path, _, query = url.partition("?")
    return re.sub(r"[0-9a-f-]{36}|/\d+/", "*", path) + str(re.findall(r"(?:^|&)(slice=\w+|only=\w+|agent_did|q)", query))


def test_every_link_leads_to_a_page(superuser: Client, memory: MemoryProvider) -> None:
    seed(timezone.now())
    seen, ahead = set(), ["/admin/"]
    while ahead:
        url = ahead.pop()
        if shape(url) in seen or url.startswith(LEAVE):
            continue
        seen.add(shape(url))
        shown = superuser.get(url)
        assert shown.status_code == 200, url
        if shown.headers["Content-Type"].startswith("text/html"):
            for link in map(unescape, re.findall(r'(?:href|hx-get)="([^"#]+)', shown.content.decode())):
                ahead += (
                    [url.partition("?")[0] + link] if link.startswith("?") else [link] if link.startswith("/admin/") else []
                )
    assert len(seen) > 80
