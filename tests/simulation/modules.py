"""Import of the product before the first history, and the search for modules that a history has imported.

An import within a history makes the history depend on those before it in the same process: only the first one draws the
identifiers of the module from its generator. The module would also keep a replaced clock, or miss the replaced store."""

import sys
from functools import cache

from django.core.handlers.base import BaseHandler
from django.urls import get_resolver

PRODUCT = {"leases", "billing", "sandboxes", "controlplane"}


@cache
def import_product() -> None:
    """Import what a history needs: the middleware, the routes with their views, and a module of the standard library."""
    import _strptime  # noqa: F401 - imported by the first call of datetime.strptime

    BaseHandler().load_middleware()
    _ = get_resolver().url_patterns


def list_modules() -> set[str]:
    """Return the names of the modules of the product that this process has imported."""
    return {name for name in sys.modules if name.partition(".")[0] in PRODUCT}
