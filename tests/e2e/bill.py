"""The bill of a game whose leases are destroyed."""

from decimal import Decimal

from controlplane.games.client import Client
from tests.commands.manage import run_manage
from tests.e2e.test_kill import Fleet
from tests.support.waiting import wait_until

ROUNDING = Decimal("0.000000001")  # the quantity of each lease is rounded, and that of the environment is


def read_costs(host: Client, environment: str, by: str) -> dict[str, dict[str, str]]:
    """Return the billed quantities of each lease or agent of an environment, or of the environment itself."""
    report = host.call("GET", f"/costs?by={by}&environment={environment}")
    return {total["key"]: total["quantities"] for total in report["results"]}


def check_bill(fleet: Fleet, host: Client, environment: str, *, calls: int) -> None:
    """Check that each model call is billed once, that the leases add up to the environment, and that none is billed for longer
    than its sandboxes were alive."""

    def count_billed_calls() -> int:
        return sum(int(quantities.get("llm", 0)) for quantities in read_costs(host, environment, "lease").values())

    assert run_manage(fleet.path, "meter", **fleet.env).returncode == 0
    wait_until(lambda: count_billed_calls() == calls, f"{calls} model calls are billed", within=90.0, every=2.0)
    by_lease = read_costs(host, environment, "lease")
    [(billed, total)] = read_costs(host, environment, "environment").items()
    assert billed == environment
    for item in ("time", "llm"):
        difference = sum(Decimal(quantities[item]) for quantities in by_lease.values()) - Decimal(total[item])
        assert abs(difference) <= len(by_lease) * ROUNDING, (item, by_lease, total)
    for lease, quantities in by_lease.items():
        assert 0 < float(quantities["time"]) * 3600 <= host.call("GET", f"/leases/{lease}")["seconds_alive"]
