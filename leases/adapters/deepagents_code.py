"""Sandbox provider for Deep Agents Code, the terminal agent of deepagents. Needs the extra `deepagents`, and deepagents-code.

    LEASEHOLD_URL=http://127.0.0.1:8000 LEASEHOLD_KEY=lh_… LEASEHOLD_AGENT=did:web:me.example dcode --sandbox leasehold

The entry point of the package registers the provider under the name `leasehold`. A sandbox is a lease, and its id that of the
lease. Parameters of the provider in ~/.deepagents/config.toml are fields of the request that joins an environment, such as
`environment_type` and `pool`."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepagents_code.integrations.sandbox_provider import (
    SandboxError,
    SandboxInstallHint,
    SandboxNotFoundError,
    SandboxProvider,
    SandboxProviderMetadata,
)

from leases.adapters.deepagents import DEFAULT_EXEC_SECONDS, ApiClient, LeaseholdSandbox, RequestRefused

NAME = "leasehold"
WORKING_DIRECTORY = "/workspace"
DEFAULT_ENVIRONMENT_TYPE = "coding"
URL_VARIABLE, KEY_VARIABLE, AGENT_VARIABLE = "LEASEHOLD_URL", "LEASEHOLD_KEY", "LEASEHOLD_AGENT"


class LeaseholdProvider(SandboxProvider):
    """Provider whose server, API key and agent are those of environment variables."""

    @property
    def metadata(self) -> SandboxProviderMetadata:
        hint = SandboxInstallHint(kind="package", name="leasehold[deepagents]")
        return SandboxProviderMetadata(name=NAME, working_dir=WORKING_DIRECTORY, install=hint)

    def get_or_create(
        self, *, sandbox_id: str | None = None, timeout: int = DEFAULT_EXEC_SECONDS, **fields: Any
    ) -> LeaseholdSandbox:
        """Return the sandbox of a lease, or join an environment, by default a new one.

        `timeout`: seconds of a command that states none. `fields` are those of the request to join, and `environment_id`. Raise
        SandboxNotFoundError if the lease is unknown or has ended, SandboxError for another refusal."""
        with _translate_errors(sandbox_id):
            if sandbox_id is None:
                request = {"agent_did": _read_variable(AGENT_VARIABLE)} if "agent_did" not in fields else {}
                request |= {"environment_id": f"deepagents-{uuid.uuid4().hex}", "environment_type": DEFAULT_ENVIRONMENT_TYPE}
                url, key = _read_variable(URL_VARIABLE), _read_variable(KEY_VARIABLE)
                return LeaseholdSandbox.join(url, key, timeout=timeout, **(request | fields))
            client = _connect()
            try:
                if client.get(f"/leases/{sandbox_id}")["status"] != "active":
                    raise SandboxNotFoundError(f"The lease {sandbox_id} has ended.")
            except BaseException:
                client.close()
                raise
            return LeaseholdSandbox(client, sandbox_id, timeout=timeout)

    def delete(self, *, sandbox_id: str, **options: Any) -> None:
        """Release a lease; its last state is kept as with `LeaseholdSandbox.release`. Without effect on an ended lease.

        Raise SandboxNotFoundError if the lease is unknown, SandboxError for another refusal."""
        client = _connect()
        try:
            with _translate_errors(sandbox_id):
                client.post(f"/leases/{sandbox_id}/release")
        finally:
            client.close()


def _connect() -> ApiClient:
    return ApiClient(_read_variable(URL_VARIABLE), _read_variable(KEY_VARIABLE))


def _read_variable(name: str) -> str:
    if value := os.environ.get(name):
        return value
    raise SandboxError(f"Set {name}. Needed are {URL_VARIABLE}, {KEY_VARIABLE} and {AGENT_VARIABLE}.")


@contextmanager
def _translate_errors(sandbox_id: str | None) -> Iterator[None]:
    try:
        yield
    except RequestRefused as refused:
        is_missing = sandbox_id is not None and refused.code == "not_found"
        raise (SandboxNotFoundError if is_missing else SandboxError)(f"{refused} ({refused.code})") from refused
