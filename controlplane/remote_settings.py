"""Settings of the providers of remote sandboxes. A setting of one vendor takes precedence over the general one."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from django.core.exceptions import ImproperlyConfigured

from controlplane import env
from sandboxes.providers.base import Network
from sandboxes.providers.remote.configuration import KEY_VARIABLES, RemoteConfiguration

MAX_MINUTES = 525_600  # a year


@dataclass(frozen=True)
class Vendor:
    """Environment variables of one vendor. `prefix` begins the variables that override the general ones."""

    title: str
    prefix: str
    url_variable: str
    api_url: str
    image_help: str
    options: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    has_allow_list: bool = False  # the vendor restricts the network of a sandbox to destinations that a request states
    has_auto_stop: bool = True  # the vendor can stop an idle sandbox after a time that a request states
    has_auto_delete: bool = True  # the vendor can delete a stopped sandbox after a time
    keeps_files: bool = True  # of a sandbox that it stops; otherwise the general time does not apply
    client_variables: tuple[str, ...] = ()  # variables of the vendor's own client that begin like those of Leasehold


VENDORS: Mapping[str, Vendor] = {
    "cloudflare": Vendor(
        "Cloudflare's sandbox bridge",
        "CLOUDFLARE_",
        "CLOUDFLARE_SANDBOX_URL",
        "",
        "",
        has_auto_stop=False,
        has_auto_delete=False,
    ),
    "daytona": Vendor(
        "Daytona",
        "DAYTONA_",
        "DAYTONA_API_URL",
        "https://app.daytona.io/api",
        "image of new sandboxes at Daytona, which builds a snapshot of it; unset: Daytona's default snapshot",
        {
            "target": lambda: env.text("DAYTONA_TARGET", help="region of new sandboxes at Daytona; unset: its default"),
            "organization_id": lambda: env.text(
                "DAYTONA_ORGANIZATION_ID",
                help="organization of the API key; set it if several accounts of Daytona are used, so that their hosts differ",
            ),
        },
        has_allow_list=True,
    ),
    "langsmith": Vendor(
        "LangSmith",
        "LANGSMITH_",
        "LANGSMITH_ENDPOINT",
        "https://api.smith.langchain.com",
        "snapshot of new sandboxes at LangSmith: name, name:tag or id; unset: its default",
        {
            "workspace": lambda: env.text(
                "LANGSMITH_WORKSPACE_ID",
                help="workspace of the API key; set it if several are used, so that their hosts differ",
            )
        },
        has_allow_list=True,
    ),
    "modal": Vendor(
        "Modal",
        "MODAL_",
        "MODAL_SERVER_URL",
        "https://api.modal.com,https://api.modal2.com",
        "image of new sandboxes at Modal, as a registry names it; unset: Modal's image of Debian with Python",
        {
            "token_id": lambda: env.text("MODAL_TOKEN_ID", help="id of the token whose secret is MODAL_TOKEN_SECRET"),
            "environment": lambda: env.text(
                "MODAL_ENVIRONMENT",
                help="environment of the sandboxes at Modal; unset: its default. With several workspaces, set different ones",
            ),
            "lifetime_minutes": lambda: str(
                env.integer(
                    "MODAL_SANDBOX_LIFETIME_MINUTES",
                    1440,
                    minimum=120,
                    maximum=1440,
                    help="Modal terminates a sandbox after so many minutes, with its files; 24 hours is its maximum",
                )
            ),
            "snapshot_min_mib": lambda: str(
                env.optional_integer(
                    "MODAL_SANDBOX_SNAPSHOT_MIN_MIB",
                    minimum=1,
                    help="Modal keeps snapshots of sleeping workspaces of at least so many MiB, for faster wakes; unset: none",
                )
                or ""
            ),
        },
        has_auto_delete=False,
        has_allow_list=True,
        keeps_files=False,
        client_variables=("MODAL_SANDBOX_V2", "MODAL_SANDBOX_CHANNEL_IDLE_TIMEOUT"),
    ),
    "runloop": Vendor(
        "Runloop",
        "RUNLOOP_",
        "RUNLOOP_BASE_URL",
        "https://api.runloop.ai",
        "blueprint of new sandboxes at Runloop, by name; unset: Runloop's default image",
        {
            "size": lambda: env.choice(
                "RUNLOOP_SANDBOX_SIZE",
                "",
                ["", "X_SMALL", "SMALL", "MEDIUM", "LARGE", "X_LARGE", "XX_LARGE"],
                help="size of new sandboxes at Runloop; unset: its default",
            ),
            "account": lambda: env.text(
                "RUNLOOP_ACCOUNT",
                help="name for the account of the API key; set it if several are used, so that their hosts differ",
            ),
        },
        has_auto_delete=False,
        has_allow_list=True,
    ),
}


def read() -> dict[str, RemoteConfiguration]:
    """Read the configuration of every vendor. Raise ImproperlyConfigured, also for an unknown variable of a vendor."""
    auto_stop = env.integer(
        "LEASEHOLD_SANDBOX_AUTO_STOP_MINUTES", 60, maximum=MAX_MINUTES,
        help="a vendor stops a remote sandbox that was idle for so many minutes, if no control plane does; 0: never",
    )  # fmt: skip
    auto_delete = env.integer(
        "LEASEHOLD_SANDBOX_AUTO_DELETE_MINUTES", 0, maximum=MAX_MINUTES,
        help="a vendor deletes a remote sandbox that was stopped for so many minutes, if no control plane does; 0: never",
    )  # fmt: skip
    found = {name: _read_vendor(name, vendor, auto_stop, auto_delete) for name, vendor in VENDORS.items()}
    for name in os.environ:
        for vendor in VENDORS.values():
            known_names = {*env.ENV_VARIABLES, *vendor.client_variables}
            if _is_meant_for_leasehold(name, vendor.prefix) and name not in known_names:
                known = sorted(key for key in env.ENV_VARIABLES if key.startswith(f"{vendor.prefix}SANDBOX_"))
                raise ImproperlyConfigured(f"{name} is not a variable of Leasehold. Known are {', '.join(known)}.")
    return found


def _is_meant_for_leasehold(name: str, prefix: str) -> bool:
    """Return whether a variable has the form of a vendor's setting here. Clients of the vendors read others of the prefix."""
    rest = name.removeprefix(prefix)
    return rest != name and rest.startswith(("SANDBOX_", "AUTO_STOP", "AUTO_DELETE"))


def _read_vendor(name: str, vendor: Vendor, auto_stop: int, auto_delete: int) -> RemoteConfiguration:
    title, prefix = vendor.title, f"{vendor.prefix}SANDBOX_"
    stop, delete = None, None
    if vendor.has_auto_stop:
        stop_help = f"LEASEHOLD_SANDBOX_AUTO_STOP_MINUTES for {title}"
        if not vendor.keeps_files:
            stop_help = f"{title} terminates a sandbox that was idle for so many minutes, with its files; unset or 0: never"
        stop = env.optional_integer(f"{prefix}AUTO_STOP_MINUTES", maximum=MAX_MINUTES, help=stop_help)
    if vendor.has_auto_delete:
        delete = env.optional_integer(
            f"{prefix}AUTO_DELETE_MINUTES", maximum=MAX_MINUTES, help=f"LEASEHOLD_SANDBOX_AUTO_DELETE_MINUTES for {title}"
        )
    network = Network.OPEN
    if vendor.has_allow_list:
        network = Network(env.choice(
            f"{prefix}NETWORK", Network.GATEWAY, [Network.GATEWAY, Network.OPEN],
            help=f"network of new sandboxes at {title}: gateway (LEASEHOLD_GATEWAY_URL alone; unset: none) or open",
        ))  # fmt: skip
    return RemoteConfiguration(
        network=network,
        api_key=env.text(KEY_VARIABLES[name], help=f"API key of the account at {title}", secret=True),
        api_url=env.text(vendor.url_variable, vendor.api_url, help=f"address of the API of {title}").rstrip("/"),
        image=env.text(f"{prefix}IMAGE", help=vendor.image_help) if vendor.image_help else "",
        auto_stop=_to_duration((auto_stop if vendor.keeps_files else 0) if stop is None else stop),
        auto_delete=_to_duration(auto_delete if delete is None else delete),
        options={option: read_option() for option, read_option in vendor.options.items()},
    )


def _to_duration(minutes: int) -> timedelta | None:
    return timedelta(minutes=minutes) if minutes else None
