"""LangChain's suite for sandbox backends, and further tests, executed by a Python that has deepagents.

Needs LEASEHOLD_URL and LEASEHOLD_KEY of a running control plane. tests/e2e/test_deepagents.py executes this file."""

import os
import uuid
from collections.abc import Iterator

import pytest
from deepagents.backends.protocol import SandboxBackendProtocol
from langchain_tests.integration_tests import SandboxIntegrationTests

from leases.adapters.deepagents import CHUNK_BYTES, LeaseholdSandbox, add_conversation_history

DID = "did:web:deepagents.invalid"


def join(environment: str = "") -> LeaseholdSandbox:
    return LeaseholdSandbox.join(
        os.environ["LEASEHOLD_URL"], os.environ["LEASEHOLD_KEY"], agent_did=DID, environment_type="coding",
        environment_id=environment or uuid.uuid4().hex,
    )  # fmt: skip


class TestLeasehold(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[SandboxBackendProtocol]:
        with join() as sandbox:
            yield sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[LeaseholdSandbox]:
    with join() as sandbox:
        yield sandbox


def test_join_returns_the_lease_that_the_agent_holds():
    with join("held") as sandbox:
        assert join("held").id == sandbox.id


def test_command_that_takes_too_long_is_killed_and_named(sandbox):
    result = sandbox.execute("echo begun; sleep 60", timeout=1)
    assert (result.exit_code, result.output) == (124, "begun\n\n[killed after 1 seconds]")


def test_command_after_the_end_of_the_lease_is_a_readable_failure():
    sandbox = join()
    sandbox.release()
    result = sandbox.execute("true")
    assert (result.exit_code, result.output) == (1, "The lease ended (released). (lease_ended)")
    [upload] = sandbox.upload_files([("/workspace/a", b"")])
    assert upload.error == "The lease ended (released)."


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 1])
def test_file_of_several_chunks_is_transferred_exactly(sandbox, size):
    content = os.urandom(size)
    [uploaded] = sandbox.upload_files([("/workspace/a/b", content)])
    [downloaded] = sandbox.download_files(["/workspace/a/b"])
    assert (uploaded.error, downloaded.error, downloaded.content == content) == (None, None, True)


def test_file_above_the_limit_is_not_downloaded(sandbox, monkeypatch):
    monkeypatch.setattr("leases.adapters.deepagents.MAX_DOWNLOAD_BYTES", 1 << 20)
    sandbox.execute("truncate -s 1048576 fits; truncate -s 4G above")
    fits, above = sandbox.download_files(["/workspace/fits", "/workspace/above"])
    assert (fits.error, len(fits.content)) == (None, 1 << 20)
    assert (above.error, above.content) == ("The file has more than 1 MiB.", None)


def test_conversation_history_is_kept_in_the_data_of_the_agent():
    with join() as first:
        backend = add_conversation_history(first)
        assert backend.write("/conversation_history/t1.md", "hello\nworld").error is None
        assert backend.edit("/conversation_history/t1.md", "world", "there").occurrences == 1
        assert first.execute("cat /data/conversation_history/t1.md").output == "hello\nthere"
    with join() as second:
        backend = add_conversation_history(second)
        assert [entry["path"] for entry in backend.ls("/conversation_history/").entries] == ["/conversation_history/t1.md"]
        assert backend.read("/conversation_history/t1.md").file_data["content"] == "hello\nthere"
        [match] = backend.grep("there", "/conversation_history/").matches
        assert (match["path"], match["line"]) == ("/conversation_history/t1.md", 2)
        assert [entry["path"] for entry in backend.glob("*.md", "/conversation_history/").matches] == [
            "/conversation_history/t1.md"
        ]
        assert backend.execute("pwd").output == "/workspace\n"
