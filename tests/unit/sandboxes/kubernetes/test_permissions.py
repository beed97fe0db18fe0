"""Permissions of the control plane: the Role of the deployment, and the check of what is missing."""

from datetime import timedelta
from io import StringIO

import pytest
import yaml
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from controlplane.checks import list_engine_problems
from sandboxes.providers.errors import Unavailable
from sandboxes.providers.kubernetes.configuration import ObjectKind
from sandboxes.providers.kubernetes.permissions import Rule, find_problems, list_rules
from tests.emulators.base import CUT_BEFORE, Fault
from tests.emulators.kubernetes.api.resources import ROLES
from tests.support.cluster import NAMESPACE, read_prerequisites

REVIEWS = r"^POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews$"


def expand(rules):
    """Return (group, resource, verb) of all rules in the form of a Role."""
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def to_grants(rules: list[Rule]):
    return {(rule.group, rule.resource, verb) for rule in rules for verb in rule.verbs}


@pytest.fixture
def edit_role(cluster):
    """Function that changes the rules of the Role until the end of the test."""
    rules = cluster.find(ROLES, "leasehold")["rules"]

    def edit(changed):
        cluster.emulator.store.edit(ROLES, NAMESPACE, "leasehold", lambda role: role.update(rules=changed))

    yield edit
    edit(rules)


def test_role_of_the_deployment_permits_what_is_used_and_nothing_more(cluster):
    [role] = [item for item in read_prerequisites() if item["kind"] == "Role"]
    assert expand(role["rules"]) == to_grants(list_rules(cluster.configuration))


@pytest.mark.docker
def test_missing_permissions_are_the_lines_to_add(cluster, provider, edit_role):
    assert provider.find_setup_problems() == []
    rules = cluster.find(ROLES, "leasehold")["rules"]
    kept = [rule for rule in rules if "events" not in rule["resources"] and "secrets" not in rule["resources"]]
    edit_role([*kept, {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}])
    required, optional = provider.find_setup_problems()
    assert (required.prevents_starts, optional.prevents_starts) == (True, False)
    assert "delete secrets" in required.message and NAMESPACE in required.message
    assert expand(yaml.safe_load(required.solution)) == {("", "secrets", "delete")}

    edit_role([*kept, *yaml.safe_load(f"{required.solution}\n{optional.solution}"), *rules])
    assert provider.find_setup_problems() == []


@pytest.mark.docker
def test_each_mode_asks_for_the_rules_that_it_uses(cluster, provider):
    other = cluster.connect(object_kind=ObjectKind.SANDBOX, exec_fallback=True)
    required, optional = other.find_setup_problems()
    found = expand(yaml.safe_load(f"{required.solution}\n{optional.solution}"))
    assert found == to_grants(list_rules(other.configuration)) - to_grants(list_rules(provider.configuration))
    assert {resource for _, resource, _ in found} == {"sandboxes", "pods/exec"}


@pytest.mark.docker
def test_check_command_prints_missing_permissions_and_fails_only_without_a_required_one(
    cluster, default_provider, edit_role, settings
):
    def check():
        call_command("check", deploy=True, tags=["engine"], stderr=(output := StringIO()))
        return output.getvalue()

    assert check() == ""
    rules = cluster.find(ROLES, "leasehold")["rules"]
    edit_role([rule for rule in rules if "events" not in rule["resources"]])
    assert '- {apiGroups: [""], resources: [events], verbs: [list]}' in check()
    edit_role([])
    with pytest.raises(SystemCheckError, match=r"leasehold.E013[\s\S]*resources: \[pods\], verbs: \[create, get, list"):
        check()
    settings.SANDBOX_PROVIDER = "memory"
    assert list_engine_problems() == []


@pytest.mark.docker
def test_api_server_without_answers_delays_no_start(cluster, default_provider, provider):
    cluster.emulator.faults.append(Fault(REVIEWS, CUT_BEFORE))
    [first, *_] = list_engine_problems()
    assert "was not checked" in first
    times = iter([0.0, 0.0, 9.0])
    with pytest.raises(Unavailable, match="within 5 s"):
        find_problems(provider.pods.api, provider.configuration, timeout=timedelta(seconds=5), clock=lambda: next(times))
