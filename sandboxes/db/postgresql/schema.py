"""Schema changes that wait for locks of other transactions for a short time only."""

import sys

from django.db.backends.postgresql import schema

LOCK_TIMEOUT_MS = 2000  # requests that need the table wait behind a waiting ALTER TABLE


class DatabaseSchemaEditor(schema.DatabaseSchemaEditor):
    """Schema editor whose transaction has a lock timeout. `manage.py migrate` repeats a migration that ran into it.

    Without a transaction there is none: CREATE INDEX CONCURRENTLY and VALIDATE CONSTRAINT wait without stopping others."""

    def __enter__(self) -> "DatabaseSchemaEditor":
        super().__enter__()
        if self.atomic_migration:
            try:
                self.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
            except BaseException:
                self.__exit__(*sys.exc_info())  # ends the transaction, which the `with` statement does not
                raise
        return self
