"""Checks of `make lint` that need Django or Git: migrations that are new against the remote branch."""
