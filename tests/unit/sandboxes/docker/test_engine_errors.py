"""Answers of the Docker Engine and of servers in its place: absence only by the engine's own message."""

import json

import pytest
import requests
from docker.errors import APIError, create_api_error_from_http_exception

from sandboxes.providers.docker import engine
from sandboxes.providers.errors import FailureCause, Missing, OutOfSpace, Rejected, Unavailable
from sandboxes.redaction.texts import omit_answers
from tests.emulators.base import FOREIGN_ANSWERS

UNKNOWN_PATH = json.dumps({"message": "page not found"}).encode()
FOREIGN = {kind: (answer.status, answer.body) for kind, answer in FOREIGN_ANSWERS.items() if answer.body != b"{}"}
PAGE_OF_THE_MESSAGE = b"<html>No such container: box</html>"


def build_sdk_error(status: int, body: bytes) -> APIError:
    """Build the error that the SDK raises for an answer."""
    response = requests.Response()
    response.status_code, response._content = status, body
    with pytest.raises(APIError) as raised:
        create_api_error_from_http_exception(requests.HTTPError(response=response))
    return raised.value


@pytest.mark.parametrize(("status", "body"), [(404, UNKNOWN_PATH), (404, PAGE_OF_THE_MESSAGE), (404, b""), *FOREIGN.values()])
def test_answer_of_another_server_is_unavailable(status: int, body: bytes) -> None:
    if status != 204:
        with pytest.raises(Unavailable):
            engine._decode_response(status, body)
    if status >= 400:
        with pytest.raises(Unavailable), engine.translate_errors():
            raise build_sdk_error(status, body)


@pytest.mark.parametrize(
    "message", ["No such container: box", "No such exec instance: e", "network n not found", "no such volume"]
)
def test_message_of_the_engine_about_an_object_is_an_absence(message: str) -> None:
    body = json.dumps({"message": message}).encode()
    with pytest.raises(Missing):
        engine._decode_response(404, body)
    with pytest.raises(Missing), engine.translate_errors():
        raise build_sdk_error(404, body)


@pytest.mark.parametrize(
    "message",
    [
        "mkdir /var/lib/docker/overlay2/0f1e-init: no space left on device",
        "failed to register layer: write /usr/lib/x: no space left on device",
        "symlink ../0f1e/diff /var/lib/docker/overlay2/l/Q: disk quota exceeded",
    ],
)
def test_full_disk_of_the_engine_is_out_of_space_without_its_paths(message: str) -> None:
    with pytest.raises(OutOfSpace) as raised, engine.translate_errors():
        raise build_sdk_error(500, json.dumps({"message": message}).encode())
    assert message in str(raised.value) and "/" not in omit_answers(str(raised.value))


def test_image_without_the_program_of_process_1_is_unusable() -> None:
    message = (
        "failed to create task for container: failed to create shim task: OCI runtime create failed: runc create failed: "
        'unable to start container process: exec: "python3": executable file not found in $PATH: unknown'
    )
    for status in (400, 500):
        with pytest.raises(Rejected) as raised, engine.translate_errors():
            raise build_sdk_error(status, json.dumps({"message": message}).encode())
        assert raised.value.cause == FailureCause.IMAGE_UNUSABLE
