"""Grants: permissions that an API key or a console user has passed on in a URL or an open connection, and their end.

Does not import leases.api, leases.admin or leases.stream_server."""
