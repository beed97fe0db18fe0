"""Settings that follow LEASEHOLD_PUBLIC_URL: host names, origins, cookies and HSTS."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from controlplane import env

LOOPBACK_HOSTS = "127.0.0.1,localhost,[::1]"
HSTS_SECONDS = 365 * 24 * 3600


@dataclass(frozen=True)
class PublicAddress:
    """Address by which clients and browsers reach this installation. `url` is empty if none was stated."""

    url: str
    allowed_hosts: list[str]
    trusted_origins: list[str]

    @property
    def is_https(self) -> bool:
        return self.url.startswith("https://")

    @property
    def cookie_prefix(self) -> str:
        """Prefix of cookie names. A browser takes a `__Host-` cookie from this host alone, not from others of its site."""
        return "__Host-" if self.is_https else ""

    @property
    def hsts_seconds(self) -> int:
        """Duration of HSTS. 0 on loopback: its names are shared by all servers of a machine."""
        host = urlsplit(self.url).hostname or ""
        return HSTS_SECONDS if self.is_https and host not in ("localhost", "::1") and not host.startswith("127.") else 0


def read() -> PublicAddress:
    """Read the variables. The host of the public URL is always an allowed one."""
    url = env.origin(
        "LEASEHOLD_PUBLIC_URL",
        help="address of console and API for browsers and clients: signed URLs, cookies and trusted origin follow it; unset: "
        "the Host header decides, which is for development",
    )
    hosts = env.string_list(
        "ALLOWED_HOSTS",
        LOOPBACK_HOSTS,
        help="further host names that the server accepts",
        accepts="host names without scheme and port, separated by commas; .example.com includes all names below it",
        pattern=r"\*|\.?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?|\[[0-9A-Fa-f:.]+\]",
    )
    origins = env.string_list(
        "CSRF_TRUSTED_ORIGINS",
        "",
        help="further origins, with scheme, whose pages may send requests to the console and /mcp",
        accepts="origins such as https://console.example.com, separated by commas",
        pattern=r"https?://(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?",
    )
    if url and (host := get_host(url)) not in hosts:
        hosts = [*hosts, host]
    return PublicAddress(url, hosts, origins)


def get_host(url: str) -> str:
    """Return the host of a URL as ALLOWED_HOSTS has it: without port, an IPv6 address in brackets."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host
