"""WSGI application: HTTP API and admin."""

import os
import sys

from django.conf import settings
from django.core.wsgi import get_wsgi_application

from controlplane import env
from sandboxes import long_calls

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
django_application = get_wsgi_application()
env.require_known_variables()

from controlplane.application import Application  # noqa: E402 - imports models
from leases import reclaim_threads  # noqa: E402 - imports models
from sandboxes.db import dialect  # noqa: E402

application = Application(django_application)
dialect.keep_idle_connections()
long_calls.set_limits(settings.WEB_THREADS)
reclaim_threads.THREADS.set_maximum(reclaim_threads.MAX_THREADS)
if "granian" in sys.modules:  # under another WSGI server, few streams occupy its threads
    from controlplane import stream_threads

    stream_threads.install()
