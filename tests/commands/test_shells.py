"""manage.py shells: list, create and delete."""

import json
from collections.abc import Callable

import pytest
from django.core.management import CommandError
from django.utils import timezone

from leases.models import Lease, Shell
from sandboxes.models import Sandbox
from tests.commands.manage import call

pytestmark = pytest.mark.django_db
NO_LEASE = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def lease(grant: Callable[..., Lease]) -> str:
    return str(grant(now=timezone.now()).pk)


def test_a_shell_is_created_listed_used_and_deleted(
    lease: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("SEED", "from this process")
    options = ("--cwd", "/tmp", "--env", "GREETING=a=b", "--env", "SEED")
    assert call("shells", "create", lease, "turn-1", *options) == "turn-1 /tmp GREETING SEED created\n"
    assert not Sandbox.objects.filter(holder=lease).exists()
    document = json.loads(call("shells", "create", lease, "bare", "--json"))
    assert (document["name"], document["cwd"], document["env_names"]) == ("bare", "/workspace", [])
    assert call("shells", "list", lease) == "bare /workspace\nturn-1 /tmp GREETING SEED\n"
    assert [each["name"] for each in json.loads(call("shells", "list", lease, "--json"))["results"]] == ["bare", "turn-1"]
    with pytest.raises(SystemExit, match="0"):
        call("exec", lease, "--shell", "turn-1", "--", "printenv", "GREETING", "SEED")
    assert capfdbinary.readouterr().out == b"a=b\nfrom this process\n"
    assert call("shells", "delete", lease, "turn-1") == "turn-1 deleted\n"
    assert [*Shell.objects.values_list("name", flat=True)] == ["bare"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["list", "x"], "is not a lease id"), (["list", NO_LEASE], "no such lease"),
        (["create", NO_LEASE, "a"], "no such lease"), (["create", "LEASE", "a b"], "^--name: "),
        (["create", "LEASE", "held"], 'The lease has a shell "held"'),
        (["create", "LEASE", "a", "--cwd", "tmp"], "^--cwd: Must be an absolute path"),
        (["create", "LEASE", "a", "--cwd", "/\udcff"], "^--cwd: must be UTF-8"),
        (["create", "LEASE", "a", "--env", "A-B=1"], "^--env: 'A-B' must consist"),
        (["create", "LEASE", "a", "--env", "NO_SUCH_NAME"], "^--env: NO_SUCH_NAME has no value here"),
        (["create", "LEASE", "a", "--env", "A=\udcff"], "^--env: must be UTF-8"),
        (["delete", "LEASE", "a"], "The lease has no such shell"), (["delete", "LEASE", "\udcff"], "^NAME: must be UTF-8"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named_and_change_nothing(lease: str, args: list[str], message: str) -> None:
    call("shells", "create", lease, "held")
    with pytest.raises(CommandError, match=message):
        call("shells", *[lease if arg == "LEASE" else arg for arg in args])
    assert [*Shell.objects.values_list("name", flat=True)] == ["held"]


def test_an_ended_lease_is_refused(lease: str) -> None:
    call("release", lease)
    for action in ("create", "delete"):
        with pytest.raises(CommandError, match=r"The lease ended \(released\)"):
            call("shells", action, lease, "a")
