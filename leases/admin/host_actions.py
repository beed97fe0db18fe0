"""Actions on hosts, which end the leases of their sandboxes."""

from leases.sweeps import declare_host_lost
from sandboxes.admin.base.actions import AdminAction
from sandboxes.admin.hosts import HostAdmin
from sandboxes.db import database_time
from sandboxes.hosts import registry
from sandboxes.models import Host


def _is_unreachable(host: Host) -> bool:
    return registry.get_state(host, now=database_time.now()) == "unreachable"


DECLARE_LOST_ACTION = AdminAction(
    title="Declare lost",
    warning=(
        "The leases of this host's sandboxes end as lost, and their unsaved state is lost. Their places are released without "
        "confirmation by the engine. Stop the host first, or make sure that it does not return. If the host returns, its "
        "worker destroys the sandboxes that still run there."
    ),
    done="declared lost",
    refusal_reason="it has a recent heartbeat, or was declared lost before",
    legal=_is_unreachable,
    verb=lambda host, actor, reason, now: _is_unreachable(host) and declare_host_lost(host, now=now, actor=actor),
    icon="cloud_off",
    permissions=("sandboxes.declare_host_lost",),
    danger=True,
)

HostAdmin.add_actions({"declare_lost": DECLARE_LOST_ACTION})
