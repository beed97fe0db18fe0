"""Checks of the rows and of the engine after the load: leaks, stuck rows, counters, leases, billed time."""

import time
from contextlib import closing, suppress
from decimal import Decimal

from docker import APIClient

from tests.load.system import System
from tests.support.servers.receiver import WebhookReceiver
from tests.support.waiting import wait_until

QUIET_SECONDS = 600.0
DELIVERY_SECONDS = 60.0
BILLED_STATES = ("warm", "running", "waiting")
SETTLED_REASONS = ("released", "budget")  # end reasons that the agents cause
# A join that was answered with an error ends its lease as `failed`, before any command. Other ends need one of SETTLED_REASONS.
ENDED_WITHOUT_CAUSE = f"""
    SELECT id, agent_did, environment_id, leased_at, last_activity_at, end_reason, end_detail FROM leases_lease
    WHERE end_reason NOT IN {SETTLED_REASONS} AND NOT (end_reason = 'failed' AND NOT EXISTS (
        SELECT FROM sandboxes_run r JOIN sandboxes_sandbox s ON s.id = r.sandbox_id
        WHERE s.holder = leases_lease.id AND r.outcome = 'ok'))"""
UNSETTLED = {
    "sandboxes not destroyed": "SELECT id, state, tries, last_error FROM sandboxes_sandbox WHERE state <> 'destroyed'",
    "leases not destroyed": "SELECT id, status, end_reason FROM leases_lease WHERE status <> 'destroyed'",
    "runs open": "SELECT id, kind, deadline_at FROM sandboxes_run WHERE ended_at IS NULL",
    "model calls open": "SELECT call_id, deadline_at FROM sandboxes_llmcall WHERE ended_at IS NULL",
    "processes open": "SELECT id, state FROM sandboxes_process WHERE state = 'running'",
    "usage not metered": "SELECT id FROM sandboxes_run WHERE NOT metered",
}
COUNTERS = {
    "pool counters": """SELECT p.name, p.used, count(s.id) FROM sandboxes_pool p LEFT JOIN sandboxes_sandbox s
        ON s.pool_id = p.id AND s.state <> 'destroyed' GROUP BY p.id HAVING p.used <> count(s.id)""",
    "quota counters": """SELECT q.agent_did, q.used, count(s.id) FROM sandboxes_quota q LEFT JOIN sandboxes_sandbox s
        ON s.pool_id = q.pool_id AND s.agent_did = q.agent_did AND s.state <> 'destroyed'
        GROUP BY q.id HAVING q.used <> count(s.id)""",
    "sandboxes in quarantine": "SELECT id, last_error FROM sandboxes_sandbox WHERE quarantined_at IS NOT NULL",
}


def wait_until_quiet(system: System) -> tuple[float, list[str]]:
    """Run the sweeps until nothing is left to do, for at most QUIET_SECONDS. Return the seconds it took, and the last failures.

    A sweep may fail while the engine recovers from a kill."""
    started_at, failures = time.monotonic(), list[str]()
    while time.monotonic() < started_at + QUIET_SECONDS:
        failures = system.sweep()
        if not failures and not any(system.select(query) for query in UNSETTLED.values()) and not list_remnants(system):
            break
        time.sleep(2)
    return time.monotonic() - started_at, failures


def list_remnants(system: System) -> list[str]:
    """Return the containers and volumes of sandboxes at the engine. When all sandboxes are destroyed, each is a leak."""
    with closing(APIClient(system.engine.url, version="auto")) as client:
        containers = client.containers(all=True, filters={"label": "leasehold.name"})
        volumes = client.volumes(filters={"label": "leasehold.name"})["Volumes"] or []
    return [*(container["Names"][0] for container in containers), *(volume["Name"] for volume in volumes)]


def find_faults(system: System) -> dict[str, list[str]]:
    """Return the faults of each check. An empty list is a success."""
    faults = {name: [str(row) for row in system.select(query)] for name, query in (UNSETTLED | COUNTERS).items()}
    faults["containers and volumes leaked"] = list_remnants(system)
    faults["leases ended without a cause"] = [str(row) for row in system.select(ENDED_WITHOUT_CAUSE)]
    faults["bill derived again differs"] = compare_bills(system)
    return faults


def compare_bills(system: System) -> list[str]:
    """Derive usage and costs again from the facts, and return what differs."""
    before = read_bill(system)
    system.manage("meter", "--again")
    after = read_bill(system)
    return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in before | after if before.get(key) != after.get(key)]


def read_bill(system: System) -> dict[str, Decimal]:
    """Return the costs in USD by day and item."""
    rows = system.select("SELECT day || ' ' || item, sum(usd) FROM billing_costrecord WHERE item <> 'storage' GROUP BY 1")
    return dict(rows)


def read_billed_seconds(system: System) -> float:
    """Return the seconds of sandbox time in usage records."""
    total = "coalesce(extract(epoch FROM sum(ended_at - began_at)), 0)"
    [(seconds,)] = system.select(f"SELECT {total} FROM billing_usagerecord WHERE item = 'time' AND state IN {BILLED_STATES}")
    return float(seconds)


def find_delivery_faults(system: System, silent: WebhookReceiver, healthy: WebhookReceiver) -> dict[str, list[str]]:
    """Return the events that the healthy receiver has not got beside the silent one. Late ones are waited for."""

    def list_lacking() -> list[str]:
        got = {request.headers["webhook-id"] for request in healthy.received}
        sent = {str(event_id) for (event_id,) in system.select("SELECT id FROM sandboxes_event")}
        return sorted(sent - got)

    with suppress(AssertionError):
        wait_until(lambda: not list_lacking(), "all events are delivered", within=DELIVERY_SECONDS, every=1.0)
    return {"events not delivered": list_lacking(), "silent receiver not tried": [] if silent.received else ["never"]}
