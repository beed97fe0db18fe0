"""Lifecycle settings of remote sandboxes: which one applies, its unit at the vendor, and what is refused."""

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from controlplane.checks import check_gateway, check_provider_key
from controlplane.remote_settings import VENDORS
from sandboxes.providers import load_class
from sandboxes.providers.base import Network, SandboxSpec
from sandboxes.providers.errors import Rejected
from sandboxes.providers.registry import PROVIDERS
from sandboxes.providers.remote.configuration import RemoteConfiguration
from sandboxes.providers.remote.provider import RemoteProvider
from tests.commands.manage import load_settings
from tests.support.remote import GetEmulator
from tests.unit.sandboxes.remote.conftest import MakeProvider

MINUTE = timedelta(minutes=1)


NO_NETWORK_POLICY = {"network": Network.OPEN}


def idle_after(seconds: int) -> dict[str, Any]:
    return {"lifecycle": {"after_idle": {"idle_time_seconds": seconds, "on_idle": "suspend"}}}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("daytona", {"auto_stop": 90 * MINUTE, "auto_delete": None}, {"autoStopInterval": 90, "autoDeleteInterval": -1}),
        ("daytona", {"auto_stop": None, "auto_delete": MINUTE / 2}, {"autoStopInterval": 0, "autoDeleteInterval": 1}),
        ("langsmith", {"auto_stop": 1.5 * MINUTE}, {"idle_ttl_seconds": 120, "delete_after_stop_seconds": 0}),
        ("langsmith", {"auto_stop": None, "auto_delete": MINUTE}, {"idle_ttl_seconds": 0, "delete_after_stop_seconds": 60}),
        (
            "runloop",
            {"auto_stop": 1.5 * MINUTE, **NO_NETWORK_POLICY},
            {"launch_parameters": idle_after(90)},
        ),
        # Without an idle time Runloop would end the devbox after an hour.
        ("runloop", {"auto_stop": None, **NO_NETWORK_POLICY}, {"launch_parameters": idle_after(172_800)}),
        ("modal", {"auto_stop": 1.5 * MINUTE}, {"idle_timeout_secs": 90, "timeout_secs": 86400}),
        ("modal", {"auto_stop": None, "options": {"lifetime_minutes": "120"}},
         {"idle_timeout_secs": None, "timeout_secs": 7200}),
        ("daytona", {"image": "debian:12"}, {"buildInfo": {"dockerfileContent": "FROM debian:12\n"}, "cpu": 1, "memory": 1}),
        ("langsmith", {"image": "python:3"}, {"snapshot": "python:3"}),
        ("modal", {"image": "python:3"}, {"dockerfile": "FROM python:3"}),
        ("modal", {"options": {"environment": "eu"}}, {"app_id": "ap-eu-leasehold"}),
        ("runloop", {"image": "py"}, {"blueprint_name": "py"}),
        ("daytona", {"options": {"target": "eu", "organization_id": ""}}, {"target": "eu"}),
        ("runloop", {"options": {"size": "SMALL", "account": ""}, "auto_stop": MINUTE, **NO_NETWORK_POLICY},
         {"launch_parameters": idle_after(60) | {"resource_size_request": "SMALL"}}),
    ],
)  # fmt: skip
def test_configuration_reaches_the_vendor_in_its_units(
    kind: str, changes: dict[str, Any], expected: dict[str, Any], make_provider: MakeProvider, emulators: GetEmulator
) -> None:  # fmt: skip
    provider = make_provider(kind, **changes)
    ref = provider.create(SandboxSpec(f"lhr-{uuid4().hex[:16]}", owner="lifecycle"))
    sent = emulators(kind).get_creation(ref)
    provider.destroy(ref)
    assert {name: sent.get(name) for name in expected} == expected


@pytest.mark.parametrize(("millicpus", "expected"), [(1000, 500), (4000, 2000), (50, 125)])
def test_cpu_at_modal_is_stated_in_physical_cores(
    millicpus: int, expected: int, make_provider: MakeProvider, emulators: GetEmulator
) -> None:  # fmt: skip
    provider = make_provider("modal")
    ref = provider.create(SandboxSpec(f"lhr-{uuid4().hex[:16]}", owner="lifecycle", millicpus=millicpus))
    resources = emulators("modal").get_creation(ref)["resources"]
    provider.destroy(ref)
    assert (resources["milli_cpu"], resources["milli_cpu_max"]) == (expected, expected)


def allow_hosts(*hosts: str) -> dict[str, Any]:
    return {"proxy_config": {"rules": [], "access_control": {"allow_list": [*hosts]}}}


REQUESTED = {"memory_mib": 5000, "millicpus": 1500, "disk_mib": 20_000, "sized": True}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "requested", "expected"),
    [
        ("daytona", REQUESTED | {"image": "python:3", "gpus": 2, "gpu_type": "RTX-4090"},
         {"cpu": 2, "memory": 5, "disk": 20, "gpu": 2, "gpuType": ["RTX-4090"]}),
        ("daytona", REQUESTED | {"image": "python:3", "gpus": 1}, {"gpu": 1, "gpuType": None}),
        ("langsmith", REQUESTED, {"vcpus": 2, "mem_bytes": 5000 << 20, "fs_capacity_bytes": 20_000 << 20}),
        ("modal", {"gpus": 2, "gpu_type": "A10G"},
         {"resources": {"milli_cpu": 500, "milli_cpu_max": 500, "memory_mb": 512, "memory_mb_max": 512,
                        "gpu_config": {"count": 2, "gpu_type": "A10G"}}}),
        ("runloop", REQUESTED,
         {"launch_parameters": idle_after(3600) | {"resource_size_request": "CUSTOM_SIZE", "custom_cpu_cores": 2,
                                                   "custom_gb_memory": 6, "custom_disk_size": 20}}),
        ("runloop", {"memory_mib": 10 << 10, "millicpus": 500, "sized": True},
         {"launch_parameters": idle_after(3600) | {"resource_size_request": "CUSTOM_SIZE", "custom_cpu_cores": 2,
                                                   "custom_gb_memory": 10}}),
        ("runloop", {"memory_mib": 512, "millicpus": 1000, "sized": True},
         {"launch_parameters": idle_after(3600) | {"resource_size_request": "CUSTOM_SIZE", "custom_cpu_cores": 1,
                                                   "custom_gb_memory": 2}}),
    ],
)  # fmt: skip
def test_requested_resources_reach_the_vendor_in_its_units_rounded_up(
    kind: str, requested: dict[str, Any], expected: dict[str, Any], make_provider: MakeProvider, emulators: GetEmulator
) -> None:  # fmt: skip
    provider = make_provider(kind, **NO_NETWORK_POLICY)
    ref = provider.create(SandboxSpec(f"lhr-{uuid4().hex[:16]}", owner="lifecycle", **requested))
    sent = emulators(kind).get_creation(ref)
    provider.wait_ready(ref, timeout=timedelta(seconds=30))
    provider.destroy(ref)
    assert {name: sent.get(name) for name in expected} == expected


def test_disk_of_a_snapshot_of_daytona_is_refused_before_the_create(make_provider: MakeProvider) -> None:
    provider = make_provider("daytona")
    with pytest.raises(Rejected, match="image"):
        provider.create(SandboxSpec(f"lhr-{uuid4().hex[:16]}", owner="lifecycle", disk_mib=1024))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "gateway_url", "network", "expected"),
    [
        ("daytona", "https://gateway.example.org/x", "gateway", {"domainAllowList": "gateway.example.org"}),
        ("daytona", "http://127.0.0.1:18081", "gateway", {"networkAllowList": "127.0.0.1/32"}),
        ("daytona", "", "gateway", {"networkBlockAll": True}),
        ("daytona", "https://gateway.example.org", "open", {}),
        ("modal", "https://gateway.example.org", "gateway",
         {"network_access": {"network_access_type": "ALLOWLIST", "allowed_domains": ["gateway.example.org"]}}),
        ("modal", "https://[2001:db8::1]:8443", "gateway",
         {"network_access": {"network_access_type": "ALLOWLIST", "allowed_cidrs": ["2001:db8::1/128"]}}),
        ("modal", "", "gateway", {"network_access": {"network_access_type": "BLOCKED"}}),
        ("modal", "https://gateway.example.org", "open", {"network_access": {"network_access_type": "OPEN"}}),
        ("langsmith", "https://gateway.example.org", "gateway", allow_hosts("gateway.example.org")),
        ("langsmith", "http://192.0.2.7:8443", "gateway", allow_hosts("192.0.2.7/32")),
        ("langsmith", "", "gateway", allow_hosts("none.invalid")),
        ("langsmith", "https://gateway.example.org", "open", {}),
    ],
)  # fmt: skip
def test_network_leads_to_the_gateway_alone_unless_it_is_open(
    kind: str, gateway_url: str, network: str, expected: dict[str, Any], make_provider: MakeProvider, emulators: GetEmulator,
    settings: Any,
) -> None:  # fmt: skip
    settings.GATEWAY_URL = gateway_url
    provider = make_provider(kind, network=Network(network))
    ref = provider.create(SandboxSpec(f"lhr-{uuid4().hex[:16]}", owner="lifecycle"))
    sent = emulators(kind).get_creation(ref)
    provider.destroy(ref)
    assert {name: sent[name] for name in sent if re.search("etwork|domain|proxy", name)} == expected
    assert provider.network == network


def read_configuration(home: Path, kind: str, **variables: str) -> RemoteConfiguration:
    with pytest.MonkeyPatch.context() as patch:
        found: RemoteConfiguration = load_settings(patch, home, **variables).REMOTE_PROVIDERS[kind]
    return found


VARIABLES = [
    ("daytona", {}, "auto_stop", 60 * MINUTE),
    ("daytona", {}, "auto_delete", None),
    ("daytona", {"LEASEHOLD_SANDBOX_AUTO_STOP_MINUTES": "7"}, "auto_stop", 7 * MINUTE),
    ("daytona", {"LEASEHOLD_SANDBOX_AUTO_STOP_MINUTES": "7", "DAYTONA_SANDBOX_AUTO_STOP_MINUTES": "0"}, "auto_stop", None),
    ("langsmith", {"DAYTONA_SANDBOX_AUTO_STOP_MINUTES": "9"}, "auto_stop", 60 * MINUTE),
    ("langsmith", {"LEASEHOLD_SANDBOX_AUTO_DELETE_MINUTES": "8"}, "auto_delete", 8 * MINUTE),
    ("daytona", {"DAYTONA_SANDBOX_AUTO_DELETE_MINUTES": "9"}, "auto_delete", 9 * MINUTE),
    ("langsmith", {"LANGSMITH_SANDBOX_AUTO_STOP_MINUTES": "9"}, "auto_stop", 9 * MINUTE),
    ("langsmith", {"LANGSMITH_SANDBOX_AUTO_DELETE_MINUTES": "9"}, "auto_delete", 9 * MINUTE),
    ("modal", {"LEASEHOLD_SANDBOX_AUTO_STOP_MINUTES": "7"}, "auto_stop", None),  # it would lose files
    ("modal", {"MODAL_SANDBOX_AUTO_STOP_MINUTES": "9"}, "auto_stop", 9 * MINUTE),
    ("modal", {}, "lifetime_minutes", "1440"),
    ("modal", {"MODAL_SANDBOX_LIFETIME_MINUTES": "120", "MODAL_SANDBOX_V2": "1"}, "lifetime_minutes", "120"),
    ("modal", {}, "snapshot_min_mib", ""),
    ("modal", {"MODAL_SANDBOX_SNAPSHOT_MIN_MIB": "64"}, "snapshot_min_mib", "64"),
    ("runloop", {"RUNLOOP_SANDBOX_AUTO_STOP_MINUTES": "9"}, "auto_stop", 9 * MINUTE),
    ("cloudflare", {"CLOUDFLARE_SANDBOX_API_KEY": "k"}, "api_key", "k"),
    ("cloudflare", {"CLOUDFLARE_SANDBOX_URL": "http://127.0.0.1:1/"}, "api_url", "http://127.0.0.1:1"),
    ("daytona", {"DAYTONA_API_KEY": "k"}, "api_key", "k"),
    ("langsmith", {"LANGSMITH_API_KEY": "k"}, "api_key", "k"),
    ("modal", {"MODAL_TOKEN_SECRET": "k"}, "api_key", "k"),
    ("modal", {"MODAL_TOKEN_ID": "t"}, "token_id", "t"),
    ("runloop", {"RUNLOOP_API_KEY": "k"}, "api_key", "k"),
    ("daytona", {"DAYTONA_API_URL": "http://127.0.0.1:1/api/"}, "api_url", "http://127.0.0.1:1/api"),
    ("langsmith", {"LANGSMITH_ENDPOINT": "http://127.0.0.1:1"}, "api_url", "http://127.0.0.1:1"),
    ("modal", {"MODAL_SERVER_URL": "http://127.0.0.1:1"}, "api_url", "http://127.0.0.1:1"),
    ("runloop", {"RUNLOOP_BASE_URL": "http://127.0.0.1:1"}, "api_url", "http://127.0.0.1:1"),
    ("daytona", {"DAYTONA_SANDBOX_IMAGE": "i"}, "image", "i"),
    ("langsmith", {"LANGSMITH_SANDBOX_IMAGE": "i"}, "image", "i"),
    ("modal", {"MODAL_SANDBOX_IMAGE": "i"}, "image", "i"),
    ("modal", {"MODAL_ENVIRONMENT": "e"}, "environment", "e"),
    ("runloop", {"RUNLOOP_SANDBOX_IMAGE": "i"}, "image", "i"),
    ("daytona", {"DAYTONA_TARGET": "eu"}, "target", "eu"),
    ("daytona", {"DAYTONA_ORGANIZATION_ID": "o"}, "organization_id", "o"),
    ("daytona", {}, "network", "gateway"),
    ("daytona", {"DAYTONA_SANDBOX_NETWORK": "open"}, "network", "open"),
    ("modal", {"MODAL_SANDBOX_NETWORK": "open"}, "network", "open"),
    ("langsmith", {}, "network", "gateway"),
    ("langsmith", {"LANGSMITH_SANDBOX_NETWORK": "open"}, "network", "open"),
    ("runloop", {}, "network", "gateway"),
    ("runloop", {"RUNLOOP_SANDBOX_NETWORK": "open"}, "network", "open"),
    ("cloudflare", {}, "network", "open"),
    ("langsmith", {"LANGSMITH_WORKSPACE_ID": "w"}, "workspace", "w"),
    ("runloop", {"RUNLOOP_SANDBOX_SIZE": "LARGE"}, "size", "LARGE"),
    ("runloop", {"RUNLOOP_ACCOUNT": "a"}, "account", "a"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("kind", "variables", "field", "expected"), VARIABLES)
def test_variable_of_a_vendor_is_read_and_takes_precedence(
    kind: str, variables: dict[str, str], field: str, expected: object, tmp_path: Path
) -> None:
    found = read_configuration(tmp_path, kind, **variables)
    assert (found.options[field] if field in found.options else getattr(found, field)) == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DAYTONA_SANDBOX_AUTO_STOP_MINUTES", "an hour", "DAYTONA_SANDBOX_AUTO_STOP_MINUTES='an hour' is not accepted."),
        ("LEASEHOLD_SANDBOX_AUTO_DELETE_MINUTES", "-1", "LEASEHOLD_SANDBOX_AUTO_DELETE_MINUTES='-1' is not accepted."),
        ("DAYTONA_SANDBOX_AUTOSTOP", "1", "DAYTONA_SANDBOX_AUTOSTOP is not a variable of Leasehold."),
        ("DAYTONA_AUTO_STOP_MINUTES", "1", "Known are DAYTONA_SANDBOX_AUTO_DELETE_MINUTES, DAYTONA_SANDBOX_AUTO_STOP_MINUTES,"),
        ("LANGSMITH_SANDBOX_AUTO_PAUSE_MINUTES", "1", "LANGSMITH_SANDBOX_AUTO_PAUSE_MINUTES is not a variable of Leasehold."),
        ("CLOUDFLARE_SANDBOX_AUTO_STOP_MINUTES", "1", "CLOUDFLARE_SANDBOX_AUTO_STOP_MINUTES is not a variable of Leasehold."),
        # Runloop cannot delete a suspended devbox after a time.
        ("RUNLOOP_SANDBOX_AUTO_DELETE_MINUTES", "5", "RUNLOOP_SANDBOX_AUTO_DELETE_MINUTES is not a variable of Leasehold."),
        ("MODAL_SANDBOX_LIFETIME_MINUTES", "1441", "MODAL_SANDBOX_LIFETIME_MINUTES='1441' is not accepted."),
        ("MODAL_SANDBOX_SNAPSHOT_MIN_MIB", "0", "MODAL_SANDBOX_SNAPSHOT_MIN_MIB='0' is not accepted."),
        ("RUNLOOP_SANDBOX_SIZE", "HUGE", "RUNLOOP_SANDBOX_SIZE='HUGE' is not accepted."),
    ],
)
def test_invalid_or_unknown_variable_prevents_the_start(name: str, value: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ImproperlyConfigured, match=re.escape(message)):
        read_configuration(tmp_path, "daytona", **{name: value})


def test_variable_that_a_client_of_a_vendor_reads_is_left_alone(tmp_path: Path) -> None:
    variables = {"LANGSMITH_TRACING": "true", "CLOUDFLARE_ACCOUNT_ID": "a", "DAYTONA_JWT_TOKEN": "t"}
    assert read_configuration(tmp_path, "daytona", **variables).auto_stop == 60 * MINUTE


def test_every_vendor_with_a_remote_provider_has_its_prefix_checked() -> None:
    assert {*settings.REMOTE_PROVIDERS} == {*VENDORS}
    remote = {name for name in PROVIDERS if issubclass(load_class(name), RemoteProvider)}
    assert remote == {*VENDORS}
    for name, vendor in VENDORS.items():  # the settings cannot ask the class, which needs the vendor's packages
        provider = load_class(name)
        assert (vendor.has_auto_stop, vendor.has_auto_delete) == (provider.has_auto_stop, provider.has_auto_delete)


NAMES = [("daytona", "organization_id"), ("langsmith", "workspace"), ("modal", "environment"), ("runloop", "account")]


@pytest.mark.smoke
@pytest.mark.parametrize(("kind", "option"), NAMES)
def test_accounts_behind_one_address_are_told_apart_if_they_are_named(
    kind: str, option: str, make_provider: MakeProvider
) -> None:
    plain = make_provider(kind)
    named = make_provider(kind, options={**settings.REMOTE_PROVIDERS[kind].options, option: "x-1"})
    assert named.engine_id() == f"{plain.engine_id()} x-1"


def test_missing_key_is_found_at_the_start(settings: Any) -> None:
    settings.SANDBOX_PROVIDER = "runloop"
    [found] = check_provider_key(None)
    message = "The runloop provider needs RUNLOOP_API_KEY, which is not set."
    assert (found.msg, found.hint, found.id) == (message, "Set RUNLOOP_API_KEY.", "leasehold.E008")
    settings.SANDBOX_PROVIDER = "modal"
    configuration = replace(settings.REMOTE_PROVIDERS["modal"], api_key="k")
    settings.REMOTE_PROVIDERS = {**settings.REMOTE_PROVIDERS, "modal": configuration}
    assert [found.hint for found in check_provider_key(None)] == ["Set MODAL_TOKEN_ID."]
    settings.SANDBOX_PROVIDER = "docker"
    assert check_provider_key(None) == []


def test_missing_gateway_is_a_warning_at_the_start(settings: Any) -> None:
    settings.SANDBOX_PROVIDER = "runloop"
    [found] = check_gateway(None)
    assert found.id == "leasehold.W002" and "sandboxes of runloop have no models" in found.msg
    settings.GATEWAY_URL = "https://gateway.example.org"
    assert check_gateway(None) == []
