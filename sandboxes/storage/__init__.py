"""The state store that STORAGE_BACKEND selects: one instance per process."""

from functools import cache

from django.conf import settings

from sandboxes.storage.base import KeyValueStore
from sandboxes.storage.cloudflare_kv import CloudflareKVStore
from sandboxes.storage.filesystem import FilesystemStore
from sandboxes.storage.observed import refuse_deletes


@cache
def get_store() -> KeyValueStore:
    """Return this process's instance of the store. In observe mode it refuses to delete."""
    store = _create_store()
    return refuse_deletes(store) if settings.OBSERVE else store


def _create_store() -> KeyValueStore:
    if settings.STORAGE_BACKEND == "s3":
        from sandboxes.storage.s3 import S3Store  # imports boto3, 8 MiB in every process

        return S3Store(
            settings.S3_BUCKET,
            endpoint=settings.S3_ENDPOINT,
            access_key_id=settings.S3_ACCESS_KEY_ID,
            secret_access_key=settings.S3_SECRET_ACCESS_KEY,
            region=settings.S3_REGION,
            prefix=settings.STORAGE_PREFIX,
        )
    if settings.STORAGE_BACKEND == "cloudflare_kv":
        return CloudflareKVStore(
            settings.KV_NAMESPACE,
            account_id=settings.KV_ACCOUNT_ID,
            api_token=settings.KV_API_TOKEN,
            api=settings.KV_API_URL,
            prefix=settings.STORAGE_PREFIX,
        )
    return FilesystemStore(settings.STORAGE_DIR)
