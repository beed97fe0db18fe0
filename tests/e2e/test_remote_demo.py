"""The demo with agents in remote sandboxes, on the emulator of each vendor: turns, model calls by the gateway, and usage."""

import pytest

from tests.commands.manage import run_manage
from tests.e2e.conftest import Home
from tests.emulators.registry import EMULATORS, build_environment
from tests.support.remote import GetEmulator, emulators  # noqa: F401 - fixture
from tests.support.servers import ports

pytestmark = [pytest.mark.e2e, pytest.mark.matrix("the demo at each vendor")]
TURNS = "SELECT count(*) FROM sandboxes_run WHERE kind = 'turn'"
TURNS_WITH_CALL = """SELECT count(*) FROM sandboxes_run run WHERE kind = 'turn' AND EXISTS (
    SELECT 1 FROM sandboxes_llmcall call WHERE call.run_id = run.id AND call.outcome = 'ok' AND call.holder = run.holder)"""
USAGE = "SELECT count(DISTINCT agent_did) FROM billing_usagerecord WHERE provider = '{vendor}'"


@pytest.mark.parametrize("vendor", sorted(EMULATORS))
def test_game_is_played_in_sandboxes_of_a_vendor(home: Home, vendor: str, emulators: GetEmulator) -> None:  # noqa: F811
    emulator, [gateway_port] = emulators(vendor), ports.find_free_ports()
    environment = build_environment(vendor, emulator) | {
        "SANDBOX_PROVIDER": vendor,
        "LEASEHOLD_GATEWAY_LISTEN": f"127.0.0.1:{gateway_port}",
        "LEASEHOLD_GATEWAY_URL": f"http://127.0.0.1:{gateway_port}",
    }
    demo = ("demo", "--port", str(home.port), "--agents", "2", "--points", "3", "--seed", "7", "--exit")
    process = run_manage(home.path, *demo, **environment)
    assert process.returncode == 0, process.stdout + process.stderr
    assert " wins." in process.stdout and "skipped:" not in process.stdout, process.stdout
    assert home.query_value(TURNS) == home.query_value(TURNS_WITH_CALL) > 5
    assert home.query_value(USAGE.format(vendor=vendor)) == 2
    assert [machine for machine in emulator.list_machines() if machine.is_running] == []
