"""Selection of the cases of providers that share an implementation: all of one provider, and the smoke cases of the others."""

from collections.abc import Mapping

import pytest

from tests.emulators.registry import EMULATORS

# Vendor whose cases all run in the fast lanes, where they are the cases of RemoteProvider and of the runner in the sandbox.
# Daytona has all capabilities of the port but directory snapshots, and the emulator whose cases use the least processor time.
REFERENCE_VENDOR = "daytona"
OTHER_VENDORS = tuple(name for name in EMULATORS if name != REFERENCE_VENDOR)
MATRIX_REASONS: Mapping[str, str] = {
    name: f"{name} has the commands and file operations of {REFERENCE_VENDOR}: RemoteProvider and the runner"
    for name in OTHER_VENDORS
}


def find_kind(item: pytest.Item, kinds: Mapping[str, object]) -> str | None:
    """Return the kind of provider that is a parameter of a case."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return next((value for value in parameters if isinstance(value, str) and value in kinds), None)


def mark_matrix(item: pytest.Item, reasons: Mapping[str, str], *, has_smoke_cases: bool = True) -> None:
    """Mark a case of one of these kinds of provider with `matrix` and the reason of the kind.

    Smoke cases have no such mark if the kinds have some, and a mark of the test takes precedence."""
    kind = find_kind(item, reasons)
    is_smoke_case = has_smoke_cases and item.get_closest_marker("smoke")
    if kind and not is_smoke_case and not item.get_closest_marker("matrix"):
        item.add_marker(pytest.mark.matrix(reasons[kind]))
