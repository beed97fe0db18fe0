"""Form fields for durations, decimals and lists of strings."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from unfold.widgets import UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget

from sandboxes.db import durations


class ShownTextField(forms.Field):
    """Field whose text does not show every value exactly. The value is unchanged if its text is."""

    def has_changed(self, initial: Any, data: Any) -> bool:
        try:
            return bool(self.to_python(self.prepare_value(initial)) != self.to_python(data))
        except ValidationError:
            return True


class DurationTextField(ShownTextField):
    """Duration in the syntax of the environment variables: "90", "30s", "5m", "2h", "1d"."""

    widget = UnfoldAdminTextInputWidget

    def __init__(self, *, help_text: str = "", **kwargs: Any) -> None:
        super().__init__(help_text=f'{help_text} For example "30s", "5m", "4h" or "1d".'.strip(), **kwargs)

    def to_python(self, value: Any) -> timedelta | None:
        if not value:
            return None
        try:
            return durations.parse_duration(str(value))
        except ValueError as error:
            raise ValidationError(f"{error}.".capitalize()) from None

    def prepare_value(self, value: Any) -> Any:
        if not isinstance(value, timedelta):
            return value
        seconds = int(value.total_seconds())
        for unit in ("d", "h", "m"):
            if seconds and seconds % durations.SECONDS_PER_UNIT[unit] == 0:
                return f"{seconds // durations.SECONDS_PER_UNIT[unit]}{unit}"
        return f"{seconds}s"


class DurationOrZeroField(DurationTextField):
    """Duration that may be zero."""

    def to_python(self, value: Any) -> timedelta | None:
        return timedelta(0) if str(value).strip() in ("0", "0s") else super().to_python(value)


class NormalizedDecimalField(forms.DecimalField):
    """Decimal shown without trailing zeros."""

    def prepare_value(self, value: Any) -> Any:
        return f"{value.normalize():f}" if isinstance(value, Decimal) else value


class LineListField(ShownTextField):
    """List of strings, one per line."""

    def __init__(self, *, help_text: str = "", encoder: Any = None, decoder: Any = None, **kwargs: Any) -> None:
        # JSONField passes encoder and decoder, which a list of strings does not need.
        kwargs["widget"] = UnfoldAdminTextareaWidget({"rows": 4})
        super().__init__(help_text=f"{help_text} One per line.".strip(), **kwargs)

    def to_python(self, value: Any) -> list[str]:
        return [line.strip() for line in str(value or "").splitlines() if line.strip()]

    def prepare_value(self, value: Any) -> Any:
        return "\n".join(map(str, value)) if isinstance(value, list) else value


class MultilineTextField(forms.CharField):
    """Text whose white space is kept. Browsers send other line breaks than the stored ones."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "strip": False})

    def to_python(self, value: Any) -> Any:
        return (super().to_python(value) or "").replace("\r\n", "\n")
