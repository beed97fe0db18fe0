"""Memory provider: simulated sandboxes, for tests and the demo."""

from sandboxes.providers.memory.file_tree import Entry, File, Files, Folder, Link
from sandboxes.providers.memory.programs import ProgramCall, ProgramResult
from sandboxes.providers.memory.provider import MemoryProvider

__all__ = ["Entry", "File", "Files", "Folder", "Link", "MemoryProvider", "ProgramCall", "ProgramResult"]
