"""Extension points for the apps above: references to their rows, and further fields on pages.

Rows of `sandboxes` and `billing` name agents, leases, API keys and environment types by value only. The app that has their
pages registers a `Reference` for each kind when its admin modules load. An unregistered kind is shown as plain text."""

from collections.abc import Callable, Collection, Mapping
from typing import Any
from uuid import UUID

from django.db.models import Model

from sandboxes.admin.base.formatting import SummaryField


class Reference:
    """Kind of row that is referenced by value. A registered subclass adds links and validation."""

    def __init__(self, label: str) -> None:
        self.label = label

    def render_links(self, values: Collection[Any]) -> Mapping[Any, Any]:
        """Map each value to a link to its page, or to its text if it has no page. At most one query."""
        return {value: str(value) for value in values}

    def build_field(self, value: Any) -> SummaryField:
        """Build the summary field of one value."""
        return SummaryField(self.label, self.render_links([value])[value] if value else "–")

    def clean(self, value: str) -> str:
        """Return the stored form of a value typed into a form. Raise ValidationError if it cannot be one."""
        return value.strip()

    def find_warning(self, value: str) -> str:
        """Return a warning about a cleaned value that names nothing yet, or an empty string."""
        return ""

    def ensure_exists(self, value: str) -> None:
        """Create the referenced row if it is missing."""


_references = {
    "agent": Reference("Agent"), "holder": Reference("Holder"), "api_key": Reference("API key"),
    "environment_type": Reference("Environment type"), "project": Reference("Project"),
}  # fmt: skip
_field_builders: dict[type[Model], list[Callable[[Any], list[SummaryField]]]] = {}


def register_reference(kind: str, reference: Reference) -> None:
    """Replace the plain-text reference of a known kind. Raise KeyError if the kind is unknown."""
    if kind not in _references:
        raise KeyError(kind)
    _references[kind] = reference


def get_reference(kind: str) -> Reference:
    return _references[kind]


def build_agent_field(did: str) -> SummaryField:
    return _references["agent"].build_field(did)


def build_holder_field(holder: UUID) -> SummaryField:
    return _references["holder"].build_field(holder)


def render_holders(holders: Collection[UUID]) -> Mapping[UUID, Any]:
    return _references["holder"].render_links(holders)


def register_fields(model: type[Model], build: Callable[[Any], list[SummaryField]]) -> None:
    """Add summary fields to the page of every row of a model."""
    _field_builders.setdefault(model, []).append(build)


def build_registered_fields(row: Model) -> list[SummaryField]:
    return [field for build in _field_builders.get(type(row), []) for field in build(row)]
