"""Optional imports of libraries: packages that are installed and not used take memory in every process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_packages(*names: str) -> Iterator[None]:
    """Make imports of these packages fail within the block, so that a library works as if they were not installed."""
    loaded = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(loaded)
