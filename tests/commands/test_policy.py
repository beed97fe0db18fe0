"""manage.py policy: list, show, add and set."""

import json
from decimal import Decimal

import pytest
from django.core.management import CommandError

from sandboxes.models import Policy
from tests.commands.manage import call

pytestmark = pytest.mark.django_db


def test_a_policy_is_added_changed_shown_and_listed() -> None:
    added = call(
        "policy", "add", "web", "--description", "with a network", "--allowed-domains", "pypi.org", "--allowed-domains",
        "*.example.org", "git.example.org:8443", "--previews", "--mcp-tools", "budget", "--agent-max-cost", "1.50",
    )  # fmt: skip
    assert added == (
        "web added: description=with a network, agent_max_cost=1.5, previews=yes, mcp_tools=budget, "
        "allowed_domains=pypi.org *.example.org git.example.org:8443\n"
    )
    policy = Policy.objects.get(name="web")
    assert (policy.allowed_domains, policy.previews) == (["pypi.org", "*.example.org", "git.example.org:8443"], True)
    assert (policy.agent_max_cost, policy.relay, policy.calls_per_minute) == (Decimal("1.5"), False, 600)
    line = "web previews; tools; network: pypi.org *.example.org git.example.org:8443 (with a network)"
    sealed, web = call("policy", "list").splitlines()
    assert sealed.startswith("sealed no exceptions (") and web == line
    call("policy", "set", "web", "--allowed-domains", "--no-previews", "--agent-max-cost", "none", "--calls-per-minute", "7")
    document = json.loads(call("policy", "show", "web", "--json"))
    assert (document["allowed_domains"], document["previews"], document["mcp_tools"]) == ([], False, ["budget"])
    assert (document["agent_max_cost"], document["calls_per_minute"]) == (None, 7)
    assert "mcp_tools: budget" in call("policy", "show", "web").splitlines()


def test_every_setting_of_a_policy_is_an_option() -> None:
    document = json.loads(call("policy", "show", "sealed", "--json"))
    assert {*document} == {field.name for field in Policy._meta.get_fields() if field.concrete} - {"id"}


def test_a_dry_run_changes_nothing() -> None:
    assert call("policy", "add", "web", "--relay", "--dry-run") == "web would be added: relay=yes\n"
    assert not Policy.objects.filter(name="web").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["set", "sealed", "--relay"], "sealed is built in"),
        (["set", "sealed", "--description", "mine"], "sealed is built in"),
        (["add", "sealed", "--relay"], "^name: Policy with this Name already exists"),
        (["add", "web", "--allowed-domains", "http://pypi.org"], "^--allowed-domains: "),
        (["add", "web", "--mcp-tools", "shell"], "^--mcp-tools: A list of different names out of"),
        (["add", "web", "--mcp-tools", "budget", "budget"], "^--mcp-tools: "),
        (["add", "web", "--record-collections", "a"], "^--record-collections: a is not"),
        (["add", "web", "--largest-body-kib", "65537"], "^--largest-body-kib: Ensure"),
        (["add", "web", "--calls-per-minute", "none"], "^--calls-per-minute: must be a number."),
        (["add", "web", "--agent-max-cost", "NaN"], "^--agent-max-cost: "),
        (["add", "web", "--agent-max-cost", "-1"], "^--agent-max-cost: Ensure"),
        (["add", "web", "--agent-max-cost", "1e99"], "^--agent-max-cost: Ensure"),
        (["add", "web", "--agent-max-turns", "0"], "^--agent-max-turns: Ensure"),
        (["add", "web", "--description", "x" * 201], "^--description: Ensure"),
        (["add", "web", "--models", "\udcff"], "^--models: must be UTF-8"),
        (["set", "wbe", "--relay"], "no policy 'wbe'"), (["show", "seald"], "no policy 'seald'. Did you mean sealed?"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named_and_change_nothing(args: list[str], message: str) -> None:
    before = [*Policy.objects.values()]
    with pytest.raises(CommandError, match=message):
        call("policy", *args)
    assert [*Policy.objects.values()] == before
