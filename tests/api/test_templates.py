"""/templates: building, visibility and errors. The builds themselves: tests/docker/test_templates.py."""

from typing import Any

import pytest
from django_q.models import OrmQ

from sandboxes.models import ImageTemplate
from sandboxes.providers.memory import MemoryProvider
from tests.api.conftest import ApiClient, assert_refused
from tests.support.billing import ADA

pytestmark = pytest.mark.django_db


@pytest.fixture
def builds_images(memory: MemoryProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryProvider, "builds_images", True)


@pytest.mark.usefixtures("builds_images")
def test_template_is_queued_once_and_read_by_every_key(builder: ApiClient, ada: ApiClient) -> None:
    body = {"name": "tools", "commands": ["pip install requests"]}
    created = builder.post("templates", body)
    assert (created.status_code, created.json()["state"]) == (202, "building")
    assert builder.post("templates", body).json() == created.json()
    assert OrmQ.objects.count() == 1
    ImageTemplate.objects.update(log="Step 1/3")
    url = f"templates/{created.json()['id']}"
    assert builder.get(url).json() == created.json() | {"log": "Step 1/3"}
    assert_refused(builder, "DELETE", url, None, 409)
    ImageTemplate.objects.update(state="ready", image="x", size_bytes=5, deadline_at=None)
    done = builder.post("templates", body)
    assert (done.status_code, done.json()["image"], done.json()["size_bytes"]) == (200, "x", 5)


@pytest.mark.usefixtures("builds_images")
def test_agents_see_the_name_and_state_of_a_template_and_nothing_of_its_build(builder: ApiClient, ada: ApiClient) -> None:
    """Commands, logs and errors of builds may contain tokens of a package index."""
    bodies = [
        {"name": "one", "base": "private/base:1", "commands": ["pip install -i https://TOKEN@index.test/ x"]},
        {"name": "two", "dockerfile": "FROM private/base:1"},
    ]
    created = [builder.post("templates", body).json() for body in bodies]
    ImageTemplate.objects.update(log="TOKEN", error="TOKEN", image="private/image", size_bytes=5)
    shown = {"id", "name", "version", "state", "created_at", "started_at", "finished_at"}
    listed = ada.get("templates").json()["results"]
    documents = [*listed, *(ada.get(f"templates/{document['id']}").json() for document in created)]
    assert len(documents) == 4
    for document in documents:
        assert {name for name, value in document.items() if value is not None} <= shown
    assert {document["name"] for document in documents} == {"one", "two"}
    assert builder.get("templates").json()["results"][0]["error"] == "TOKEN"


@pytest.mark.usefixtures("builds_images")
def test_only_an_operators_key_with_the_scope_builds_and_removes(issue: Any, builder: ApiClient, operator: ApiClient) -> None:
    body = {"name": "tools", "commands": ["true"]}
    url = f"templates/{builder.post('templates', body).json()['id']}"
    agent = issue(ADA, scopes=["leases", "templates"])
    for client, code in ((operator, "insufficient_scope"), (agent, "forbidden")):
        assert assert_refused(client, "POST", "templates", body, 403)["code"] == code
        assert assert_refused(client, "DELETE", url, None, 403)["code"] == code


@pytest.mark.usefixtures("builds_images")
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "A"}, "name"), ({"name": 1}, "name"), ({"name": None}, "name"), ({"commands": []}, "commands"),
        ({"commands": "true"}, "commands"), ({"commands": [1]}, "commands.0"), ({"commands": ["x"] * 65}, "commands"),
        ({"base": "a b"}, "base"), ({"base": "x" * 256}, "base"), ({"dockerfile": "FROM a"}, "dockerfile"),
        ({"dockerfile": "x" * 64_001}, "dockerfile"), ({"rebuild": "yes"}, "rebuild"), ({"image": "x"}, "image"),
    ],
)  # fmt: skip
def test_invalid_field_is_named(builder: ApiClient, fields: dict[str, object], field: str) -> None:
    assert_refused(builder, "POST", "templates", {"name": "tools", "commands": ["true"], **fields}, 400, field)
    assert not ImageTemplate.objects.exists()


def test_provider_without_builds_is_refused(builder: ApiClient, memory: MemoryProvider) -> None:
    problem = assert_refused(builder, "POST", "templates", {"name": "tools", "commands": ["true"]}, 409)
    assert problem["code"] == "templates_not_supported"
