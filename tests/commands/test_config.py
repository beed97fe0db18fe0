"""manage.py config, validation of variables, and system checks."""

import json
from pathlib import Path

import pytest
from django.core.checks import run_checks

from controlplane import env
from tests.commands.manage import run_manage


def test_config_shows_every_variable_its_value_and_its_source(tmp_path: Path) -> None:
    process = run_manage(tmp_path, "config", LEASEHOLD_WEB_THREADS="7")
    assert process.returncode == 0
    for name in env.ENV_VARIABLES:
        assert f"\n{name} " in process.stdout
    line = next(line for line in process.stdout.splitlines() if line.startswith("LEASEHOLD_WEB_THREADS"))
    assert line.split() == ["LEASEHOLD_WEB_THREADS", "7", "environment", "16"]


def test_config_as_json_has_the_same_values_and_no_secret(tmp_path: Path) -> None:
    process = run_manage(tmp_path, "config", "--json", LEASEHOLD_LLM_API_KEY="sk-very-secret")
    assert "very-secret" not in process.stdout
    assert "for-tests-only" not in process.stdout
    rows = {row["name"]: row for row in json.loads(process.stdout)["variables"]}
    assert set(rows) == set(env.ENV_VARIABLES)
    assert rows["LEASEHOLD_LLM_API_KEY"]["value"] == "********"
    assert rows["LEASEHOLD_IDLE_TIMEOUT"]["value"] == "30m"
    assert rows["LEASEHOLD_IDLE_TIMEOUT"]["source"] == "default"


def test_config_warns_about_unknown_variables(tmp_path: Path) -> None:
    process = run_manage(tmp_path, "config", LEASEHOLD_WEB_THREAD="7")
    assert process.returncode == 0
    assert process.stderr == (
        "warning: LEASEHOLD_WEB_THREAD is not a variable of Leasehold; did you mean LEASEHOLD_WEB_THREADS?\n"
    )


@pytest.mark.parametrize("command", ["config", "migrate", "help", "up", "nonsense"])
def test_an_invalid_value_stops_every_command_with_one_line_that_names_it(tmp_path: Path, command: str) -> None:
    process = run_manage(tmp_path, command, LEASEHOLD_WEB_WORKERS="many")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr == (
        "LEASEHOLD_WEB_WORKERS='many' is not accepted. It takes a whole number from 1 to 1000000000. (web server processes)\n"
    )


def test_a_provider_that_does_not_isolate_needs_debug(tmp_path: Path) -> None:
    process = run_manage(tmp_path, "check", DEBUG="0")
    assert process.returncode == 1
    assert process.stderr.startswith("SANDBOX_PROVIDER=process does not isolate and DEBUG is off.")
    assert process.stderr.count("\n") == 1


def failed_checks(settings) -> list[str]:
    return sorted(message.id or "" for message in run_checks() if (message.id or "").startswith("leasehold."))


def test_the_settings_of_a_fresh_clone_pass_every_check(settings) -> None:
    assert failed_checks(settings) == []


@pytest.mark.parametrize("change", [{"retry": 480}, {"queue_limit": 64, "workers": 2}, {"timeout": 300}])
def test_a_queue_that_would_run_tasks_twice_fails_the_checks(settings, change: dict[str, int]) -> None:
    settings.Q_CLUSTER = {**settings.Q_CLUSTER, **change}
    assert failed_checks(settings) == ["leasehold.E001"]


def test_a_provider_that_does_not_isolate_fails_the_checks_unless_allowed(settings) -> None:
    settings.SANDBOX_PROVIDER, settings.DEBUG, settings.ALLOW_UNISOLATED = "process", False, False
    assert failed_checks(settings) == ["leasehold.E002"]
    settings.ALLOW_UNISOLATED = True
    assert failed_checks(settings) == []


def test_timeouts_above_the_longest_allowed_fail_the_checks(settings) -> None:
    settings.EXEC_TIMEOUT_MOST = settings.EXEC_TIMEOUT / 2
    assert failed_checks(settings) == ["leasehold.E003", "leasehold.E003"]


def test_a_runtime_directory_too_long_for_a_socket_fails_the_checks(settings) -> None:
    settings.RUNTIME_DIR = Path("/tmp/" + "x" * 78)
    assert failed_checks(settings) == []
    settings.RUNTIME_DIR = Path("/tmp/" + "x" * 79)
    assert failed_checks(settings) == ["leasehold.E004"]
