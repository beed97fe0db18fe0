"""Creation of an environment by an operator, before its first lease."""

from datetime import datetime
from typing import Any

from django import forms
from unfold.widgets import (
    UnfoldAdminSelectWidget,
    UnfoldAdminTextareaWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from leases.admin.fields import EnvironmentIdField
from leases.agents import describe_new_agent
from leases.environments import lifecycle
from leases.environments.models import Environment
from leases.models import EnvironmentType
from leases.projects.models import DEFAULT_PROJECT_ID, Project
from sandboxes.admin.base.actions import CreateAction, ReasonForm
from sandboxes.admin.base.registry import get_reference

MAX_PARTICIPANTS = 100
ACCESS_CHOICES = {
    "": "As the environment type says",
    "project": "Every agent of the project",
    "participants": "Participants only",
}


class CreateEnvironmentForm(ReasonForm):
    """Parameters of lifecycle.NewEnvironment."""

    field_order = ["environment_id", "type", "project", "agents", "access", "phase", "reopen", "reason"]
    error_fields = {"open_to_project": "access"}
    environment_id = EnvironmentIdField(label="Environment id", autofocus=True)
    type = forms.ModelChoiceField(
        EnvironmentType.objects.order_by("name"), empty_label="Choose a type", label="Environment type",
        widget=UnfoldAdminSelectWidget,
    )  # fmt: skip
    project = forms.ModelChoiceField(
        Project.objects.order_by("name"), empty_label=None, initial=DEFAULT_PROJECT_ID, widget=UnfoldAdminSelectWidget,
        help_text="Project of the agents that may enter.",
    )  # fmt: skip
    agents = forms.CharField(
        required=False, label="Participants", help_text="DIDs of agents that may enter, one per line.",
        widget=UnfoldAdminTextareaWidget({"rows": 2, "autocomplete": "off"}),
    )  # fmt: skip
    access = forms.ChoiceField(choices=ACCESS_CHOICES.items(), required=False, widget=UnfoldAdminSelectWidget)
    phase = forms.CharField(
        required=False, max_length=64, help_text='Part of the game, such as "combat".',
        widget=UnfoldAdminTextInputWidget({"autocomplete": "off"}),
    )  # fmt: skip
    reopen = forms.BooleanField(
        required=False, label="Open again if ended", widget=UnfoldBooleanSwitchWidget,
        help_text="Its former participants are removed. Outcomes of earlier ends are kept.",
    )  # fmt: skip

    def clean_agents(self) -> list[str]:
        lines = [line for line in self.cleaned_data["agents"].splitlines() if line.strip()]
        if len(lines) > MAX_PARTICIPANTS:
            raise forms.ValidationError(f"At most {MAX_PARTICIPANTS} participants. Add further ones on the environment's page.")
        agents = [get_reference("agent").clean(line) for line in lines]
        self.warnings += [warning for warning in map(describe_new_agent, agents) if warning]
        return agents

    def clean_access(self) -> bool | None:
        """Return whether every agent of the project may enter, None: as the environment type says."""
        access: str = self.cleaned_data["access"]
        return access == "project" if access else None


def _create(
    actor: str, now: datetime, *, environment_id: str, type: EnvironmentType, project: Project, access: bool | None,
    **fields: Any,
) -> tuple[Environment, bool]:  # fmt: skip
    request = lifecycle.NewEnvironment(environment_id, type.name, project=project.name, open_to_project=access, **fields)
    return lifecycle.create(request, now=now, actor=actor)


CREATE_ENVIRONMENT_ACTION = CreateAction(
    title="Create environment",
    description="Agents can then acquire leases in the environment. Nothing changes if it exists with these values.",
    done="created",
    existing="the environment exists with these values",
    verb=_create,
    form=CreateEnvironmentForm,
    permissions=("leases.manage_environment",),
)
