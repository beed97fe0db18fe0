"""The relay watcher of real sandboxes and a real relay: in whose name it connects, what it hears, and how long it lives."""

import base64
from collections.abc import Callable
from datetime import timedelta

import pytest

from leases import execution, leasing, sweeps
from leases.models import EnvironmentType
from sandboxes import processes
from sandboxes.identity import signing
from sandboxes.models import LlmCall, MintedToken, Process, Sandbox
from sandboxes.processes import ProcessSpec
from tests.conftest import NOW
from tests.egress.relay import AUD, LXM, RelaySwitch
from tests.egress.whole import EgressStack, LeasedSandbox
from tests.support import tokens
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
Enter = Callable[..., LeasedSandbox]
WITHIN = timedelta(seconds=30)
WATCHER = ["python3", "/opt/leasehold/relay_watcher.py"]


def start(inside: LeasedSandbox, *argv: str, **env: str) -> Process:
    launch = ProcessSpec([*WATCHER, *argv], env, name="relay")
    with execution.use_lease(inside.lease.pk, now=NOW) as request:
        return processes.start_process(request, launch, now=NOW)


def says(process: Process, text: str, *, start: int = 0) -> bool:
    return processes.wait_for_log(process, text, start=start, within=WITHIN, now=NOW)


def printed(process: Process) -> bytes:
    return processes.read_log(process, start=0, length=1 << 16)[0]


def test_a_watcher_connects_in_its_agents_name_and_prints_what_it_hears(
    enter: Enter, relayed: RelaySwitch, egress: EgressStack
) -> None:
    key = signing.create_key("did:plc:ada", now=NOW)
    inside = enter("did:plc:ada")
    process = start(inside)
    assert says(process, "Connected to relay\n")

    [(path, headers)] = relayed.relay.asked
    assert (path, headers["x-leasehold-agent"]) == (f"/xrpc/{LXM}", "did:plc:ada")
    kind, _, token = headers["authorization"].partition(" ")
    claims = tokens.verify_token(token, key.did_key)
    minted = MintedToken.objects.get()
    issued = int(NOW.timestamp())
    assert (kind, claims) == (
        "Bearer",
        {"iss": "did:plc:ada", "aud": AUD, "lxm": LXM, "iat": issued, "exp": issued + 60, "jti": minted.jti.hex},
    )
    assert (minted.holder, minted.agent_did, minted.actor) == (inside.lease.pk, "did:plc:ada", "relay")
    with pytest.raises(tokens.TokenRejected):
        tokens.verify_token(token, signing.create_key("did:plc:eve", now=NOW).did_key)

    relayed.tell("first\nevent", b"\x00\xff", "é" * 4_000, "last")
    assert says(process, "\nlast\n")
    lines = printed(process).decode().splitlines()
    assert lines == ["Connected to relay", "first event", base64.b64encode(b"\x00\xff").decode(), "é" * 4_000, "last"]
    content, after = processes.read_log(process, start=len("Connected to relay\n"), length=5)
    assert (content, after) == (b"first", 24)
    assert [*processes.find_by_holder(inside.lease.pk)] == [process] and process.state == "running"
    assert token not in printed(process).decode()

    assert processes.kill_process(process, now=NOW).state == "killed"
    wait_until(lambda: not relayed.is_open(), "the relay sees that it is gone")
    [row] = egress.settled(1)
    assert (row.kind, row.outcome, row.agent_did, row.holder) == ("relay", "cut", "did:plc:ada", inside.lease.pk)
    assert row.received_bytes == len("first\nevent") + 2 + 4_000 + len("last") and relayed.relay.heard == []


def test_a_watcher_of_an_agent_without_a_key_connects_as_nobody_in_particular(
    relayed: RelaySwitch, inside: LeasedSandbox
) -> None:
    assert says(start(inside), "Connected to relay")
    [(_, headers)] = relayed.relay.asked
    assert "authorization" not in headers and headers["x-leasehold-agent"] == "did:plc:ada"
    assert not MintedToken.objects.exists()


def test_a_watcher_ends_with_its_lease_and_the_relay_sees_that_at_once(
    relayed: RelaySwitch, inside: LeasedSandbox, egress: EgressStack
) -> None:
    process = start(inside)
    assert says(process, "Connected to relay") and relayed.is_open()
    leasing.release(inside.lease.pk, now=NOW)
    wait_until(lambda: not relayed.is_open(), "its connection is cut")  # although its sandbox still runs
    process.refresh_from_db()
    assert process.state == "gone"
    first, *more = egress.settled(LlmCall.objects.count())
    assert (first.outcome, first.code) == ("cut", "lease_ended")
    sweeps.reclaim(now=NOW)
    assert Sandbox.objects.get(holder=inside.lease.pk).state == "destroyed"
    assert len(relayed.relay.asked) == 1 and not [row for row in more if row.outcome != "refused"]


def test_a_watcher_whose_policy_does_not_let_it_is_told_so_and_ends(
    enter: Enter, relayed: RelaySwitch, egress: EgressStack
) -> None:
    EnvironmentType.objects.filter(name="coding").update(policy=None)
    signing.create_key("did:plc:ada", now=NOW)
    inside = enter("did:plc:ada")
    process = start(inside)
    assert says(process, "The policy of this sandbox does not allow the relay.")

    def exited() -> bool:
        processes.refresh_by_holder(inside.lease.pk, now=NOW)
        process.refresh_from_db()
        return process.ended_at is not None

    wait_until(exited, "it has ended")
    assert (process.state, process.exit_code) == ("exited", 1)
    assert b"Connected" not in printed(process) and relayed.relay.asked == []
    [row] = egress.settled(1)
    assert (row.outcome, row.code, row.agent_did) == ("refused", "relay_not_allowed", "did:plc:ada")
    assert not MintedToken.objects.exists()


def test_a_watcher_connects_again_when_the_relay_was_away(relayed: RelaySwitch, inside: LeasedSandbox) -> None:
    relayed.off()
    process = start(inside)
    assert says(process, "Not connected to relay: 502: The relay is unreachable.")
    relayed.on()
    assert says(process, "Connected to relay\n")
    before = len(printed(process))
    relayed.off()
    assert says(process, "Not connected to relay: closed by the relay", start=before)
    relayed.on()
    assert says(process, "\nConnected to relay\n", start=before)
    relayed.tell("news")
    assert says(process, "news\n", start=before)
    assert len(relayed.relay.asked) == 2 and process.state == "running"


def test_a_relay_that_sends_it_elsewhere_is_not_followed(
    relayed: RelaySwitch, inside: LeasedSandbox, egress: EgressStack
) -> None:
    relayed.relay.redirect = f"{egress.upstream.url}/elsewhere"
    process = start(inside)
    assert says(process, "Not connected to relay: 502: The relay is unreachable.")
    relayed.relay.redirect = ""
    assert says(process, "Connected to relay\n")
    assert egress.upstream.asked == [] and len(relayed.relay.asked) == 2


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://127.0.0.1:4010/relay", "not a ws:// address"),
        ("ws://127.0.0.1:4010/elsewhere", "not available to this sandbox (403)"),
    ],
)
def test_a_watcher_that_cannot_connect_anywhere_says_why_and_ends(
    url: str, why: str, relayed: RelaySwitch, inside: LeasedSandbox
) -> None:
    done = inside.run("env", f"RELAY_URL={url}", *WATCHER)
    assert (done.exit_code, done.stdout) == (1, b"") and why in done.stderr.decode()
