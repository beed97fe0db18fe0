"""Django's PostgreSQL backend with a connection health check that usually takes no round trip."""

import select
from typing import Any

from django.db.backends.postgresql import base


class DatabaseWrapper(base.DatabaseWrapper):
    """Database connection whose health check executes a statement only if there is a sign of a broken connection.

    With CONN_HEALTH_CHECKS Django checks a persistent connection before the first statement of each request."""

    def is_usable(self) -> bool:
        """Return whether the connection works.

        PostgreSQL sends data to an idle connection only as a notice, as the error with which it ends the connection, or as the
        end of the stream. Without data to read, and without an error in the last request, the connection is taken as working.
        A server that vanished without closing the connection is not noticed; a test statement would wait for it as well."""
        driver: Any = self.connection
        if driver is None or driver.closed:
            return False
        poll = select.poll()  # select.select() fails for file descriptors above 1023
        poll.register(driver.fileno(), select.POLLIN)
        if self.errors_occurred or poll.poll(0):
            return bool(super().is_usable())
        return True
