"""Registry of the providers: imported when used, with the command that installs what is missing."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from controlplane.checks import check_provider_packages
from sandboxes import providers
from sandboxes.providers.registry import PROVIDERS, ProviderEntry


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProviderEntry:
    """Provider whose module imports a package that is not installed."""
    (tmp_path / "vendor_provider.py").write_text("import no_such_sdk\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = ProviderEntry("vendor_provider", "VendorProvider", extra="vendor")
    monkeypatch.setitem(PROVIDERS, "vendor", entry)  # type: ignore[arg-type]
    return entry


def test_missing_package_is_named_with_the_command_that_installs_it(vendor: ProviderEntry, settings: Any) -> None:
    message = "The vendor provider needs the package no_such_sdk, which is not installed: pip install 'leasehold[vendor]'"
    with pytest.raises(ImproperlyConfigured) as error:
        providers.get_provider("vendor")
    assert str(error.value) == message
    settings.SANDBOX_PROVIDER = "vendor"
    [found] = check_provider_packages(None)
    assert (found.msg, found.hint, found.id) == (message, "pip install 'leasehold[vendor]'", "leasehold.E007")


def test_error_in_a_module_of_a_provider_is_not_taken_for_a_missing_package(tmp_path: Path, vendor: ProviderEntry) -> None:
    (tmp_path / "vendor_provider.py").write_text("import sandboxes.no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match=r"sandboxes\.no_such_module"):
        providers.load_class("vendor")


def test_every_provider_has_the_name_of_its_entry_and_those_for_production_isolate() -> None:
    for name, entry in PROVIDERS.items():
        found = providers.load_class(name)
        assert found.name == name and (found.isolated or not entry.for_production)


def test_settings_and_registry_import_no_provider() -> None:
    code = (
        "import os, sys; os.environ |= {'SECRET_KEY': 'x', 'DEBUG': '1', 'SANDBOX_PROVIDER': 'docker'}; "
        "import controlplane.settings, sandboxes.providers; "
        "print([name for name in sys.modules if name == 'docker' or name.startswith('sandboxes.providers.docker')])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "[]\n"
