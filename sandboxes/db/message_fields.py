"""Columns for texts that only people read: messages of errors, reasons, notes, actors.

Code composes such a text of parts without a limit, such as an answer of a vendor. PostgreSQL refuses a text that is longer than
its column, NUL and lone surrogates, and the statement that records the failure would fail with it. SQLite stores any length.
These fields therefore store what fits. Identifiers are never cut: they are refused where they are received."""

from typing import TYPE_CHECKING, Any

from django.db import models

MAX_LONG_MESSAGE_CHARS = 2000
OMISSION, REPLACEMENT = "…", "\N{REPLACEMENT CHARACTER}"

if TYPE_CHECKING:
    from django.db.models.expressions import Combinable

    _Field = models.Field[str | Combinable, str]
    _CharField = models.CharField[str | Combinable, str]
    _TextField = models.TextField[str | Combinable, str]
else:
    _Field, _CharField, _TextField = models.Field, models.CharField, models.TextField


def fit_text(text: str, max_chars: int) -> str:
    """Return a text as both databases accept it: with at most `max_chars`, and without NUL and lone surrogates."""
    if len(text) > max_chars:
        text = text[: max_chars - len(OMISSION)] + OMISSION
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", REPLACEMENT).encode(errors="replace").decode()


def fit_column(model: type[models.Model], name: str, text: str) -> str:
    """Return a text as `name`, a message field of `model`, stores it. For SQL that does not use the field."""
    field = model._meta.get_field(name)
    if not isinstance(field, _FittedText):
        raise TypeError(f"{field} is not a message field")
    return fit_text(text, field.max_chars)


class _FittedText(_Field):
    """Text column that stores what fits, by each way of Django to write it."""

    @property
    def max_chars(self) -> int:
        raise NotImplementedError

    def get_prep_value(self, value: Any) -> Any:
        value = super().get_prep_value(value)
        return fit_text(value, self.max_chars) if isinstance(value, str) else value

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        """Return the text as it is stored, which the instance has afterwards, too."""
        value = super().pre_save(model_instance, add)
        if isinstance(value, str):
            value = fit_text(value, self.max_chars)
            setattr(model_instance, self.attname, value)
        return value


class MessageField(_FittedText, _CharField):
    """Text for people of at most `max_length` characters. In migrations it is a CharField."""

    @property
    def max_chars(self) -> int:
        assert self.max_length is not None
        return self.max_length

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.CharField", args, kwargs


class LongMessageField(_FittedText, _TextField):
    """Text for people of at most MAX_LONG_MESSAGE_CHARS. In migrations it is a TextField."""

    @property
    def max_chars(self) -> int:
        return MAX_LONG_MESSAGE_CHARS

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.TextField", args, kwargs
