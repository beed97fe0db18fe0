"""Tests of the sandbox provider for Deep Agents Code, executed by a Python that has deepagents-code.

Needs LEASEHOLD_URL, LEASEHOLD_KEY and LEASEHOLD_AGENT of a running control plane, and the entry points of the package.
tests/e2e/test_deepagents.py executes this file."""

import asyncio
import uuid

import pytest
from deepagents_code.integrations.sandbox_factory import create_sandbox
from deepagents_code.integrations.sandbox_provider import SandboxError, SandboxNotFoundError
from deepagents_code.integrations.sandbox_registry import SandboxRegistry

from leases.adapters.deepagents_code import LeaseholdProvider


@pytest.fixture
def provider():
    return LeaseholdProvider()


def test_registry_knows_the_provider_by_its_entry_point():
    registry = SandboxRegistry()
    assert "leasehold" in registry.available_providers()
    assert isinstance(registry.create_provider("leasehold"), LeaseholdProvider)
    metadata = registry.get_metadata("leasehold")
    assert (metadata.name, metadata.working_dir, metadata.supports_sandbox_id) == ("leasehold", "/workspace", True)
    assert metadata.install.command(in_app=False) == "dcode install leasehold[deepagents] --package"


def test_sandbox_of_a_session_is_created_and_deleted_by_the_factory(provider):
    with create_sandbox("leasehold") as sandbox:
        assert sandbox.execute("pwd; echo one > a.txt").output == "/workspace\n"
        with create_sandbox("leasehold", sandbox_id=sandbox.id) as again:  # not deleted: it was not created here
            assert again.execute("cat a.txt").output == "one\n"
        assert sandbox.execute("cat a.txt").exit_code == 0
    result = sandbox.execute("true")
    assert (result.exit_code, result.output) == (1, "The lease ended (released). (lease_ended)")
    with pytest.raises(SandboxNotFoundError, match="has ended"):
        provider.get_or_create(sandbox_id=sandbox.id)
    provider.delete(sandbox_id=sandbox.id)  # idempotent


def test_parameters_are_fields_of_the_request(provider):
    environment = uuid.uuid4().hex
    first = provider.get_or_create(environment_id=environment, timeout=1)
    try:
        assert provider.get_or_create(environment_id=environment).id == first.id
        assert first.execute("sleep 30").exit_code == 124
        with pytest.raises(SandboxError, match="environment type"):
            provider.get_or_create(environment_type="none")
        with pytest.raises(SandboxError, match="colour"):
            provider.get_or_create(colour="blue")
    finally:
        provider.delete(sandbox_id=first.id)


def test_unknown_sandbox_is_not_found(provider):
    for act in (provider.get_or_create, provider.delete):
        with pytest.raises(SandboxNotFoundError):
            act(sandbox_id=str(uuid.uuid4()))


def test_missing_variable_is_named(provider, monkeypatch):
    monkeypatch.delenv("LEASEHOLD_KEY")
    with pytest.raises(SandboxError, match="Set LEASEHOLD_KEY"):
        provider.get_or_create()


async def _use(provider):
    sandbox = await provider.aget_or_create()
    result = await sandbox.aexecute("echo async")
    await provider.adelete(sandbox_id=sandbox.id)
    return result.output


def test_asynchronous_verbs(provider):
    assert asyncio.run(_use(provider)) == "async\n"
