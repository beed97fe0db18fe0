"""The OpenAPI document matches the API. Every other API test checks its responses against it, too."""

import re
from typing import Any

import pytest
from django.contrib.staticfiles import finders
from django.core.management import call_command
from django.test import Client

from tests.api.conftest import OPENAPI, load_openapi, parse_yaml

REGENERATE_COMMAND = "manage.py spectacular --file controlplane/openapi.yaml"


def test_the_committed_document_is_up_to_date(tmp_path) -> None:
    fresh = tmp_path / "openapi.yaml"
    call_command("spectacular", "--validate", "--fail-on-warn", "--file", str(fresh))
    assert fresh.read_text() == OPENAPI.read_text(), REGENERATE_COMMAND


def operations() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{method} {path}", operation)
        for path, methods in load_openapi()["paths"].items()
        for method, operation in methods.items()
    ]


@pytest.mark.parametrize(("name", "operation"), operations(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_operation_documents_authentication_and_errors(name: str, operation: dict[str, Any]) -> None:
    assert operation["security"] == ([{"signedUrl": []}] if name.endswith("/signed-files") else [{"key": []}])
    failures = {status: response["content"] for status, response in operation["responses"].items() if status >= "400"}
    required = {"400", "401", "500"} | ({"404"} if "{id}" in name else set())
    assert failures.keys() >= required | ({"413"} if name.startswith(("post", "put")) else set())
    problem = {"schema": {"$ref": "#/components/schemas/Problem"}}
    assert all(content == {"application/problem+json": problem} for content in failures.values())
    headers = [row["name"] for row in operation.get("parameters", []) if row["in"] == "header"]
    credentials = ("/service-token", "/url", "/previews", "/file-urls", "/secrets")  # are not stored
    stores_its_response = name.startswith("post") and not name.endswith(credentials)
    resumed = ["Last-Event-ID"] if name.startswith("get") and name.endswith("/stream") else []
    assert headers == (["Idempotency-Key"] if stores_its_response else resumed)


def test_the_key_is_a_bearer_token() -> None:
    scheme = load_openapi()["components"]["securitySchemes"]["key"]
    assert (load_openapi()["openapi"], scheme["type"], scheme["scheme"]) == ("3.1.1", "http", "bearer")


@pytest.mark.django_db
def test_the_document_is_served_without_a_key() -> None:
    response = Client().get("/api/schema")
    assert parse_yaml(response.content) == load_openapi()


@pytest.mark.django_db
def test_the_docs_page_loads_only_from_this_server() -> None:
    page = Client().get("/api/docs")
    html, script = page.content.decode(), Client().get("/api/docs?script=").content.decode()
    assert "default-src 'none'; script-src 'self'" in page["Content-Security-Policy"]
    loaded = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert loaded
    assert all(url.startswith("/") and not url.startswith("//") for url in loaded)
    assert all(finders.find(url.removeprefix("/static/")) for url in loaded if url.startswith("/static/"))
    assert not re.search(r"<script(?![^>]*src=)", html)  # the policy forbids inline scripts
    assert '"validatorUrl": null' in script
    assert "https://" not in script
