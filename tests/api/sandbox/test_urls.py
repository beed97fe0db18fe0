"""URLs that are not UTF-8, as the web server's WSGI application receives them."""

from urllib.parse import unquote_to_bytes

import pytest

from tests.api.conftest import ApiClient
from tests.support.web_server import WebServer

# A request begins by closing a connection whose transaction was left open.
pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("name", ["bad%FFname", "lat%E9n.txt", "half%C3"])
def test_a_url_that_is_not_utf8_addresses_no_other_file(ada: ApiClient, lease, name: str) -> None:
    """A file may have the name that is the percent-encoded form of the URL's bytes, as Django would read them."""
    lease_url, escaped = f"leases/{lease['id']}", name.replace("%", "%25")
    ada.put(f"{lease_url}/files/{escaped}", b"kept")
    server = WebServer(ada.key)
    path = unquote_to_bytes(f"/api/v1/{lease_url}/files/{name}").decode("latin-1")
    for method, body in (("GET", b""), ("PUT", b"other"), ("DELETE", b"")):
        status, _, problem = server.send(method, path, body, CONTENT_TYPE="application/octet-stream")
        assert (status, problem["code"]) == (400, "bad_path")
    status, _, problem = server.send("GET", f"/api/v1/{lease_url}/files", QUERY_STRING=f"path={name}")
    assert (status, problem["field"], problem["detail"]) == (400, "path", "The query of the URL is not UTF-8.")
    status, _, problem = server.send("POST", f"/api/v1/{lease_url}/renew", QUERY_STRING=f"path={name}")
    assert (status, problem["field"], problem["detail"]) == (400, "path", "The query of the URL is not UTF-8.")
    assert ada.get(f"{lease_url}/files/{escaped}").content == b"kept"
