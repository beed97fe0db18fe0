"""Values that are refused before a process serves with them: the message names the variable, and what it accepts."""

from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured

from controlplane import checks, env
from controlplane.env_file import read_env_file
from controlplane.path_checks import check_certificates, check_directories, check_unused_variables, find_directory_problem
from tests.commands.manage import load_settings, run_manage
from tests.support.servers.tls import TlsFiles, create_certificates

REFUSED = {
    "LEASEHOLD_STATE_DIR": [("relative/dir", "an absolute path"), ("", "an absolute path")],
    "LEASEHOLD_RUNTIME_DIR": [("run", "an absolute path")],
    "LEASEHOLD_STORAGE_DIR": [("~/store", "an absolute path")],
    "LEASEHOLD_GATEWAY_CERTIFICATE": [("gateway.pem", "an absolute path")],
    "CSRF_TRUSTED_ORIGINS": [
        ("x.example", "origins such as https://"), ("https://a.example,b.example", "origins such as https://"),
        ("https://x.example/path", "origins such as https://"),
    ],
    "ALLOWED_HOSTS": [("https://x.example", "host names without scheme"), ("x.example:80", "without scheme and port")],
    "LEASEHOLD_RUNNER_THREADS": [("1000000", "from 0 to 1000")],
    "LEASEHOLD_WEB_THREADS": [("1001", "from 2 to 1000")],
    "LEASEHOLD_QUEUE_WORKERS": [("257", "from 1 to 256")],
    "SANDBOX_SLEEP_AFTER": [("3650d", "at most 366 days")],
    "LEASEHOLD_COLD_TTL": [("999999999999999d", "at most 366 days")],
}  # fmt: skip
ACCEPTED = {
    "ALLOWED_HOSTS": "*,.example.com,x.example,[::1],a_b.internal",
    "CSRF_TRUSTED_ORIGINS": "https://*.example.com,http://localhost:8080,https://[::1]:8443",
}


@pytest.mark.parametrize(
    ("name", "value", "accepted"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)  # fmt: skip
def test_wrong_value_is_refused_with_what_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, accepted: str
) -> None:
    with pytest.raises(ImproperlyConfigured) as refused:
        load_settings(monkeypatch, tmp_path, **{name: value})
    assert str(refused.value).startswith(f"{name}={value!r} is not accepted. It takes ") and accepted in str(refused.value)


def test_forms_of_hosts_and_origins_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_settings(monkeypatch, tmp_path, **ACCEPTED)
    for name, value in ACCEPTED.items():
        assert getattr(loaded, name) == value.split(",")


def test_mistyped_directory_of_a_sqlite_database_is_refused_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistyped = tmp_path / "mistyped"
    with pytest.raises(ImproperlyConfigured, match=f"^DATABASE_URL names a SQLite file in {mistyped}, and there is no such"):
        load_settings(monkeypatch, tmp_path, DATABASE_URL=f"sqlite:///{mistyped}/x.sqlite3")
    assert not mistyped.exists()


def test_state_directory_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"^LEASEHOLD_STATE_DIR: the directory /proc/nope cannot be made: No"):
        load_settings(monkeypatch, tmp_path, LEASEHOLD_STATE_DIR="/proc/nope")
    with pytest.raises(
        ImproperlyConfigured, match=r"^DATABASE_URL=\(hidden\) is not accepted. It takes sqlite:////absolute/path"
    ):
        load_settings(monkeypatch, tmp_path, DATABASE_URL="sqlite:///relative.sqlite3")
    assert load_settings(monkeypatch, tmp_path, DATABASE_URL="sqlite://:memory:").DATABASES["default"]["NAME"] == ":memory:"


# --- unknown variables ----------------------------------------------------------------------------------------------------


def test_mistyped_variable_stops_every_command_but_config(tmp_path: Path) -> None:
    for command in ("check", "migrate"):
        process = run_manage(tmp_path, command, LEASEHOLD_COLD_TTTL="5m")
        assert (process.returncode, process.stdout) == (1, "")
        assert process.stderr == "LEASEHOLD_COLD_TTTL is not a variable of Leasehold; did you mean LEASEHOLD_COLD_TTL?\n"


CLUSTER = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1", "LEASEHOLD_SERVICE_HOST": "10.0.0.2", "LEASEHOLD_SERVICE_PORT_HTTP": "80",
    "LEASEHOLD_PORT": "tcp://10.0.0.2:80", "LEASEHOLD_PORT_8000_TCP_ADDR": "10.0.0.2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "mistakes", "others"),
    [
        ({"LEASEHOLD_UNHEARD_OF": "1"}, ["LEASEHOLD_UNHEARD_OF"], []),
        ({"SANDBOX_PROVIDERS": "docker"}, ["SANDBOX_PROVIDERS"], []),
        ({"STORAGE_EMULATOR_HOST": "x", "SANDBOX_ID": "7"}, [], ["SANDBOX_ID", "STORAGE_EMULATOR_HOST"]),
        ({"LEASEHOLD_URL": "x", "LEASEHOLD_REQUIRE_SERVICES": "1", "LEASEHOLD_TEST_PROVIDER": "modal"}, [], []),
        (CLUSTER, [], []),
        ({name: CLUSTER[name] for name in CLUSTER if name == "LEASEHOLD_SERVICE_HOST"}, ["LEASEHOLD_SERVICE_HOST"], []),
    ],
    ids=[
        "unknown",
        "typing error",
        "of other programs",
        "of clients and tests",
        "of services",
        "without a cluster",
    ],
)
def test_unknown_variables_are_mistakes_or_of_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], mistakes: list[str], others: list[str]
) -> None:
    load_settings(monkeypatch, tmp_path, **variables)
    unknown = env.find_unknown_variables()
    assert [each.name for each in unknown if each.is_mistake] == mistakes
    assert [each.name for each in unknown if not each.is_mistake] == others
    if mistakes:
        with pytest.raises(ImproperlyConfigured, match=mistakes[0]):
            env.require_known_variables()
    else:
        env.require_known_variables()


# --- the file of variables ------------------------------------------------------------------------------------------------


def test_missing_env_file_stops_every_command(tmp_path: Path) -> None:
    process = run_manage(tmp_path, "check", LEASEHOLD_ENV_FILE="/nonexistent")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith("LEASEHOLD_ENV_FILE: the file /nonexistent does not exist. It takes")
    assert process.stderr.count("\n") == 1
    read_env_file(tmp_path / "absent", is_required=False)


@pytest.mark.parametrize("line", ["SECRET s-e-c-r-e-t", "export SECRET = s-e-c-r-e-t", "s-e-c-r-e-t", "SE-CRET=s-e-c-r-e-t"])
def test_malformed_line_is_refused_with_its_number_and_without_its_content(tmp_path: Path, line: str) -> None:
    path = tmp_path / "env"
    path.write_text(f"# comment\n\nLH_TEST_A=1\n{line}\n")
    with pytest.raises(ImproperlyConfigured) as refused:
        read_env_file(path, is_required=True)
    assert str(refused.value).startswith(f"{path}, line 4 is not accepted. It takes NAME=VALUE")
    assert "s-e-c" not in str(refused.value)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImproperlyConfigured, match="Is a directory"):
        read_env_file(tmp_path, is_required=False)
    (tmp_path / "latin").write_bytes(b"A=\xe4")
    with pytest.raises(ImproperlyConfigured, match="not UTF-8"):
        read_env_file(tmp_path / "latin", is_required=False)


def test_forms_of_lines_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {"LH_TEST_KEPT": "process"}
    monkeypatch.setattr("environ.Env.ENVIRON", environ)
    path = tmp_path / "env"
    path.write_text("  # indented\n   \nexport LH_TEST_A=\"1 2\"\nLH_TEST_B='x#y'\nLH_TEST_C=a=b\nLH_TEST_KEPT=file\n")
    read_env_file(path, is_required=True)
    assert environ == {"LH_TEST_A": "1 2", "LH_TEST_B": "x#y", "LH_TEST_C": "a=b", "LH_TEST_KEPT": "process"}


# --- files and directories that variables name ----------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return create_certificates(tmp_path, "gateway.internal")


@pytest.mark.parametrize("prefix", ["GATEWAY", "GATEWAY_INTERNAL"])
def test_certificate_and_key_are_opened_and_parsed(settings: Any, files: TlsFiles, tmp_path: Path, prefix: str) -> None:
    name = f"LEASEHOLD_{prefix}_CERTIFICATE"
    settings.GATEWAY_LISTEN = "0.0.0.0:8443"

    def find_problem(certificate: object, key: object = "") -> str:
        setattr(settings, f"{prefix}_CERTIFICATE", str(certificate))
        setattr(settings, f"{prefix}_CERTIFICATE_KEY", str(key))
        found = check_certificates(None)
        assert all(each.id == "leasehold.E017" and each.is_serious() for each in found)
        return " ".join(each.msg for each in found)

    assert find_problem(files.certificate, files.key) == ""
    assert find_problem("/nonexistent.pem") == f"{name}=/nonexistent.pem cannot be read: No such file or directory"
    assert f"{name}_KEY=/nonexistent.key cannot be read" in find_problem(files.certificate, "/nonexistent.key")
    assert f"{name}={files.certificate}, without {name}_KEY, cannot be used" in find_problem(files.certificate)
    assert f"{name}={files.key} and {name}_KEY={files.key} cannot be used" in find_problem(files.key, files.key)
    (other_directory := tmp_path / "other").mkdir()
    other = create_certificates(other_directory, "gateway.internal")
    assert "cannot be used as a certificate with its key" in find_problem(files.certificate, other.key)


@pytest.mark.parametrize("prefix", ["GATEWAY", "GATEWAY_INTERNAL"])
def test_authority_is_opened_and_parsed(settings: Any, files: TlsFiles, prefix: str) -> None:
    setattr(settings, f"{prefix}_AUTHORITY", str(files.authority))
    assert check_certificates(None) == []
    setattr(settings, f"{prefix}_AUTHORITY", str(files.key))
    [found] = check_certificates(None)
    assert found.msg.startswith(f"LEASEHOLD_{prefix}_AUTHORITY={files.key} cannot be used as the certificate of an authority")
    setattr(settings, f"{prefix}_AUTHORITY", "/nonexistent.pem")
    [found] = check_certificates(None)
    assert found.msg == f"LEASEHOLD_{prefix}_AUTHORITY=/nonexistent.pem cannot be read: No such file or directory"


def test_variable_without_effect_is_said(settings: Any) -> None:
    assert check_unused_variables(None) == []
    settings.GATEWAY_CERTIFICATE = "/nonexistent.pem"
    [found] = check_unused_variables(None)
    assert (found.id, found.is_serious()) == ("leasehold.W010", False)
    assert found.msg == "LEASEHOLD_GATEWAY_CERTIFICATE is set and has no effect without LEASEHOLD_GATEWAY_LISTEN."
    assert check_certificates(None) == []


@pytest.mark.parametrize("name", ["STATE_DIR", "STORAGE_DIR", "RUNTIME_DIR"])
@pytest.mark.parametrize("kind", ["in /proc", "below a file"])
def test_directory_that_cannot_be_written_to_is_refused(settings: Any, tmp_path: Path, name: str, kind: str) -> None:
    assert check_directories(None) == []
    (tmp_path / "file").touch()
    path = Path("/proc/nope") if kind == "in /proc" else tmp_path / "file" / "below"
    settings.STORAGE_BACKEND = "filesystem"
    setattr(settings, name, path)
    [found] = [
        each for each in check_directories(None) if each.msg.startswith(f"LEASEHOLD_{name}: {path} cannot be written to")
    ]
    assert (found.id, found.is_serious()) == ("leasehold.E018", True)


def test_check_of_a_directory_leaves_nothing_behind_and_needs_no_space(tmp_path: Path) -> None:
    assert find_directory_problem(tmp_path / "new" / "store") == ""
    assert [*tmp_path.iterdir()] == []


def test_up_runs_the_checks_of_files_and_directories(tmp_path: Path) -> None:
    process = run_manage(tmp_path, "up", LEASEHOLD_STORAGE_DIR="/proc/nope", LEASEHOLD_GATEWAY_CERTIFICATE="/nonexistent.pem")
    assert process.returncode == 1
    assert "LEASEHOLD_STORAGE_DIR: /proc/nope cannot be written to" in process.stderr
    assert "LEASEHOLD_GATEWAY_CERTIFICATE is set and has no effect" in process.stderr


def test_long_running_commands_run_the_checks_of_django(settings: Any) -> None:
    settings.CSRF_TRUSTED_ORIGINS = ["x.example"]
    assert "4_0.E001" in {each.id for each in run_checks(tags=checks.LONG_RUNNING)}
