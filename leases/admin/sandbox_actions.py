"""Actions on sandboxes that involve their lease."""

from dataclasses import replace
from datetime import datetime

from django.db.models import Q

from leases import leasing
from leases.admin.snapshot_actions import TAKE_SNAPSHOT_ACTION
from leases.tasks import enqueue_idle_sweep, enqueue_reclaim, request_restart, request_sleep, request_wake
from sandboxes import destruction
from sandboxes.admin.base.actions import AdminAction
from sandboxes.admin.sandboxes import SandboxAdmin
from sandboxes.models import ALIVE_STATES, GONE_STATES, FinalPersist, Sandbox, SandboxState, TransitionReason


def _destroy_sandbox(sandbox: Sandbox, actor: str, reason: str, now: datetime) -> bool:
    """End the holder's lease, so that the agent gets the reason. A sandbox without an active lease is destroyed directly."""
    if sandbox.state in GONE_STATES:
        return False  # the lease may already have its next sandbox
    if sandbox.holder and leasing.end(sandbox.holder, reason="operator", now=now, actor=actor, detail=reason):
        return True
    return destruction.schedule_destroy(
        sandbox.pk, now=now, code=TransitionReason.OPERATOR, reason=f"operator: {reason}", actor=actor
    )


def _discard_sandbox(sandbox: Sandbox, actor: str, reason: str, now: datetime) -> bool:
    """End the holder's lease and have the sandbox destroyed without storing its state, also one that is being destroyed."""
    if sandbox.holder and sandbox.state not in GONE_STATES:
        return leasing.discard(sandbox.holder, now=now, actor=actor, detail=reason)
    return destruction.discard(sandbox.pk, now=now, reason=f"discarded: {reason}", actor=actor)


def _can_discard(sandbox: Sandbox) -> bool:
    return (
        sandbox.holder is not None
        and sandbox.final_persist != FinalPersist.NONE
        and sandbox.state not in (SandboxState.COLD, SandboxState.DESTROYED)
    )


def _can_evict(sandbox: Sandbox) -> bool:
    evictable = (SandboxState.WAITING, SandboxState.SUSPENDED, SandboxState.WARM)
    return sandbox.state in evictable and sandbox.holder is not None and sandbox.lost_at is None


def _describe_current_state(sandbox: Sandbox) -> str:
    """Explain a refused action by the present state."""
    if sandbox.state == SandboxState.RUNNING:
        return "a run has started"
    if sandbox.lost_at:
        return "the provider has lost the sandbox"
    return f"the sandbox is {sandbox.state}" if sandbox.holder else "the sandbox is unclaimed"


EVICT_ACTION = AdminAction(
    title="Evict",
    warning="The state is stored and the process is stopped. The next use wakes the sandbox. A use before then cancels this.",
    done="scheduled for eviction",
    refusal_reason="not waiting",
    legal=_can_evict,
    verb=lambda sandbox, actor, reason, now: request_sleep(sandbox, now=now, actor=actor, reason=reason),
    icon="bedtime",
    permissions=("sandboxes.act_on_sandbox",),
    enqueue=enqueue_idle_sweep,
    explain_refusal=_describe_current_state,
)
EVICT_WAITING_ACTION = replace(
    EVICT_ACTION,
    bulk_button="Evict… (waiting only)",
    legal=lambda sandbox: sandbox.state == SandboxState.WAITING and _can_evict(sandbox),
    verb=lambda sandbox, actor, reason, now: request_sleep(
        sandbox, now=now, actor=actor, reason=reason, guard=Q(state=SandboxState.WAITING)
    ),
)
WAKE_ACTION = AdminAction(
    title="Wake",
    warning="The sandbox is started with its stored state, as if its agent had used it. This also renews the lease.",
    done="being woken",
    refusal_reason="not cold",
    legal=lambda sandbox: sandbox.state == SandboxState.COLD and sandbox.lost_at is None,
    verb=lambda sandbox, actor, reason, now: request_wake(sandbox, now=now, actor=actor, reason=reason),
    icon="wb_sunny",
    permissions=("sandboxes.act_on_sandbox",),
    explain_refusal=_describe_current_state,
)
RESTART_ACTION = AdminAction(
    title="Restart",
    warning="Every process in the sandbox is killed, commands in progress included, and the sandbox starts again with its "
    "/workspace and /data. The lease goes on and is renewed.",
    done="being restarted",
    refusal_reason="not awake, or without a lease",
    legal=lambda sandbox: sandbox.state in ALIVE_STATES and sandbox.holder is not None and sandbox.lost_at is None,
    verb=lambda sandbox, actor, reason, now: request_restart(sandbox, now=now, actor=actor, reason=reason),
    icon="restart_alt",
    permissions=("sandboxes.act_on_sandbox",),
    danger=True,
    explain_refusal=_describe_current_state,
)
DESTROY_ACTION = AdminAction(
    title="Store state and destroy",
    button="Destroy",
    warning="The lease that holds the sandbox ends and running processes are killed. Its last state is stored first and kept "
    "for LEASEHOLD_KEEP_STATE.",
    done="being destroyed",
    refusal_reason="already being destroyed",
    legal=lambda sandbox: sandbox.state not in GONE_STATES,
    verb=_destroy_sandbox,
    icon="delete_forever",
    permissions=("sandboxes.act_on_sandbox", "leases.end_lease"),  # destroying a held sandbox ends its lease
    danger=True,
    enqueue=enqueue_reclaim,
)

DISCARD_ACTION = AdminAction(
    title="Discard unsaved state and destroy",
    button="Discard",
    warning="The lease that holds the sandbox ends and running processes are killed. Everything in /workspace and /data that "
    "is not stored yet is lost and cannot be recovered. Earlier snapshots stay.",
    done="being destroyed without storing its state",
    refusal_reason="destroyed or discarded already",
    legal=_can_discard,
    verb=_discard_sandbox,
    icon="delete_sweep",
    permissions=("sandboxes.act_on_sandbox", "leases.end_lease"),
    danger=True,
    apart=True,
    enqueue=enqueue_reclaim,
)

SandboxAdmin.add_actions(
    {
        "evict": EVICT_ACTION,
        "wake": WAKE_ACTION,
        "restart": RESTART_ACTION,
        "take_snapshot": TAKE_SNAPSHOT_ACTION,
        "destroy_now": DESTROY_ACTION,
        "discard": DISCARD_ACTION,
    },
    {"evict_all": EVICT_WAITING_ACTION, "destroy_all": DESTROY_ACTION},
)
