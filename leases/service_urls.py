"""Base URLs of services outside: of forges and of repository servers. Operators configure them."""

from urllib.parse import urlsplit

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


class InvalidServiceUrl(ValueError):
    """Not an https URL, nor an http URL of a loopback address."""


def check_service_url(url: str, *, example: str) -> None:
    """Raise InvalidServiceUrl, with an example of a valid URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidServiceUrl("Not a URL.") from None
    is_loopback = parts.scheme == "http" and parts.hostname in LOOPBACK_HOSTS
    if not parts.hostname or parts.username or parts.query or not (parts.scheme == "https" or is_loopback):
        raise InvalidServiceUrl(f"Must be an https URL without credentials, such as {example}.")


def join_url(base: str, path: str) -> str:
    return f"{base.rstrip('/')}/{path}"
