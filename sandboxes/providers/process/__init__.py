"""Process provider: local subprocesses without isolation, for development."""

from sandboxes.providers.process.provider import ProcessProvider

__all__ = ["ProcessProvider"]
