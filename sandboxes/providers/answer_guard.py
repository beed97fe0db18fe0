"""Guard of the code by which a provider asks its vendor or engine: an answer that cannot be read is Unavailable."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from sandboxes.providers.base import Provider
from sandboxes.providers.errors import FailureCause, ProviderError, Unavailable
from sandboxes.redaction.texts import quote_answer
from sandboxes.unreadable_answers import guard_reads, translate_unreadable

# Of remote providers: their other verbs reach the vendor by these.
HOOKS = {"_delete", "_execute", "_is_listed", "_look_up", "_look_up_remains", "_stop", "_upload", "_wait_running"}
VERBS = {name for name in vars(Provider) if not name.startswith("_")}
Class = TypeVar("Class", bound=type)


def guard_answers(provider_class: Class) -> Class:
    """Guard the verbs and hooks that the body of a class defines. For the class of each vendor."""
    methods = [name for name, value in vars(provider_class).items() if name in VERBS | HOOKS and callable(value)]
    return guard_methods(*methods)(provider_class)


def guard_methods(*methods: str) -> Callable[[Class], Class]:
    """Guard these methods. For a class that makes a part of a provider's calls."""

    def guard(client_class: Class) -> Class:
        guard_reads(client_class, methods, known=(ProviderError,), build_error=build_unreadable)
        return client_class

    return guard


def translate_answer(subject: str) -> AbstractContextManager[None]:
    """Raise Unavailable for an exception that is not of the port. Around the translation of a vendor's own exceptions."""
    return translate_unreadable(subject, (ProviderError,), build_unreadable)


def build_unreadable(subject: str, error: Exception) -> Unavailable:
    """Build the error of an answer that cannot be read. The request may have been carried out."""
    text = f"{subject}: unexpected answer in place of the vendor's: {type(error).__name__}: {quote_answer(error)}"
    return Unavailable(text, cause=FailureCause.ENGINE_ERROR)
