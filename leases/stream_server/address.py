"""Address of the stream server of this host, and the URLs of terminals and previews."""

import json
import os
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from django.conf import settings

from leases.errors import StreamServerUnavailable
from leases.stream_server.grants import PreviewGrant, TerminalGrant

MAX_GRANT_LIFETIME = timedelta(days=1)
DEFAULT_GRANT_LIFETIME = timedelta(hours=1)


def get_address_path() -> Path:
    """Return the file in which the stream server of this host records its port."""
    return Path(settings.RUNTIME_DIR / "stream_server.json")


def record_port(port: int) -> None:
    """Record the port on which the stream server of this host listens."""
    path = get_address_path()
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"port": port}))
    temporary.replace(path)


def read_port() -> int | None:
    """Return the port on which the stream server of this host listens, or listened last. None if none was started."""
    try:
        return int(json.loads(get_address_path().read_text())["port"])
    except FileNotFoundError:
        return None


def build_terminal_url(grant: TerminalGrant) -> str:
    """Build the WebSocket URL of a terminal. Raise StreamServerUnavailable."""
    base = urlsplit(get_base_url())
    scheme = {"http": "ws", "https": "wss"}[base.scheme]
    return urlunsplit(base._replace(scheme=scheme, path=f"{base.path.rstrip('/')}/terminals/{grant.encode()}"))


def build_preview_url(grant: PreviewGrant) -> str:
    """Build the URL of a preview: a host name of its own if a domain is configured, else a path.

    Raise StreamServerUnavailable."""
    base = urlsplit(get_base_url())
    if settings.PREVIEW_DOMAIN:
        port = f":{base.port}" if base.port else ""
        return urlunsplit(base._replace(netloc=f"{grant.encode()}.{settings.PREVIEW_DOMAIN}{port}", path="/"))
    return urlunsplit(base._replace(path=f"{base.path.rstrip('/')}/previews/{grant.encode()}/"))


def compute_end(now: datetime, lifetime: timedelta) -> int:
    """Return the end of a grant in whole seconds since 1970."""
    return int((now + lifetime).timestamp())


def get_base_url() -> str:
    """Return the base URL of the stream server of this host. Raise StreamServerUnavailable if none was ever started."""
    if settings.STREAM_URL:
        return str(settings.STREAM_URL)
    port = read_port()
    if port is None:
        raise StreamServerUnavailable()
    host = settings.STREAM_HOST if settings.STREAM_HOST not in ("0.0.0.0", "::") else "127.0.0.1"  # noqa: S104 - compared
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
