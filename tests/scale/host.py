"""manage.py with an engine of its own for the memory provider: `python tests/scale/host.py /path/manage.py up`.

The memory provider has one engine for all processes. Here the state directory names it: each control plane is a host."""

import os
import runpy
import sys
from contextvars import ContextVar
from pathlib import Path


def main() -> None:
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    from sandboxes.providers.memory import provider

    provider.DEFAULT_ENGINE_ID = os.environ["LEASEHOLD_STATE_DIR"]
    provider._selected_engine = ContextVar("memory_engine", default=provider.DEFAULT_ENGINE_ID)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
