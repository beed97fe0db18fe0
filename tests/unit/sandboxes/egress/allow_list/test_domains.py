"""Entries of allow lists."""

from typing import Any

import pytest
from django.core.exceptions import ValidationError

from sandboxes.egress.allow_list.domains import is_allowed
from sandboxes.models import Policy


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("pypi.org", "pypi.org", 443, True),
        ("pypi.org", "pypi.org", 80, True),
        ("pypi.org", "pypi.org", 22, False),
        ("pypi.org", "a.pypi.org", 443, False),
        ("pypi.org", "notpypi.org", 443, False),
        ("pypi.org", "pypi.org.evil.test", 443, False),
        ("*.example.org", "a.b.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", "badexample.org", 443, False),
        ("git.example.org:8443", "git.example.org", 8443, True),
        ("git.example.org:8443", "git.example.org", 443, False),
    ],
)
def test_an_entry_allows_its_names_and_ports(entry: str, host: str, port: int, allowed: bool) -> None:
    assert is_allowed(host, port, [entry]) is allowed


@pytest.mark.parametrize(
    "entry",
    [
        "*", "*.", "*.*", "*.org", "org", "a.*.org", "*a.org", "10.0.0.1", "[::1]", "::1", "2130706433.1", "Pypi.org",
        "pypi.org.", "https://pypi.org", "pypi.org/simple", "pypi.org:0", "pypi.org:65536", "pypi.org:", "pypi.org:http",
        "a b.org", "",
        "-a.org", "ä.org", "a" * 64 + ".org", 7, None, ["pypi.org"],
    ],
)  # fmt: skip
def test_an_invalid_entry_is_an_error_of_the_field(entry: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        Policy(name="open", allowed_domains=[entry]).full_clean(validate_unique=False, validate_constraints=False)
    assert [*refused.value.message_dict] == ["allowed_domains"]


@pytest.mark.django_db
def test_the_sealed_policy_takes_no_domain() -> None:
    with pytest.raises(ValidationError, match="cannot have exceptions"):
        Policy(name="sealed", allowed_domains=["pypi.org"]).full_clean(validate_unique=False)
