"""Receiver of webhooks: one server for all tests."""

from collections.abc import Iterator

import pytest

from tests.support.receiver import WebhookReceiver, run_receiver


@pytest.fixture(scope="session")
def receiver_server() -> Iterator[WebhookReceiver]:
    with run_receiver() as server:
        yield server


@pytest.fixture
def receiver(receiver_server: WebhookReceiver) -> Iterator[WebhookReceiver]:
    receiver_server.reset()
    yield receiver_server
    receiver_server.stopping.set()
