"""Grant of a lease by an operator, on the pages of leases and of one environment."""

from datetime import datetime, timedelta

from django import forms
from django.urls import reverse
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from leases import leasing
from leases.admin.fields import EnvironmentIdField
from leases.agents import describe_new_agent
from leases.environments.models import Environment
from leases.models import EnvironmentType, Lease
from sandboxes.admin.base.actions import AdminAction, CreateAction, ReasonForm
from sandboxes.admin.base.fields import DurationTextField
from sandboxes.admin.base.registry import get_reference
from sandboxes.models import Pool

GRANT_DESCRIPTION = (
    "The agent becomes a participant of the environment. No sandbox starts now: it starts when the agent first uses the lease."
)


class GrantForm(ReasonForm):
    """Agent of a lease, and values that replace those of the environment type."""

    field_order = ["agent_did", "pool", "ttl", "reason"]
    error_fields = {"ttl_seconds": "ttl"}
    agent_did = forms.CharField(
        max_length=255, label="Agent (DID)", widget=UnfoldAdminTextInputWidget({"autofocus": True, "autocomplete": "off"}),
    )  # fmt: skip
    pool = forms.ModelChoiceField(
        Pool.objects.order_by("name"), required=False, empty_label="As the environment type says",
        widget=UnfoldAdminSelectWidget,
    )  # fmt: skip
    ttl = DurationTextField(
        required=False, label="Idle limit",
        help_text="The lease ends after this time without use. Empty: as the environment type says.",
    )  # fmt: skip

    def clean_agent_did(self) -> str:
        did = get_reference("agent").clean(self.cleaned_data["agent_did"])
        if warning := describe_new_agent(did):
            self.warnings.append(warning)
        return did


class GrantLeaseForm(GrantForm):
    """Agent, environment and environment type of a lease."""

    field_order = ["agent_did", "environment_id", "environment_type", "pool", "ttl", "reason"]
    error_fields = {
        **GrantForm.error_fields, "environment_ended": "environment_id", "environment_not_found": "environment_id"
    }  # fmt: skip
    environment_id = EnvironmentIdField(label="Environment id", help_text="Created with the lease if there is none of this id.")
    environment_type = forms.ModelChoiceField(
        EnvironmentType.objects.order_by("name"), empty_label="Choose a type", widget=UnfoldAdminSelectWidget
    )


def grant_lease(
    actor: str, now: datetime, *, agent_did: str, environment_id: str, environment_type: EnvironmentType, pool: Pool | None,
    ttl: timedelta | None,
) -> tuple[Lease, bool]:  # fmt: skip
    """Grant a lease without a sandbox, and return whether the agent did not hold it before."""
    request = leasing.LeaseRequest(agent_did, environment_id, environment_type.name, ttl=ttl, pool=pool.name if pool else "")
    return leasing.acquire(request, now=now, actor=actor)


def _grant_in_environment(
    row: Environment, actor: str, reason: str, now: datetime, *, agent_did: str, pool: Pool | None, ttl: timedelta | None
) -> bool:
    row.granted, is_new = grant_lease(  # type: ignore[attr-defined]
        actor, now, agent_did=agent_did, environment_id=row.pk, environment_type=row.type, pool=pool, ttl=ttl
    )
    return is_new


def _build_lease_url(row: Environment, form: ReasonForm) -> str:
    return reverse("admin:leases_lease_change", args=[row.granted.pk])  # type: ignore[attr-defined]


GRANT_LEASE_ACTION = CreateAction(
    title="Grant lease",
    description=GRANT_DESCRIPTION,
    done="granted. Its sandbox starts when the agent first uses it",
    existing="the agent holds this lease already",
    verb=grant_lease,
    form=GrantLeaseForm,
    permissions=("leases.grant_lease",),
    icon="contract",
)
GRANT_IN_ENVIRONMENT_ACTION = AdminAction(
    title="Grant lease",
    warning=GRANT_DESCRIPTION,
    done="given a new lease. Its sandbox starts when the agent first uses it",
    refusal_reason="the agent holds this lease already",
    legal=lambda row: row.ended_at is None,
    verb=_grant_in_environment,
    icon="contract",
    permissions=("leases.grant_lease",),
    creates=True,
    form=GrantForm,
    get_next_url=_build_lease_url,
)
