"""Causes of a sandbox's transitions: a closed list."""

from django.db import models


class TransitionReason(models.TextChoices):
    """Cause of one transition. sandboxes.lifecycle.EDGES lists the causes that each edge allows."""

    REQUESTED = "requested", "requested"  # a holder needs a sandbox and has none
    PREWARMED = "prewarmed", "started ahead of demand"
    ADOPTED = "adopted", "adopted by an operator"  # it was at the engine without a row
    READY = "ready", "ready"  # commands can run
    CLAIMED = "claimed", "claimed"  # a holder got a pre-warmed sandbox
    RUN_STARTED = "run_started", "run started"
    RUN_ENDED = "run_ended", "run ended"  # the last open run
    IDLE = "idle", "idle"
    LIFETIME = "lifetime", "end of the vendor's lifetime"  # the vendor ends every sandbox at a fixed age
    CAPACITY = "capacity", "place needed"  # by another holder: the pool is full
    BUDGET = "budget", "budget spent"
    RESTORE = "restore", "earlier snapshot restored"
    RESUMED = "resumed", "resumed"  # from suspension, without a run
    SUSPEND_FAILED = "suspend_failed", "could not be suspended"
    AGENT_UNRESPONSIVE = "agent_unresponsive", "agent does not respond"  # process 1 of the sandbox
    RESTART_REQUESTED = "restart_requested", "restart requested"
    AGENT_RESTARTED = "agent_restarted", "restarted"
    RESTART_FAILED = "restart_failed", "could not be restarted"
    PERSIST_FAILED = "persist_failed", "state could not be stored"
    PERSISTED = "persisted", "stored"  # state stored, process destroyed
    NOTHING_UNSAVED = "nothing_unsaved", "nothing unsaved was in it"  # no state to store, process gone
    WOKEN = "woken", "woken"
    LEASE_ENDED = "lease_ended", "lease ended"
    OPERATOR = "operator", "operator"
    DISCARDED = "discarded", "discarded by an operator"  # the last state is not stored
    START_FAILED = "start_failed", "start failed"
    START_STALLED = "start_stalled", "stalled while starting"  # past its deadline
    STATE_LOST = "state_lost", "stored state is lost"
    SURPLUS = "surplus", "surplus of the pool"  # above the warm target, or started with outdated pool settings
    PROVIDER_LOST = "provider_lost", "lost by the provider"
    HOST_LOST = "host_lost", "host lost"  # declared by an operator
    EVICTION_STALLED = "eviction_stalled", "process could not be destroyed"  # its state is stored
    COLD_TTL = "cold_ttl", "cold for too long"
    MOVED = "moved", "moved to another pool"  # its provider is unavailable, and its state is stored
    CONFIRMED_GONE = "confirmed_gone", "confirmed gone"  # by the provider
    NO_PROCESS = "no_process", "no process to destroy"


RUN_REASONS = (TransitionReason.RUN_STARTED, TransitionReason.RUN_ENDED)
