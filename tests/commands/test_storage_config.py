"""Storage settings: an invalid or unsupported combination stops every command with one line."""

from pathlib import Path

import pytest

from controlplane import env
from sandboxes import storage
from sandboxes.storage.cloudflare_kv import CloudflareKVStore
from sandboxes.storage.filesystem import FilesystemStore
from sandboxes.storage.s3 import S3Store
from tests.commands.manage import run_manage

S3 = {
    "STORAGE_BACKEND": "s3",
    "R2_BUCKET_BINDING": "bucket",
    "LEASEHOLD_S3_ENDPOINT": "https://account.invalid",
    "LEASEHOLD_S3_ACCESS_KEY_ID": "a-key-id",
    "LEASEHOLD_S3_SECRET_ACCESS_KEY": "a-secret-key",
}
KV = {
    "STORAGE_BACKEND": "cloudflare_kv",
    "KV_NAMESPACE_BINDING": "0123456789abcdef0123456789abcdef",
    "LEASEHOLD_KV_ACCOUNT_ID": "an-account",
    "LEASEHOLD_KV_API_TOKEN": "a-secret-token",
}


def refusal(home: Path, **variables: str) -> str:
    process = run_manage(home, "check", **variables)
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.count("\n") == 1
    return process.stderr


@pytest.mark.parametrize("backend", [{**S3, "STORAGE_BACKEND": "r2"}, KV, {"STORAGE_SYNC": "1"}], ids=["r2", "kv", "files"])
def test_a_complete_backend_configuration_starts_and_prints_no_secret(tmp_path: Path, backend: dict[str, str]) -> None:
    process = run_manage(tmp_path, "config", **backend)
    assert process.returncode == 0, process.stderr
    assert "a-secret" not in process.stdout
    assert process.stderr == ""


@pytest.mark.parametrize("backend", [S3, KV], ids=["s3", "cloudflare_kv"])
def test_a_missing_variable_of_a_backend_is_named(tmp_path: Path, backend: dict[str, str]) -> None:
    for name in [*backend][1:]:
        message = refusal(tmp_path, **{**backend, name: ""})
        assert message.startswith(f"{name} is not set, and STORAGE_BACKEND={backend['STORAGE_BACKEND']} needs it.")


def test_aws_needs_a_region_but_no_endpoint_and_supports_journaled_mode(tmp_path: Path) -> None:
    aws = {**S3, "LEASEHOLD_S3_ENDPOINT": "", "LEASEHOLD_S3_REGION": "eu-central-1"}
    assert run_manage(tmp_path, "config", **aws, STORAGE_MODE="journaled").returncode == 0


def test_journaled_mode_on_kv_is_refused_with_the_reason(tmp_path: Path) -> None:
    message = refusal(tmp_path, **KV, STORAGE_MODE="journaled")
    assert message.startswith(
        "STORAGE_MODE=journaled is not supported with STORAGE_BACKEND=cloudflare_kv: KV accepts one write per second"
    )


@pytest.mark.parametrize("backend", [S3, KV], ids=["s3", "cloudflare_kv"])
def test_sync_is_refused_on_backends_without_files(tmp_path: Path, backend: dict[str, str]) -> None:
    message = refusal(tmp_path, **backend, STORAGE_SYNC="1")
    assert message.startswith(
        f"STORAGE_SYNC=1 is not supported with STORAGE_BACKEND={backend['STORAGE_BACKEND']}: only the filesystem backend"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STORAGE_BACKEND", "s4"),
        ("STORAGE_MODE", "fast"),
        ("LEASEHOLD_S3_ENDPOINT", "account.invalid"),
        ("LEASEHOLD_KV_API_URL", "ftp://x"),
        ("LEASEHOLD_STORAGE_PREFIX", "no-slash"),
        ("LEASEHOLD_STORAGE_PREFIX", "../"),
        ("LEASEHOLD_STORAGE_PREFIX", "x" * 64 + "/"),
    ],
)
def test_an_invalid_value_is_refused_with_the_accepted_ones(tmp_path: Path, name: str, value: str) -> None:
    assert refusal(tmp_path, **{**S3, name: value}).startswith(f"{name}={value!r} is not accepted. It takes ")


@pytest.mark.parametrize(
    ("backend", "kind"), [("s3", S3Store), ("cloudflare_kv", CloudflareKVStore), ("filesystem", FilesystemStore)]
)
def test_the_settings_select_the_store(settings, backend: str, kind: type) -> None:
    settings.STORAGE_BACKEND, settings.STORAGE_PREFIX = backend, "ours/"
    settings.S3_BUCKET, settings.S3_ENDPOINT, settings.S3_ACCESS_KEY_ID, settings.S3_SECRET_ACCESS_KEY = (
        "b",
        "https://x",
        "i",
        "s",
    )
    settings.KV_NAMESPACE, settings.KV_ACCOUNT_ID, settings.KV_API_TOKEN = "n", "a", "t"
    store = storage.get_store.__wrapped__()
    assert type(store) is kind
    assert backend == "filesystem" or store.prefix == "ours/"
    assert store.name == backend


def test_only_secrets_are_masked() -> None:
    secret = {name for name, variable in env.ENV_VARIABLES.items() if variable.secret and ("S3" in name or "KV" in name)}
    assert secret == {"LEASEHOLD_S3_SECRET_ACCESS_KEY", "LEASEHOLD_KV_API_TOKEN"}
