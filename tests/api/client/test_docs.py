"""Documentation of the client: its examples run, and its types are those of the OpenAPI document."""

import re
import runpy
from pathlib import Path

import pytest

from leasehold import sandbox, schemas
from leases.models import Lease, LeaseStatus
from tests.api.client.test_sandbox import Options
from tests.api.conftest import load_openapi
from tests.support.distributions import REPOSITORY

PAGES = ["docs/client.md", "README.md", "controlplane/client/README.md"]


def find_examples(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / page).read_text(), re.DOTALL | re.MULTILINE)


EXAMPLES = [(page, text) for page in PAGES for text in find_examples(page)]


@pytest.mark.django_db(transaction=True)
def test_examples_run(options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEASEHOLD_URL", options["url"])
    monkeypatch.setenv("LEASEHOLD_API_KEY", options["api_key"])
    set_defaults = sandbox.LeaseOptions

    def use_pool(*arguments: object) -> sandbox.LeaseOptions:
        *others, fields = arguments
        return set_defaults(*others, fields | {"pool": options["pool"]})  # type: ignore[arg-type,operator]

    monkeypatch.setattr(sandbox, "LeaseOptions", use_pool)
    assert {page for page, _ in EXAMPLES} == {*PAGES}
    for _, text in EXAMPLES:
        exec(compile(text, "example", "exec"), {"__name__": "__main__"})
    leases = Lease.objects.all()
    assert len(leases) == len(EXAMPLES)
    assert not leases.filter(status=LeaseStatus.ACTIVE).exists()


def test_types_are_those_of_the_openapi_document() -> None:
    generator = runpy.run_path(str(REPOSITORY / ".ci" / "client-schemas"))
    assert generator["render"](load_openapi()) == Path(schemas.__file__).read_text(), "make schema"
