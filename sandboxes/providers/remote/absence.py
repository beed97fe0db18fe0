"""Proof of absence: the one rule by which a remote provider says that a sandbox does not exist.

Missing ends a lease as lost, and confirms a destruction. One answer proves neither, because its sender is not known: see
errors.py. Missing therefore needs, in this order,

1. the vendor's own document of absence (NotFound), in the form that the vendor's module states,
2. another document of the vendor, which would name the sandbox: the list of the account, or what its module has instead,
3. the document of absence once more.

With any other sequence of answers the state of the sandbox is not known: Unavailable, and the caller tries again."""

from collections.abc import Callable
from typing import TypeVar

from sandboxes.providers.errors import FailureCause, Missing, Unavailable
from sandboxes.providers.remote.errors import NotFound

Found = TypeVar("Found")


def look_up(ref: str, look: Callable[[], Found], is_listed: Callable[[], bool]) -> Found:
    """Return what `look` finds. Raise Missing if the absence of the sandbox is proven, and Unavailable if it is not known.

    `look` raises NotFound for the vendor's document of absence. `is_listed` asks for the other document, and raises Unavailable
    unless the answer is the vendor's."""
    try:
        return look()
    except NotFound:
        pass
    if is_listed():
        text = f"{ref}: the vendor does not find the sandbox that its list names."
        raise Unavailable(text, cause=FailureCause.ENGINE_ERROR)
    try:
        return look()
    except NotFound as error:
        raise Missing(str(error)) from error
