"""Relay connections of real sandboxes: identity, events, reconnects, refusals and end of lease."""

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
from tests.egress.stack import EgressStack, LeasedSandbox
from tests.support import tokens
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.django_db(transaction=True)]
Enter = Callable[..., LeasedSandbox]
WITHIN = timedelta(seconds=30)
WATCHER = ["python3", "/opt/leasehold/relay_watcher.py"]


def start(leased: LeasedSandbox, *argv: str, **env: str) -> Process:
    launch = ProcessSpec([*WATCHER, *argv], env, name="relay")
    with execution.use_lease(leased.lease.pk, now=NOW) as request:
        return processes.start_process(request, launch, now=NOW)


def wait_for_output(process: Process, text: str, *, start: int = 0) -> bool:
    return processes.wait_for_log(process, text, start=start, within=WITHIN, now=NOW)


def printed(process: Process) -> bytes:
    return processes.read_log(process, start=0, length=1 << 16, now=NOW)[0]


def test_watcher_connects_as_its_agent_and_prints_events(enter: Enter, relayed: RelaySwitch, egress: EgressStack) -> None:
    key = signing.create_key("did:plc:ada", now=NOW)
    leased = enter("did:plc:ada")
    process = start(leased)
    assert wait_for_output(process, "Connected to relay\n")

    [(path, headers)] = relayed.relay.connections
    assert (path, headers["x-leasehold-agent"]) == (f"/xrpc/{LXM}", "did:plc:ada")
    kind, _, token = headers["authorization"].partition(" ")
    claims = tokens.verify_token(token, key.did_key)
    minted = MintedToken.objects.get()
    issued = int(NOW.timestamp())
    expected = {"iss": "did:plc:ada", "aud": AUD, "lxm": LXM, "iat": issued, "exp": issued + 60, "jti": minted.jti.hex}
    assert (kind, claims) == ("Bearer", expected)
    assert (minted.holder, minted.agent_did, minted.actor) == (leased.lease.pk, "did:plc:ada", "relay")
    with pytest.raises(tokens.TokenRejected):
        tokens.verify_token(token, signing.create_key("did:plc:eve", now=NOW).did_key)

    relayed.send("first\nevent", b"\x00\xff", "é" * 4_000, "last")
    assert wait_for_output(process, "\nlast\n")
    lines = printed(process).decode().splitlines()
    assert lines == ["Connected to relay", "first event", base64.b64encode(b"\x00\xff").decode(), "é" * 4_000, "last"]
    content, after = processes.read_log(process, start=len("Connected to relay\n"), length=5, now=NOW)
    assert (content, after) == (b"first", 24)
    assert [*processes.find_by_holder(leased.lease.pk)] == [process] and process.state == "running"
    assert token not in printed(process).decode()

    assert processes.kill_process(process, now=NOW).state == "killed"
    wait_until(lambda: not relayed.is_open(), "the relay sees the disconnect")
    [row] = egress.settled(1)
    assert (row.kind, row.outcome, row.agent_did, row.holder) == ("relay", "cut", "did:plc:ada", leased.lease.pk)
    assert row.received_bytes == len("first\nevent") + 2 + 4_000 + len("last") and relayed.relay.received == []


def test_watcher_is_disconnected_when_its_lease_ends(relayed: RelaySwitch, leased: LeasedSandbox, egress: EgressStack) -> None:
    process = start(leased)
    assert wait_for_output(process, "Connected to relay") and relayed.is_open()
    leasing.release(leased.lease.pk, now=NOW)
    wait_until(lambda: not relayed.is_open(), "its connection is cut")  # while its sandbox still runs
    process.refresh_from_db()
    assert process.state == "gone"
    first, *more = egress.settled(LlmCall.objects.count())
    assert (first.outcome, first.code) == ("cut", "lease_ended")
    sweeps.reclaim(now=NOW)
    assert Sandbox.objects.get(holder=leased.lease.pk).state == "destroyed"
    assert len(relayed.relay.connections) == 1 and not [row for row in more if row.outcome != "refused"]


def test_watcher_ends_if_its_policy_does_not_allow_the_relay(enter: Enter, relayed: RelaySwitch, egress: EgressStack) -> None:
    EnvironmentType.objects.filter(name="coding").update(policy=None)
    signing.create_key("did:plc:ada", now=NOW)
    leased = enter("did:plc:ada")
    process = start(leased)
    assert wait_for_output(process, "The policy of this sandbox does not allow the relay.")

    def exited() -> bool:
        processes.refresh_by_holder(leased.lease.pk, now=NOW)
        process.refresh_from_db()
        return process.ended_at is not None

    wait_until(exited, "it has ended")
    assert (process.state, process.exit_code) == ("exited", 1)
    assert b"Connected" not in printed(process) and relayed.relay.connections == []
    [row] = egress.settled(1)
    assert (row.outcome, row.code, row.agent_did) == ("refused", "relay_not_allowed", "did:plc:ada")
    assert not MintedToken.objects.exists()


@pytest.mark.matrix("10 s of an outage; test_relay_watcher.py has the program")
def test_watcher_of_an_agent_without_a_key_reconnects_after_an_outage_and_follows_no_redirect(
    relayed: RelaySwitch, leased: LeasedSandbox, egress: EgressStack
) -> None:
    unreachable = "Not connected to relay: 502: The relay is unreachable."
    relayed.relay.redirect = f"{egress.upstream.url}/elsewhere"
    process = start(leased)
    assert wait_for_output(process, unreachable)
    relayed.relay.redirect = ""
    assert wait_for_output(process, "Connected to relay\n")
    assert egress.upstream.requests == []
    attempts = len(relayed.relay.connections)
    assert attempts >= 2  # with the redirect possibly several
    before = len(printed(process))
    relayed.off()
    assert wait_for_output(process, "Not connected to relay: closed by the relay", start=before)
    assert wait_for_output(process, unreachable, start=before)
    relayed.on()
    assert wait_for_output(process, "\nConnected to relay\n", start=before)
    relayed.send("news")
    assert wait_for_output(process, "news\n", start=before)
    assert len(relayed.relay.connections) == attempts + 1 and process.state == "running"
    assert {headers["x-leasehold-agent"] for _, headers in relayed.relay.connections} == {"did:plc:ada"}
    assert not any("authorization" in headers for _, headers in relayed.relay.connections) and not MintedToken.objects.exists()


def test_watcher_with_an_unusable_address_ends_with_the_reason(relayed: RelaySwitch, leased: LeasedSandbox) -> None:
    for url, why in {
        "https://127.0.0.1:4010/relay": "not a ws:// address",
        "ws://127.0.0.1:4010/elsewhere": "not available to this sandbox (403)",
    }.items():
        done = leased.run("env", f"RELAY_URL={url}", *WATCHER)
        assert (done.exit_code, done.stdout) == (1, b"") and why in done.stderr.decode(), url
