"""Schema of SQLite databases for other tools than Django, such as the sqlite3 program."""

import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.support.database import get_sqlite_template

STATEMENT = (
    "INSERT INTO billing_statement (account_id, month, closed_at, closed_by, subtotal, credit_used, total)"
    " VALUES (1, '{}', '2026-12-01', 'ada', 0, 0, 0)"
)


def test_a_plain_connection_checks_shrinks_and_copies_a_database(tmp_path: Path) -> None:
    path = tmp_path / "leasehold.sqlite3"
    shutil.copyfile(get_sqlite_template(), path)
    with sqlite3.connect(path, isolation_level=None) as database:
        database.execute(STATEMENT.format("2026-11-01"))  # SQLite evaluates checks of rows only
        with pytest.raises(sqlite3.IntegrityError, match="statement_of_a_month"):
            database.execute(STATEMENT.format("2026-12-02"))
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert database.execute("PRAGMA quick_check").fetchall() == [("ok",)]
        assert database.execute("PRAGMA foreign_key_check").fetchall() == []
        database.execute("VACUUM")
        with sqlite3.connect(tmp_path / "copy.sqlite3") as copy:
            database.backup(copy)
            assert copy.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_the_schema_calls_no_function_of_django() -> None:
    with sqlite3.connect(get_sqlite_template()) as database:
        statements = [sql for (sql,) in database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
    assert len(statements) > 100
    assert [sql for sql in statements if re.search(r"\bdjango_\w+\(", sql)] == []
