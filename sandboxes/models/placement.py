"""Reasons for which a pool is passed over when a sandbox is placed: a closed list."""

from django.db import models


class SkipReason(models.TextChoices):
    """Cause for which a sandbox is not started in a pool of the ordered list of its holder."""

    DRAINING = "draining", "is draining"
    FULL = "full", "is full"  # no place or no egress slot, and none could be freed
    STARTING_LIMIT = "starting_limit", "starts as many sandboxes as it may at once"
    CIRCUIT_OPEN = "circuit_open", "starts nothing after failed starts"
    UNAVAILABLE = "unavailable", "provider unavailable"
    REJECTED = "rejected", "provider rejected the sandbox"  # such as an unknown image: an operator has to act
    START_FAILED = "start_failed", "start failed"  # of the same holder, in a concurrent request
    NOT_CONFIGURED = "not_configured", "provider not configured"
    NO_MODELS = "no_models", "has no way to models"
    TOO_SMALL = "too_small", "is too small for the requested resources"
