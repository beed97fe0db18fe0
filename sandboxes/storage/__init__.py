"""The store that STORAGE_BACKEND names, one instance a process."""

from functools import cache

from django.conf import settings

from sandboxes.storage.base import KeyValueStore
from sandboxes.storage.filesystem import FilesystemStore


@cache
def store() -> KeyValueStore:
    return FilesystemStore(settings.STORAGE_DIR)
