"""Selection of the crash and race suites on vendors. `make remote-suites` runs all of them.

The tests are those of tests/races, with the provider of a vendor, on its emulator, in place of the memory provider."""

import pytest

from tests.races import test_crashes, test_races
from tests.support.suites.fixtures import emulators, memory, pool, vendors  # noqa: F401 - fixtures

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.matrix("tests/races has these cases on the memory provider"),
]
on_daytona = pytest.mark.parametrize("vendor", ["daytona"])
on_runloop = pytest.mark.parametrize("vendor", ["runloop"])


@on_daytona
class TestDaytona:
    test_crash_of_an_exec = staticmethod(test_crashes.test_crash_at_any_step_of_an_exec_converges_and_the_lease_goes_on)
    test_crash_of_an_eviction = staticmethod(test_crashes.test_crash_at_any_step_of_an_eviction_converges_and_loses_no_file)
    test_crash_of_a_destroy = staticmethod(test_crashes.test_crash_at_any_step_of_a_destroy_converges_and_stores_the_state_once)
    test_release_during_a_start = staticmethod(test_races.test_release_during_a_start_ends_the_lease)


@on_runloop
class TestRunloop:
    test_crash_of_a_wake = staticmethod(test_crashes.test_crash_at_any_step_of_a_wake_converges_and_loses_no_file)
    test_concurrent_starts = staticmethod(test_races.test_eight_concurrent_first_execs_start_one_sandbox)
