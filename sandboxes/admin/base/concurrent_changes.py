"""Change forms that keep concurrent changes of the row by others.

open     the page posts the column values that its form shows, in one hidden input
submit   a field is changed if it differs from the shown value; unchanged fields take the row's present value
conflict a changed field whose column was changed by another request is an error that names the present value
save     the row is locked and its changed columns are compared again; only these are written"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from django import forms
from django.core.exceptions import ValidationError
from django.db.models import Model

SHOWN_VALUES_INPUT = "shown_values"
MALFORMED_MESSAGE = "The page did not send the values that it showed. Open it again."


class ConcurrentChangeForm(forms.ModelForm):
    """Form of an existing row that compares the input with the values shown when the page was opened.

    A request without shown values is compared with the row as it is."""

    secret_columns: ClassVar[Mapping[str, str]] = {}  # form fields that replace a secret, which has no shown value: its column

    def __init__(self, data: Any = None, files: Any = None, *, instance: Any, initial: Any = None, **kwargs: Any) -> None:
        self.present = self.dump_columns(instance)
        self.shown, shown_initial = dict(self.present), {}
        self.is_malformed = False
        if data is not None and SHOWN_VALUES_INPUT in data:
            try:
                self.shown = self._load_columns(data[SHOWN_VALUES_INPUT])
                shown_initial = self._parse_columns(instance)
            except (TypeError, ValueError, ValidationError):
                self.is_malformed = True
        super().__init__(data, files, instance=instance, initial={**(initial or {}), **shown_initial}, **kwargs)
        for field in self.fields.values():
            field.show_hidden_initial = False  # default of columns with a callable default; replaced by the shown values

    def get_shown_values(self) -> str:
        """Return the content of the hidden input, or nothing on a page without editable columns."""
        return json.dumps(self.shown) if self.list_columns() else ""

    @classmethod
    def list_columns(cls) -> list[str]:
        """List the columns that the page edits. Declared fields are fields of the form also where the page leaves them out."""
        names = {*cls.base_fields} & {*(cls._meta.fields or ())} - {*(cls._meta.exclude or ())}
        return [field.name for field in cls._meta.model._meta.concrete_fields if field.name in names]

    @classmethod
    def dump_columns(cls, row: Model) -> dict[str, Any]:
        """Return the present value of each column as JSON, of a secret its digest."""
        values = {name: _dump(row, name) for name in cls.list_columns()}
        secrets = {name: _digest(getattr(row, name)) for name in cls.secret_columns.values()}
        return values | secrets

    def _load_columns(self, text: str) -> dict[str, Any]:
        shown = json.loads(text)
        if not isinstance(shown, dict) or shown.keys() != self.present.keys():
            raise ValidationError(MALFORMED_MESSAGE)
        return shown

    def _parse_columns(self, row: Model) -> dict[str, Any]:
        return {name: _parse(row, name, self.shown[name]) for name in self.list_columns()}

    def clean(self) -> dict[str, Any] | None:
        if self.is_malformed:
            raise ValidationError(MALFORMED_MESSAGE)
        moved = {name for name, value in self.present.items() if value != self.shown[name]}
        conflicts = {name: self._describe_present(name) for name in self._list_conflicts(moved)}
        for name in {*self.list_columns()} - {*self.changed_data} - self.errors.keys():
            self.cleaned_data[name] = getattr(self.instance, name)
        cleaned = super().clean()
        for name, present in conflicts.items():
            self.add_error(
                name, f"Changed by another request since this page was opened: now {present}. Save again to replace that value."
            )
            column = self.secret_columns.get(name, name)
            self.shown[column] = self.present[column]
        return cleaned

    def _list_conflicts(self, moved: Iterable[str]) -> list[str]:
        """List the changed fields whose column was changed to yet another value."""
        changed = [name for name in self.changed_data if self.secret_columns.get(name, name) in moved]
        return [name for name in changed if name in self.secret_columns or self._differs_from_present(name)]

    def _differs_from_present(self, name: str) -> bool:
        bound = self[name]
        value = _parse(self.instance, name, self.present[name])
        return bool(bound.field.has_changed(value, bound.data))

    def _describe_present(self, name: str) -> str:
        if name in self.secret_columns:
            return "another secret, which is not shown"
        value = getattr(self.instance, name)
        display = getattr(self.instance, f"get_{name}_display", None)
        if isinstance(value, bool):
            return "on" if value else "off"
        if value is None or value in ("", []):
            return "empty"
        if isinstance(value, list):
            return ", ".join(map(str, value))
        if display is not None:
            return str(display())
        return str(value if isinstance(value, Model) else self.fields[name].prepare_value(value))

    def lock_row(self) -> None:
        """Lock the row until commit. Raise ValidationError if a changed column differs from the row that was validated."""
        model = self._meta.model
        row = model._base_manager.select_for_update(no_key=True).filter(pk=self.instance.pk).first()
        if row is None:
            raise ValidationError("The row was deleted.")
        columns, present = {self.secret_columns.get(name, name) for name in self.changed_data}, self.dump_columns(row)
        for name in columns & present.keys():
            if present[name] != self.present[name]:
                label = model._meta.get_field(name).verbose_name
                raise ValidationError(f"{label} was changed by another request in this moment.".capitalize())

    def list_changed_columns(self) -> list[str]:
        return [name for name in self.changed_data if name in self.list_columns()]


def build_form_class(form: type[forms.ModelForm]) -> type[ConcurrentChangeForm]:
    """Build the form of a change page from the form of an admin."""
    return type(form.__name__, (ConcurrentChangeForm, form), {"secret_columns": getattr(form, "secret_columns", {})})


def _dump(row: Model, name: str) -> Any:
    field: Any = row._meta.get_field(name)
    return None if field.value_from_object(row) is None else field.value_to_string(row)


def _parse(row: Model, name: str, value: Any) -> Any:
    field: Any = row._meta.get_field(name)
    return None if value is None else field.to_python(value)


def _digest(secret: Any) -> str:
    return "" if secret is None else hashlib.sha256(bytes(secret)).hexdigest()
