"""Django's PostgreSQL backend with a health check that costs no round trip."""

import select
from typing import Any

from django.db.backends.postgresql import base


class DatabaseWrapper(base.DatabaseWrapper):
    """Connection that is tested with a statement only if something shows that it may be broken.

    With CONN_HEALTH_CHECKS Django tests a persistent connection before the first statement of each request."""

    def is_usable(self) -> bool:
        """Return whether the connection works.

        PostgreSQL sends nothing to an idle connection but notices, its farewell and the end of the stream. A connection with
        nothing to read, whose last request met no error, therefore works as far as a test could tell: a host that vanished
        without a word would hold up a test as well."""
        driver: Any = self.connection
        if driver is None or driver.closed:
            return False
        poll = select.poll()  # not select(): it fails for file descriptors above 1023
        poll.register(driver.fileno(), select.POLLIN)
        if self.errors_occurred or poll.poll(0):
            return bool(super().is_usable())
        return True
