"""Permissions of the control plane in the namespace of the sandboxes: rules that the configuration needs, and a check of them.

The check asks the API server with one SelfSubjectAccessReview for each verb of a rule: a review has no other form, and the
complete list of an account's rules may omit those of some authorizers."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from sandboxes.providers.engine_reports import SetupProblem
from sandboxes.providers.errors import FailureCause, Unavailable
from sandboxes.providers.kubernetes.agent_sandboxes import GROUP, PLURAL
from sandboxes.providers.kubernetes.api_client import ApiClient
from sandboxes.providers.kubernetes.configuration import KubernetesConfiguration, ObjectKind

REVIEWS_PATH = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
CHECK_TIMEOUT = timedelta(seconds=5)  # of all reviews together: the check runs at the start of processes


@dataclass(frozen=True)
class Rule:
    """Rule of a Role. Without one that is not required, sandboxes work and `purpose` does not."""

    resource: str  # plural, with a subresource after a slash
    verbs: tuple[str, ...]
    purpose: str
    group: str = ""
    is_required: bool = True


def list_rules(configuration: KubernetesConfiguration) -> list[Rule]:
    """Return the rules that the provider uses with this configuration."""
    rules = [
        Rule("pods", ("create", "get", "list", "delete"), "sandboxes"),
        Rule("pods", ("watch",), "reaction within a second when the cluster ends a Pod", is_required=False),
        Rule("secrets", ("create", "delete"), "tokens with which agents join the gateway"),
        Rule("namespaces", ("get",), "identity of the cluster"),
        Rule("pods/log", ("get",), "the check of the seal"),
        Rule("events", ("list",), "the autoscaler's messages about Pods without a node", is_required=False),
        Rule("resourcequotas", ("list",), "the quota in the console", is_required=False),
    ]
    if configuration.object_kind == ObjectKind.SANDBOX:
        rules.append(Rule(PLURAL, ("create", "get", "list", "delete"), "objects of agent-sandbox", GROUP))
    if configuration.exec_fallback:
        rules.append(Rule("pods/exec", ("get", "create"), "LEASEHOLD_KUBERNETES_EXEC_FALLBACK", is_required=False))
    return rules


def find_problems(
    api: ApiClient,
    configuration: KubernetesConfiguration,
    *,
    timeout: timedelta = CHECK_TIMEOUT,
    clock: Callable[[], float] = time.monotonic,
) -> list[SetupProblem]:
    """Return the missing rules, those without which no sandbox starts first. The solution is the YAML to add to the Role.

    Raise Unavailable if the API server does not decide all reviews in time."""
    missing = find_missing_rules(api, configuration, timeout=timeout, clock=clock)
    problems = []
    for is_required in (True, False):
        if rules := [rule for rule in missing if rule.is_required == is_required]:
            lacking = "; ".join(f"{', '.join(rule.verbs)} {rule.resource} ({rule.purpose})" for rule in rules)
            message = f"Permissions are missing in the namespace {configuration.namespace}: {lacking}."
            problems.append(SetupProblem(message, format_rules(rules), prevents_starts=is_required))
    return problems


def find_missing_rules(
    api: ApiClient, configuration: KubernetesConfiguration, *, timeout: timedelta, clock: Callable[[], float]
) -> list[Rule]:
    """Return the rules with the verbs that the account lacks."""
    deadline, missing = clock() + timeout.total_seconds(), []
    for rule in list_rules(configuration):
        denied = []
        for verb in rule.verbs:
            left = deadline - clock()
            if left <= 0:
                message = f"The API server has not answered all access reviews within {timeout.total_seconds():g} s."
                raise Unavailable(message, cause=FailureCause.TIMEOUT)
            if not _is_allowed(api, configuration.namespace, rule, verb, timedelta(seconds=left)):
                denied.append(verb)
        if denied:
            missing.append(replace(rule, verbs=tuple(denied)))
    return missing


def _is_allowed(api: ApiClient, namespace: str, rule: Rule, verb: str, timeout: timedelta) -> bool:
    """Return whether the account may do this. Raise Unavailable if an authorizer failed to decide."""
    resource, _, subresource = rule.resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": rule.group, "resource": resource, "subresource": subresource}
    if resource == "namespaces":
        attributes["name"] = namespace
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {name: value for name, value in attributes.items() if value}},
    }
    status = api.call("POST", REVIEWS_PATH, body, timeout=timeout).get("status") or {}
    error = status.get("evaluationError")
    if error and not status.get("allowed"):
        raise Unavailable(f"{verb} {rule.resource} is not decided: {error}", cause=FailureCause.ENGINE_ERROR)
    return status.get("allowed") is True


def format_rules(rules: Sequence[Rule]) -> str:
    """Return the lines that a Role needs, in YAML."""
    return "\n".join(_iter_lines(rules))


def _iter_lines(rules: Sequence[Rule]) -> Iterator[str]:
    for rule in rules:
        group = rule.group or '""'
        yield f"- {{apiGroups: [{group}], resources: [{rule.resource}], verbs: [{', '.join(rule.verbs)}]}}  # {rule.purpose}"
