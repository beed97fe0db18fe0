"""Limits of agent runs, and their violations."""

from decimal import Decimal

import pytest

from leases.agent_runs.policy import AgentPolicy, ToolCall


def test_limits_of_both_policies_apply() -> None:
    first = AgentPolicy(("Read", "Bash"), ("rm *",), 5, None)
    second = AgentPolicy(("Bash", "Write"), ("git push*", "rm *"), 3, Decimal("0.5"))
    assert first.restrict(second) == AgentPolicy(("Bash",), ("rm *", "git push*"), 3, Decimal("0.5"))
    assert first.restrict(AgentPolicy()) == first == AgentPolicy().restrict(first)
    assert AgentPolicy.from_document(second.to_document()) == second


def test_lists_without_a_common_tool_allow_none() -> None:
    policy = AgentPolicy(("Read",)).restrict(AgentPolicy(("Write",)))
    assert all(policy.find_violation([ToolCall(name)], turns=0, cost=None) for name in ("Read", "Write"))


def test_tools_of_the_control_plane_are_those_of_the_operator_within_the_allowed_ones() -> None:
    operator = AgentPolicy(mcp_tools=("lease_status", "put_artifact"))
    assert AgentPolicy().restrict(operator).offered_mcp_tools == (
        "mcp__leasehold__lease_status",
        "mcp__leasehold__put_artifact",
    )
    narrowed = AgentPolicy(("Bash", "mcp__leasehold__put_artifact")).restrict(operator)
    assert narrowed.offered_mcp_tools == ("mcp__leasehold__put_artifact",)
    assert AgentPolicy(("Bash",)).restrict(operator).offered_mcp_tools == ()
    assert AgentPolicy.from_document(narrowed.to_document()) == narrowed


@pytest.mark.parametrize(
    ("command", "is_denied"),
    [
        ("git push origin", True),
        ("cd /x && git push", True),
        ("true; git push -f", True),
        ("false || git push", True),
        ("echo x | git push\n", True),
        ("ls\n git push", True),
        ("git pull", False),
        ("echo git push", False),
    ],
)
def test_denied_command_is_found_in_a_command_line(command: str, is_denied: bool) -> None:
    violation = AgentPolicy(denied_commands=("git push*",)).find_violation([ToolCall("Bash", command)], turns=0, cost=None)
    assert bool(violation) == is_denied


def test_totals_above_a_limit_are_violations() -> None:
    policy = AgentPolicy(max_turns=2, max_cost=Decimal("0.01"))
    assert policy.find_violation([], turns=2, cost=Decimal("0.01")) == ""
    assert policy.find_violation([], turns=3, cost=None) == "Turn limit exceeded: 3 of 2"
    assert policy.find_violation([], turns=1, cost=Decimal("0.02")) == "Cost limit exceeded: 0.02 of 0.01 USD"
