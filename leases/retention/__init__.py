"""Retention of rows: kinds of expired rows, tables that are permanent, and the sweep that deletes in batches.

Does not import leases.api or leases.sweeps."""
