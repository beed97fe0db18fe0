"""manage.py config, validation of variables, and system checks."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from django.conf import settings
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from controlplane import env
from manage import is_help_request
from sandboxes.hosts.capacity import derive_capacity
from sandboxes.providers import get_provider
from tests.commands.manage import call, load_settings, run_manage


def test_config_shows_every_variable_its_value_and_its_source(tmp_path: Path) -> None:
    process = run_manage(tmp_path, "config", LEASEHOLD_WEB_THREADS="7", LEASEHOLD_WEB_THREAD="7")
    assert process.returncode == 0
    for name in env.ENV_VARIABLES:
        assert f"\n{name} " in process.stdout
    line = next(line for line in process.stdout.splitlines() if line.startswith("LEASEHOLD_WEB_THREADS"))
    assert line.split() == ["LEASEHOLD_WEB_THREADS", "7", "environment", "16"]
    assert process.stderr == (
        "warning: LEASEHOLD_WEB_THREAD is not a variable of Leasehold; did you mean LEASEHOLD_WEB_THREADS?\n"
    )


@pytest.mark.parametrize("most", ["", "77"])
def test_config_shows_the_derived_capacity(tmp_path: Path, monkeypatch, settings, most: str) -> None:
    settings.SANDBOX_PROVIDER, settings.SANDBOX_MEMORY_MIB = "process", 2048
    settings.MAX_SANDBOXES = load_settings(monkeypatch, tmp_path, LEASEHOLD_MAX_SANDBOXES=most).MAX_SANDBOXES
    derived = str(derive_capacity(get_provider("process"), memory_mib=2048).places)
    line = next(line for line in call("config").splitlines() if line.startswith("LEASEHOLD_MAX_SANDBOXES"))
    assert line.split() == ["LEASEHOLD_MAX_SANDBOXES", *([most, "environment"] if most else [derived, "derived"])]


def test_config_as_json_has_the_same_values_and_no_secret(tmp_path: Path, monkeypatch) -> None:
    names = set(env.ENV_VARIABLES)
    load_settings(monkeypatch, tmp_path, LEASEHOLD_LLM_API_KEY="sk-very-secret")
    output = call("config", "--json")
    assert "very-secret" not in output
    assert "for-tests-only" not in output
    rows = {row["name"]: row for row in json.loads(output)["variables"]}
    assert set(rows) == names
    assert rows["LEASEHOLD_LLM_API_KEY"]["value"] == "********"
    assert (rows["LEASEHOLD_IDLE_TIMEOUT"]["value"], rows["LEASEHOLD_IDLE_TIMEOUT"]["source"]) == ("5m", "default")


ALIASES = {
    "ASH_MAX_SANDBOXES": ("77", "LEASEHOLD_MAX_SANDBOXES", 77),
    "ASH_IDLE_TIMEOUT_MS": ("1800001", "LEASEHOLD_IDLE_TIMEOUT", timedelta(seconds=1801)),
    "COLD_CLEANUP_TTL_MS": ("7200000", "LEASEHOLD_COLD_TTL", timedelta(hours=2)),
    "DEEPAGENTS_SANDBOX_AUTO_STOP_MINUTES": ("60", "LEASEHOLD_SANDBOX_AUTO_STOP_MINUTES", 60),
    "DEEPAGENTS_SANDBOX_AUTO_DELETE_MINUTES": ("120", "LEASEHOLD_SANDBOX_AUTO_DELETE_MINUTES", 120),
    "DEEPAGENTS_SANDBOX_IMAGE": ("sandbox:0.5.1", "LEASEHOLD_SANDBOX_IMAGE", "sandbox:0.5.1"),
    "DEEPAGENTS_SANDBOX_TIMEOUT_SECONDS": ("90", "LEASEHOLD_SANDBOX_TIMEOUT_SECONDS", timedelta(seconds=90)),
    "DEEPAGENTS_FALLBACK_TRIGGER_TOKENS": ("9000", "LEASEHOLD_FALLBACK_TRIGGER_TOKENS", 9000),
    "DEEPAGENTS_FALLBACK_KEEP_MESSAGES": ("4", "LEASEHOLD_FALLBACK_KEEP_MESSAGES", 4),
}


def test_aliases_set_their_variables_and_are_shown_as_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ALIASES.keys() == env.ALIASES.keys()
    load_settings(monkeypatch, tmp_path, **{alias: given for alias, (given, _, _) in ALIASES.items()})
    for alias, (_, name, value) in ALIASES.items():
        assert (env.ENV_VARIABLES[name].value, env.ENV_VARIABLES[name].source) == (value, f"environment: {alias}")


def test_own_name_takes_precedence_over_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_settings(monkeypatch, tmp_path, ASH_MAX_SANDBOXES="77", LEASEHOLD_MAX_SANDBOXES="5")
    assert (loaded.MAX_SANDBOXES, env.ENV_VARIABLES["LEASEHOLD_MAX_SANDBOXES"].source) == (5, "environment")


@pytest.mark.parametrize(
    ("alias", "value", "accepted"),
    [
        ("ASH_MAX_SANDBOXES", "many", "a whole number from"), ("ASH_IDLE_TIMEOUT_MS", "30m", "a whole number of milliseconds"),
        ("COLD_CLEANUP_TTL_MS", "0", "a whole number of milliseconds"),
    ],
)  # fmt: skip
def test_wrong_value_of_an_alias_is_refused_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alias: str, value: str, accepted: str
) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"^{alias}='{value}' is not accepted. It takes {accepted}"):
        load_settings(monkeypatch, tmp_path, **{alias: value})


@pytest.mark.parametrize("command", ["config", "help", "nonsense"])  # Django runs help without valid settings
def test_an_invalid_value_stops_every_command_with_one_line_that_names_it(tmp_path: Path, command: str) -> None:
    process = run_manage(tmp_path, command, LEASEHOLD_WEB_WORKERS="many")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr == (
        "LEASEHOLD_WEB_WORKERS='many' is not accepted. It takes a whole number from 1 to 256. (web server processes)\n"
    )


def test_help_needs_no_secret_key(tmp_path: Path) -> None:
    for help_form in ("", "help", "--help", "-h", "help sweep", "sweep --help", "--version"):
        assert is_help_request(["manage.py", *help_form.split()]), help_form
    process = run_manage(tmp_path, "sweep", "--help", DEBUG="0", SECRET_KEY="", SANDBOX_PROVIDER="docker")
    assert (process.returncode, process.stderr) == (0, "")
    assert "--dry-run" in process.stdout


def test_other_commands_need_a_secret_key(tmp_path: Path) -> None:
    for other in ("migrate", "exec LEASE ls --help", "sweep --dry-run --help"):
        assert not is_help_request(["manage.py", *other.split()]), other
    process = run_manage(tmp_path, "migrate", DEBUG="0", SECRET_KEY="", SANDBOX_PROVIDER="docker")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith("SECRET_KEY is not set.")


@pytest.mark.parametrize("token", ["short", "0123456789 abcdef", "0123456789abcdeé"])
def test_a_malformed_metrics_token_is_refused_and_not_shown(tmp_path: Path, monkeypatch, token: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"^LEASEHOLD_METRICS_TOKEN=\(hidden\) is not accepted\."):
        load_settings(monkeypatch, tmp_path, LEASEHOLD_METRICS_TOKEN=token)


def test_a_provider_that_does_not_isolate_needs_debug(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"^SANDBOX_PROVIDER=process does not isolate and DEBUG is off\.[^\n]*$"):
        load_settings(monkeypatch, tmp_path, DEBUG="0")


UNISOLATED = {"SANDBOX_PROVIDER": "process", "DEBUG": False}


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, []),
        ({"Q_CLUSTER": {**settings.Q_CLUSTER, "retry": 480}}, ["leasehold.E001"]),
        ({"Q_CLUSTER": {**settings.Q_CLUSTER, "queue_limit": 64, "workers": 2}}, ["leasehold.E001"]),
        ({"Q_CLUSTER": {**settings.Q_CLUSTER, "timeout": 300}}, ["leasehold.E001"]),
        ({**UNISOLATED, "ALLOW_UNISOLATED": False}, ["leasehold.E002"]),
        ({**UNISOLATED, "ALLOW_UNISOLATED": True}, []),
        ({"EXEC_TIMEOUT_MOST": settings.EXEC_TIMEOUT / 2}, ["leasehold.E003", "leasehold.E003"]),
        ({"RUNTIME_DIR": Path("/tmp/" + "x" * 78)}, []),
        ({"RUNTIME_DIR": Path("/tmp/" + "x" * 79)}, ["leasehold.E004"]),
    ],
)
def test_each_check_finds_its_unusable_settings(changes: dict[str, object], failed: list[str]) -> None:
    with override_settings(**changes):
        assert sorted(message.id for message in run_checks() if (message.id or "").startswith("leasehold.")) == failed
