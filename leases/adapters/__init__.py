"""Adapters that let agent frameworks use leased sandboxes. They speak the HTTP API and import nothing else of Leasehold."""
