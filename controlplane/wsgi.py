"""WSGI application: HTTP API and admin."""

import os

from django.conf import settings
from django.core.wsgi import get_wsgi_application

from sandboxes import long_calls

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
application = get_wsgi_application()
long_calls.set_limits(settings.WEB_THREADS)
