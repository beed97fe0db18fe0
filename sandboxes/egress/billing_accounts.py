"""Billing account of the agent behind a model call. The app that has the accounts registers the query."""

NO_ACCOUNT_SQL = "SELECT '' WHERE %s IS NOT NULL"  # without such an app

_account_sql = NO_ACCOUNT_SQL


def register_query(text: str) -> None:
    """Set the scalar subquery for the name of the account of `sandboxes_sandbox.agent_did`. The parameter is the UTC date."""
    global _account_sql
    _account_sql = text


def get_query() -> str:
    """Return the subquery. It is part of the query that identifies a caller, so that a call needs no further one."""
    return _account_sql
