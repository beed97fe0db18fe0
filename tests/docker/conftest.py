"""Fixtures of several test modules of the Docker provider."""

from collections.abc import Iterator

import pytest

from sandboxes import providers
from tests.conftest import DOCKER_IMAGE
from tests.support.servers.engines import PrivateEngine, private_engine


@pytest.fixture
def engine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrivateEngine]:
    """Private engine of the Docker provider, with the default of Docker: no container survives a stop of its daemon."""
    directory = tmp_path_factory.mktemp("engine")
    with private_engine(directory / "data", images=(DOCKER_IMAGE,)) as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.url)
        providers._create_provider.cache_clear()
        yield engine
    providers._create_provider.cache_clear()
