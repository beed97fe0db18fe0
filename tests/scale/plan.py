"""Size and duration of a measurement."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Options of the command line."""

    hosts: int
    sandboxes: int
    started: int
    minutes: float
    idle_minutes: float
    renew_every: float  # seconds
    exec_every: float  # seconds
    clients: int
