"""The product's settings with the bare view."""

from controlplane.settings import *  # noqa: F403

MIDDLEWARE = ["tests.bench.bare_view.AloneMiddleware", *MIDDLEWARE]  # type: ignore[name-defined]  # noqa: F405
ROOT_URLCONF = "tests.bench.bare_view"
