"""Answers of services outside that cannot be read: one error of the port for every exception of a client or a parser.

A vendor, a store or a forge, or a proxy in its place, may answer a page, an empty or truncated document, one with other fields
or types, or one that is nested too deeply. The exception depends on the client, and may be of any class."""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

import structlog
from django.db import Error as DatabaseError

log = structlog.get_logger(__name__)
# Not caused by an answer: the disk of this host, or the database behind a provider's records.
OTHER_ERRORS = (OSError, DatabaseError)
BuildError = Callable[[str, Exception], Exception]


@contextmanager
def translate_unreadable(subject: str, known: tuple[type[Exception], ...], build_error: BuildError) -> Iterator[None]:
    """Raise an error of the port for any exception but those of the port, `known`, and OTHER_ERRORS.

    `build_error` gets the subject and the exception, which is logged with its traceback: it may be an error of this product."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (*known, *OTHER_ERRORS)):
            raise
        log.warning("answer not readable", subject=subject[:200], exc_info=error)
        raise build_error(subject, error) from error


def guard_reads(owner: type, methods: Iterable[str], *, known: tuple[type[Exception], ...], build_error: BuildError) -> None:
    """Let methods of a class, also those that return a generator, translate their exceptions by `translate_unreadable`.

    The subject is the method and its first argument, if that is text."""
    for name in methods:
        setattr(owner, name, _guard(name, getattr(owner, name), known, build_error))


def _guard(name: str, method: Callable[..., Any], known: tuple[type[Exception], ...], build_error: BuildError) -> Any:
    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        subject = f"{name} of {args[0]}" if args and isinstance(args[0], str) else name
        with translate_unreadable(subject, known, build_error):
            result = method(self, *args, **options)
        return iterate(subject, result) if isinstance(result, GeneratorType) else result

    def iterate(subject: str, result: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        with translate_unreadable(subject, known, build_error):
            return (yield from result)

    return guarded
