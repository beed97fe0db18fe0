"""manage.py pool: list, show, add, set, drain and resume."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError

from leases import execution
from leases.models import Lease
from sandboxes.models import Pool
from tests.commands.manage import call
from tests.conftest import NOW

pytestmark = pytest.mark.django_db


def show(pool: Pool) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(call("pool", "show", pool.name, "--json"))
    return document


def test_pools_are_listed_with_their_use(pool: Pool, grant: Callable[..., Lease]) -> None:
    execution.ensure_sandbox_ready(grant().pk, now=NOW)
    Pool.objects.filter(pk=pool.pk).update(warm_target=2, draining=True)
    lines = call("pool", "list").splitlines()
    assert f"{pool.name} memory: 1 of 100 places used, 0 of 2 pre-warmed, draining" in lines
    documents = json.loads(call("pool", "list", "--json"))["results"]
    assert [document["name"] for document in documents] == sorted(Pool.objects.values_list("name", flat=True))


def test_a_pool_is_added_changed_and_shown(memory: object) -> None:
    added = call("pool", "add", "large", "--provider", "memory", "--capacity", "3", "--memory-mib", "4096", "--restricted")
    assert added == "large added: capacity=3, provider=memory, restricted=yes, memory_mib=4096\n"
    changed = call("pool", "set", "large", "--max-starting", "2", "--warm-target", "1", "--no-restricted", "--image", "img:2")
    assert changed == "large changed: max_starting=2, warm_target=1, image=img:2, restricted=no\n"
    call("pool", "set", "large", "--max-starting", "none", "--image", "")
    row = Pool.objects.get(name="large")
    assert (row.capacity, row.memory_mib, row.max_starting, row.warm_target, row.restricted, row.image) == (
        3, 4096, None, 1, False, "",
    )  # fmt: skip
    lines = call("pool", "show", "large").splitlines()
    assert {"name: large", "capacity: 3", "max_starting: -", "restricted: no", "draining: no"} <= {*lines}


def test_a_new_pool_has_as_many_places_as_the_console_suggests(memory: object, settings: Any) -> None:
    settings.MAX_SANDBOXES = 7
    assert call("pool", "add", "small", "--provider", "memory") == "small added: provider=memory, capacity=7\n"


def test_a_changed_capacity_ends_the_automatic_one(pool: Pool, settings: Any) -> None:
    settings.MAX_SANDBOXES = 7
    call("pool", "set", pool.name, "--automatic-capacity")
    assert (show(pool)["capacity"], show(pool)["automatic_capacity"]) == (7, True)
    call("pool", "set", pool.name, "--capacity", "5")
    assert (show(pool)["capacity"], show(pool)["automatic_capacity"]) == (5, False)


def test_a_change_leaves_the_counters_of_other_processes(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Pool.save

    def save_after_another_process(row: Pool, **options: Any) -> None:
        Pool.objects.filter(pk=row.pk).update(used=9)
        save(row, **options)

    monkeypatch.setattr(Pool, "save", save_after_another_process)
    call("pool", "set", pool.name, "--pids", "99")
    assert (show(pool)["used"], show(pool)["pids"]) == (9, 99)


def test_a_dry_run_checks_and_changes_nothing(pool: Pool) -> None:
    assert call("pool", "set", pool.name, "--pids", "99", "--dry-run") == f"{pool.name} would be changed: pids=99\n"
    assert call("pool", "add", "other", "--capacity", "1", "--dry-run") == "other would be added: capacity=1\n"
    with pytest.raises(CommandError, match="--pids"):
        call("pool", "set", pool.name, "--pids", "1", "--dry-run")
    assert show(pool)["pids"] == pool.pids and not Pool.objects.filter(name="other").exists()


def test_a_pool_is_drained_and_resumed(pool: Pool) -> None:
    for action, outcome in [
        ("drain", "draining"), ("drain", "was draining before"), ("resume", "resumed"), ("resume", "was not draining"),
    ]:  # fmt: skip
        assert call("pool", action, pool.name) == f"{pool.name} {outcome}\n"
        assert show(pool)["draining"] is (action == "drain")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["set", "default", "--capacity", "0"], "^--capacity: Ensure this value is greater than or equal to 1"),
        (["set", "default", "--capacity", "many"], "^--capacity: must be a number."),
        (["set", "default", "--capacity", "none"], "^--capacity: must be a number."),
        (["set", "default", "--capacity", "9" * 10], "^--capacity: must be a number."),
        (["set", "default", "--max-starting", "-1"], "^--max-starting: must be a number or 'none'."),
        (["set", "default", "--memory-mib", "1"], "^--memory-mib: Ensure"),
        (["set", "default", "--provider", "dokcer"], "^--provider: .*is not a valid choice"),
        (["set", "default", "--image", "x" * 256], "^--image: Ensure this value has at most 255"),
        (["set", "default", "--runtime", "a b"], "^--runtime: Enter a valid"),
        (["set", "default", "--provider", "memory", "--runtime", "runsc"], "runtime: The memory provider has no runtimes"),
        (["set", "default", "--image", "a\udcff"], "^--image: must be UTF-8"),
        (["set", "default"], "State at least one setting"),
        (["set", "defualt", "--capacity", "1"], "no pool 'defualt'. Did you mean default?"),
        (["show", "none"], "no pool 'none'"), (["drain", "none"], "no pool 'none'"), (["resume", "none"], "no pool 'none'"),
        (["add", "a b", "--capacity", "1"], "^name: Enter a valid"),
        (["add", "default", "--capacity", "1"], "^name: Pool with this Name already exists"),
        (["add", "", "--capacity", "1"], "^name: This field cannot be blank"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_named_and_change_nothing(memory: object, args: list[str], message: str) -> None:
    before = [*Pool.objects.values()]
    with pytest.raises(CommandError, match=message):
        call("pool", *args)
    assert [*Pool.objects.values()] == before
