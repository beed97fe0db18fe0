"""Actors of calls in tests that are not about the audit."""

from sandboxes.audit import Actor, ActorKind


def console_user(name: str = "eve") -> Actor:
    return Actor(name, ActorKind.CONSOLE)
