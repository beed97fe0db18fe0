"""Storage settings: an invalid or unsupported combination is refused with one line."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from django.core.exceptions import ImproperlyConfigured

from controlplane import env
from sandboxes import storage
from sandboxes.storage.cloudflare_kv import CloudflareKVStore
from sandboxes.storage.filesystem import FilesystemStore
from sandboxes.storage.s3 import S3Store
from tests.commands.manage import call, load_settings

S3 = {
    "STORAGE_BACKEND": "s3", "R2_BUCKET_BINDING": "bucket", "LEASEHOLD_S3_ENDPOINT": "https://account.invalid",
    "LEASEHOLD_S3_ACCESS_KEY_ID": "a-key-id", "LEASEHOLD_S3_SECRET_ACCESS_KEY": "a-secret-key",
}  # fmt: skip
KV = {
    "STORAGE_BACKEND": "cloudflare_kv", "KV_NAMESPACE_BINDING": "0123456789abcdef0123456789abcdef",
    "LEASEHOLD_KV_ACCOUNT_ID": "an-account", "LEASEHOLD_KV_API_TOKEN": "a-secret-token",
}  # fmt: skip
EACH_REMOTE_BACKEND = pytest.mark.parametrize("backend", [S3, KV], ids=["s3", "cloudflare_kv"])


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., ModuleType]:
    return partial(load_settings, monkeypatch, tmp_path)


def refusal(load: Callable[..., ModuleType], **variables: str) -> str:
    with pytest.raises(ImproperlyConfigured) as refused:
        load(**variables)
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("backend", [{**S3, "STORAGE_BACKEND": "r2"}, KV, {"STORAGE_SYNC": "1"}], ids=["r2", "kv", "files"])
def test_a_complete_backend_configuration_is_accepted_and_prints_no_secret(load, backend: dict[str, str], capsys) -> None:
    load(**backend)
    output = call("config")
    assert "STORAGE_BACKEND " in output
    assert "a-secret" not in output
    assert capsys.readouterr().err == ""
    masked = {name for name, variable in env.ENV_VARIABLES.items() if variable.secret and ("S3" in name or "KV" in name)}
    assert masked == {"LEASEHOLD_S3_SECRET_ACCESS_KEY", "LEASEHOLD_KV_API_TOKEN"}


@EACH_REMOTE_BACKEND
def test_a_missing_variable_of_a_backend_is_named(load, backend: dict[str, str]) -> None:
    for name in [*backend][1:]:
        message = refusal(load, **{**backend, name: ""})
        assert message.startswith(f"{name} is not set, and STORAGE_BACKEND={backend['STORAGE_BACKEND']} needs it.")


def test_journaled_mode_is_supported_on_aws_which_needs_no_endpoint_and_refused_on_kv(load) -> None:
    aws = {**S3, "LEASEHOLD_S3_ENDPOINT": "", "LEASEHOLD_S3_REGION": "eu-central-1"}
    assert load(**aws, STORAGE_MODE="journaled").STORAGE_MODE == "journaled"
    assert refusal(load, **KV, STORAGE_MODE="journaled").startswith(
        "STORAGE_MODE=journaled is not supported with STORAGE_BACKEND=cloudflare_kv: KV accepts one write per second"
    )


@EACH_REMOTE_BACKEND
def test_sync_is_refused_on_backends_without_files(load, backend: dict[str, str]) -> None:
    assert refusal(load, **backend, STORAGE_SYNC="1").startswith(
        f"STORAGE_SYNC=1 is not supported with STORAGE_BACKEND={backend['STORAGE_BACKEND']}: only the filesystem backend"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STORAGE_BACKEND", "s4"), ("STORAGE_MODE", "fast"), ("LEASEHOLD_S3_ENDPOINT", "account.invalid"),
        ("LEASEHOLD_KV_API_URL", "ftp://x"), ("LEASEHOLD_STORAGE_PREFIX", "no-slash"), ("LEASEHOLD_STORAGE_PREFIX", "../"),
        ("LEASEHOLD_STORAGE_PREFIX", "x" * 64 + "/"),
    ],
)  # fmt: skip
def test_an_invalid_value_is_refused_with_the_accepted_ones(load, name: str, value: str) -> None:
    assert refusal(load, **{**S3, name: value}).startswith(f"{name}={value!r} is not accepted. It takes ")


@pytest.mark.parametrize(
    ("backend", "kind"), [("s3", S3Store), ("cloudflare_kv", CloudflareKVStore), ("filesystem", FilesystemStore)]
)
def test_the_settings_select_the_store(settings, backend: str, kind: type) -> None:
    settings.STORAGE_BACKEND, settings.STORAGE_PREFIX = backend, "ours/"
    settings.S3_BUCKET, settings.S3_ENDPOINT = "b", "https://x"
    settings.S3_ACCESS_KEY_ID, settings.S3_SECRET_ACCESS_KEY = "i", "s"
    settings.KV_NAMESPACE, settings.KV_ACCOUNT_ID, settings.KV_API_TOKEN = "n", "a", "t"
    store = storage.get_store.__wrapped__()
    assert (type(store), store.name) == (kind, backend)
    assert backend == "filesystem" or store.prefix == "ours/"
