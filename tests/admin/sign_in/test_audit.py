"""Log of sign-ins: names and addresses, no password, nothing that a name could forge."""

import json
import logging
import re
from collections.abc import Callable
from ipaddress import ip_network
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from controlplane import logs
from controlplane.console.sign_in import proxy
from controlplane.console.sign_in.audit import SampledLog
from tests.admin.sign_in.conftest import PASSWORD, Clock, is_signed_in, sign_in


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, dict[str, Any]]]]:
    """Function that returns the log's lines on sign-ins: event and values."""
    caplog.set_level(logging.INFO, logger="controlplane.console.sign_in")

    def read() -> list[tuple[str, dict[str, Any]]]:
        records = [record.msg for record in caplog.records if record.name.startswith("controlplane.console.sign_in")]
        return [(each["event"], {name: each[name] for name in each.keys() & {"user", "address", "method"}}) for each in records]

    return read


def test_each_attempt_is_logged_with_name_and_address_and_without_password(ada: User, clock: Clock, lines: Any) -> None:
    browser = Client()
    sign_in("ada", "guess-4711", "198.51.100.1")
    sign_in("nobody", "guess-4712", "198.51.100.2")
    sign_in("ada", PASSWORD, "198.51.100.3", browser)
    browser.post("/admin/logout/", REMOTE_ADDR="198.51.100.4")
    for _ in range(6):
        sign_in("bob", "guess-4713", "198.51.100.5")
    expected = [
        ("console sign-in failed", {"user": "ada", "address": "198.51.100.1", "method": "password"}),
        ("console sign-in failed", {"user": "nobody", "address": "198.51.100.2", "method": "password"}),
        ("console sign-in", {"user": "ada", "address": "198.51.100.3", "method": "password"}),
        ("console sign-out", {"user": "ada", "address": "198.51.100.4"}),
        *[("console sign-in failed", {"user": "bob", "address": "198.51.100.5", "method": "password"})] * 5,
        ("console sign-in throttled", {"user": "bob", "address": "198.51.100.5"}),
    ]
    assert lines() == expected
    assert "guess" not in str(lines()) and PASSWORD not in str(lines())


def test_a_right_password_of_a_user_without_access_is_logged(ada: User, clock: Clock, lines: Any) -> None:
    User.objects.update(is_staff=False)
    assert sign_in("ada", PASSWORD).status_code == 200
    assert lines() == [("console sign-in refused", {"user": "ada", "address": "192.0.2.1"})]


def test_sign_ins_by_a_proxy_are_logged_with_the_clients_address(
    ada: User, lines: Any, configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "IGNORED_HEADER_LOG", SampledLog())
    configure(user_header="RemoteUser", trusted_proxies=(ip_network("10.0.0.0/8"),))
    peer = {"REMOTE_ADDR": "10.0.0.1", "HTTP_X_FORWARDED_FOR": "198.51.100.1"}
    assert is_signed_in(Client(), HTTP_REMOTEUSER="ada", **peer)
    is_signed_in(Client(), HTTP_REMOTEUSER="new", **peer)
    is_signed_in(Client(), HTTP_REMOTEUSER="ada", REMOTE_ADDR="192.0.2.1")
    by_proxy = {"address": "198.51.100.1", "method": "proxy"}
    assert lines() == [
        ("console sign-in", {"user": "ada"} | by_proxy), ("console user created", {"user": "new"} | by_proxy),
        ("console sign-in", {"user": "new"} | by_proxy), ("user header ignored", {"user": "ada", "address": "192.0.2.1"}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "ada\n2026-11-21 [info] console sign-in user=ada", "ada\r\nx", "ada\x1b[2K", "ada\u2028x", "\u202eada", "a\x85x",
        "x address=198.51.100.9 method=proxy user=ada", "'ada'", '"', "\\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("format", ["text", "json"])
def test_a_name_forges_no_line(name: str, format: str, ada: User, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    sign_in(name, "guess")
    configured = logs.build_logging(format, "INFO")["formatters"]["structured"]
    options = {key: value for key, value in configured.items() if key != "()"}
    formatter = configured["()"](**options)
    [line] = [formatter.format(record) for record in caplog.records if "sign-in failed" in str(record.msg)]
    assert all(each.isprintable() for each in line)
    if format == "json":
        assert json.loads(line)["event"] == "console sign-in failed"
    else:
        assert sorted(re.findall(r"(\w+)=", line)) == ["address", "method", "user"]


def test_a_long_name_is_shortened(ada: User, clock: Clock, lines: Any) -> None:
    sign_in("x" * 100_000, "guess")
    assert all(len(values["user"]) <= 151 for _, values in lines())


def test_throttled_attempts_are_sampled(caplog: pytest.LogCaptureFixture) -> None:
    log = SampledLog()
    for number in range(25):
        log.write("console sign-in throttled", at=number / 10)
    assert [record.msg["omitted"] for record in caplog.records] == [0, 9, 9]  # type: ignore[index]
