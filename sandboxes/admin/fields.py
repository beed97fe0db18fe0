"""Form fields for what operators configure, in the words they use elsewhere: "5m", and one item a line."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from unfold.widgets import UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget

from sandboxes.db import durations


class DurationTextField(forms.Field):
    """A duration as the environment variables take it: "90", "30s", "5m", "2h", "1d"."""

    widget = UnfoldAdminTextInputWidget

    def __init__(self, *, help_text: str = "", **kwargs: Any) -> None:
        super().__init__(help_text=f'{help_text} Such as "30s", "5m", "4h" or "1d".', **kwargs)

    def to_python(self, value: Any) -> timedelta | None:
        if not value:
            return None
        try:
            return durations.parse_duration(str(value))
        except ValueError as wrong:
            raise ValidationError(f"{wrong}.".capitalize()) from None

    def prepare_value(self, value: Any) -> Any:
        if not isinstance(value, timedelta):
            return value
        seconds = int(value.total_seconds())
        for unit in ("d", "h", "m"):
            if seconds and seconds % durations.SECONDS_PER_UNIT[unit] == 0:
                return f"{seconds // durations.SECONDS_PER_UNIT[unit]}{unit}"
        return f"{seconds}s"


class DurationOrZeroField(DurationTextField):
    """A duration that may be 0."""

    def to_python(self, value: Any) -> timedelta | None:
        return timedelta(0) if str(value).strip() in ("0", "0s") else super().to_python(value)


class NormalizedDecimalField(forms.DecimalField):
    """A decimal number without the zeros that a column fills up with."""

    def prepare_value(self, value: Any) -> Any:
        return f"{value.normalize():f}" if isinstance(value, Decimal) else value


class LineListField(forms.Field):
    """A list of strings, one a line."""

    def __init__(self, *, help_text: str = "", encoder: Any = None, decoder: Any = None, **kwargs: Any) -> None:
        kwargs["widget"] = UnfoldAdminTextareaWidget({"rows": 4})  # for a JSONField, whose two arguments end here
        super().__init__(help_text=f"{help_text} One a line.", **kwargs)

    def to_python(self, value: Any) -> list[str]:
        return [line.strip() for line in str(value or "").splitlines() if line.strip()]

    def prepare_value(self, value: Any) -> Any:
        return "\n".join(map(str, value)) if isinstance(value, list) else value
