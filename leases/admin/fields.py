"""Form fields of leases and environments."""

from typing import Any

from django import forms
from unfold.widgets import UnfoldAdminTextInputWidget

from leases.models import ENVIRONMENT_ID_DESCRIPTION, ENVIRONMENT_ID_PATTERN


class EnvironmentIdField(forms.RegexField):
    """Environment id, as the HTTP API accepts it."""

    def __init__(self, *, autofocus: bool = False, **kwargs: Any) -> None:
        super().__init__(
            rf"\A{ENVIRONMENT_ID_PATTERN}\Z",
            widget=UnfoldAdminTextInputWidget({"autocomplete": "off", **({"autofocus": True} if autofocus else {})}),
            error_messages={"invalid": f"Not {ENVIRONMENT_ID_DESCRIPTION}."},
            **kwargs,
        )
