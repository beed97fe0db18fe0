"""Links and validation for agents, leases, API keys and environment types on the pages of the apps below."""

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db.models import Q
from django.utils.html import format_html_join

from leases.agents import describe_unknown_agent
from leases.models import DID_DESCRIPTION, Agent, AgentKey, EnvironmentType, Lease, Project, require_did
from sandboxes.admin.base.formatting import SummaryField, render_admin_link, render_badge
from sandboxes.admin.base.registry import Reference, register_fields, register_reference
from sandboxes.formatting import suggest_match
from sandboxes.models import Policy

MAX_SUGGESTIONS = 1000  # newest names compared with an unknown one
MAX_TYPES_SHOWN = 8  # environment types on a policy's page


class AgentReference(Reference):
    """Agent, by DID. An agent without a row, such as one that only has a budget, has no page."""

    def render_links(self, values: Collection[str]) -> Mapping[str, Any]:
        pages = dict(Agent.objects.filter(did__in=values).values_list("did", "pk"))
        return {did: render_admin_link("leases_agent", pages[did], did) if did in pages else did for did in values}

    def clean(self, value: str) -> str:
        did = value.strip()
        try:
            require_did(did)
        except ValidationError:
            raise ValidationError(f"{did[:80]!r} is not {DID_DESCRIPTION}.") from None
        return did

    def find_warning(self, value: str) -> str:
        return describe_unknown_agent(value)

    def ensure_exists(self, value: str) -> None:
        Agent.objects.get_or_create(did=value)


class HolderReference(Reference):
    """Lease, by the UUID in `holder` columns."""

    def render_links(self, values: Collection[UUID]) -> Mapping[UUID, Any]:
        leases = Lease.objects.in_bulk(values)
        return {
            pk: render_admin_link("leases_lease", pk, leases[pk].environment_id) if pk in leases else str(pk) for pk in values
        }

    def build_field(self, value: UUID) -> SummaryField:
        lease = Lease.objects.filter(pk=value).first()
        if lease is None:
            return SummaryField(self.label, str(value), note="deleted after its retention")
        link = render_admin_link("leases_lease", lease.pk, lease.environment_id)
        return SummaryField(self.label, link, note=render_badge(lease.status))


class ApiKeyReference(Reference):
    """API key, by its number as text."""

    def render_links(self, values: Collection[str]) -> Mapping[str, Any]:
        keys = AgentKey.objects.in_bulk([int(value) for value in values if _is_key_number(value)])
        links = {
            str(key.pk): render_admin_link("leases_agentkey", key.pk, key.name or f"lh_{key.prefix}_…") for key in keys.values()
        }
        return {value: links.get(value, value) for value in values}

    def clean(self, value: str) -> str:
        """Accept a number, or a prefix with or without the form of the lists: "lh_3f9a1c20_…"."""
        text = value.strip()
        number = Q(pk=int(text)) if _is_key_number(text) else Q()
        prefix = text.removeprefix("lh_").split("_")[0]
        key = AgentKey.objects.filter(number | Q(prefix=prefix)).order_by("pk").first()
        if key is None:
            prefixes = AgentKey.objects.order_by("-pk").values_list("prefix", flat=True)[:MAX_SUGGESTIONS]
            raise ValidationError(f"There is no such API key.{suggest_match(prefix, prefixes)}")
        return str(key.pk)


def _is_key_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 19  # larger numbers overflow the column


class NameReference(Reference):
    """Row of a model with unique names, by its name."""

    def __init__(self, label: str, model: type[EnvironmentType | Project]) -> None:
        super().__init__(label)
        self.model = model

    def render_links(self, values: Collection[str]) -> Mapping[str, Any]:
        pks = dict(self.model._default_manager.filter(name__in=values).values_list("name", "pk"))
        page = self.model._meta.label_lower.replace(".", "_")
        return {name: render_admin_link(page, pks[name], name) if name in pks else name for name in values}

    def clean(self, value: str) -> str:
        name = value.strip()
        names = self.model._default_manager.values_list("name", flat=True)
        if not names.filter(name=name).exists():
            raise ValidationError(f"There is no such {self.model._meta.verbose_name}.{suggest_match(name, names)}")
        return name


def build_policy_types_fields(policy: Policy) -> list[SummaryField]:
    """Build the environment types that use a policy. The built-in one is also used by types that name none."""
    uses = Q(policy=policy) | Q(policy__isnull=True) if policy.built_in else Q(policy=policy)
    types = EnvironmentType.objects.filter(uses).order_by("name")
    links = [render_admin_link("leases_environmenttype", each.pk, each.name) for each in types[:MAX_TYPES_SHOWN]]
    more = len(types) - len(links)
    text = format_html_join(", ", "{}", ((link,) for link in links))
    return [SummaryField("Environment types", text or "none", note=f"and {more} more" if more else "")]


register_reference("agent", AgentReference("Agent"))
register_reference("holder", HolderReference("Lease"))
register_reference("api_key", ApiKeyReference("API key"))
register_reference("environment_type", NameReference("Environment type", EnvironmentType))
register_reference("project", NameReference("Project", Project))
register_fields(Policy, build_policy_types_fields)
