"""A role-playing campaign of three agents in containers, played to its end with the offline model."""

import json
from typing import Any

import pytest

from controlplane.games.client import Client, post_condition
from controlplane.games.rpg.campaign import CONDITION, DEATH_CONDITION, Hero, Move, create_campaign, create_player
from tests.commands.manage import run_manage
from tests.e2e.bill import check_bill
from tests.e2e.disturbances import PATIENCE_SECONDS, Disturbances
from tests.e2e.test_kill import Fleet, fleet  # noqa: F401 - fixture
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.docker,
    pytest.mark.matrix("game of a minute; test_demo.py plays the same campaign without kills"),
]
SEED_WITH_ONE_DEATH = 4
ASLEEP_BEFORE_TURN = 5  # of the second hero
COUNT_SLEEPS = "SELECT count(*) FROM sandboxes_transition WHERE \"to\" = 'cold'"


def create_heroes(fleet: Fleet, environment: str) -> list[Hero]:  # noqa: F811
    heroes = []
    for number, did in enumerate(f"did:web:{name}.invalid" for name in ("ada", "brook", "cleo")):
        created = run_manage(fleet.path, "create_key", "--agent", did, "--json", **fleet.env)
        hero = create_player(
            number, did, Client(f"http://127.0.0.1:{fleet.port}", json.loads(created.stdout)["key"], PATIENCE_SECONDS)
        )
        hero.join(environment, "rpg")
        heroes.append(hero)
    return heroes


def put_to_sleep(fleet: Fleet, hero: Hero) -> None:  # noqa: F811
    """Make the hero's sandbox idle for long, and sweep until it is cold."""
    holder = f"REPLACE(CAST(holder AS VARCHAR(36)), '-', '') = '{hero.lease['id'].replace('-', '')}'"
    fleet.update(f"UPDATE sandboxes_sandbox SET idle_at = '2020-01-01 00:00:00+00:00' WHERE state = 'waiting' AND {holder}")

    def sleeps() -> bool:
        fleet.sweep()
        return fleet.select(f"SELECT state FROM sandboxes_sandbox WHERE {holder}") == [("cold",)]

    wait_until(sleeps, "the sandbox is cold", within=60.0, every=1.0)


def read_lease(hero: Hero) -> dict[str, Any]:
    return hero.client.call("GET", f"/leases/{hero.lease['id']}")


def read_sheet(hero: Hero) -> dict[str, Any]:
    command = {"argv": ["cat", "/data/character.json"]}
    sheet: dict[str, Any] = json.loads(hero.client.call("POST", f"/leases/{hero.lease['id']}/exec", command)["stdout"])
    return sheet


def test_campaigns_survive_a_sleep_a_death_and_kills_and_keep_their_sheets(fleet: Fleet) -> None:  # noqa: F811
    fleet.up()
    host = Client(f"http://127.0.0.1:{fleet.port}", fleet.key, PATIENCE_SECONDS)
    heroes = create_heroes(fleet, "campaign-1")
    sleeper = heroes[1]
    statuses_after_death: list[str] = []
    slept: list[dict[str, Any]] = []

    def on_move(move: Move) -> None:
        if move.hero is sleeper and sleeper.turns == ASLEEP_BEFORE_TURN - 1 and not slept:
            slept.append(read_sheet(sleeper))
            put_to_sleep(fleet, sleeper)

    def on_event(event: str) -> None:
        if statuses_after_death == ["pending"]:  # the death was posted before the event that follows it
            statuses_after_death[:] = [read_lease(hero)["end_reason"] for hero in heroes]
        if event.endswith("Ada dies."):
            statuses_after_death.append("pending")

    campaign = create_campaign(heroes, "campaign-1", host, seed=SEED_WITH_ONE_DEATH, on_move=on_move, on_event=on_event)
    assert campaign.play() == "victory"
    assert [hero.skipped for hero in heroes] == [0, 0, 0]
    assert statuses_after_death == [f"condition:{DEATH_CONDITION}", "", ""]
    assert slept and fleet.select(COUNT_SLEEPS) == [(1,)]
    sheets = [read_sheet(hero) for hero in heroes[1:]]
    assert [(sheet["name"], sheet["level"]) for sheet in sheets] == [("Brook", 3), ("Cleo", 3)]
    assert sheets[0]["xp"] > slept[0]["xp"] == 0 and sheets[0]["role"] == slept[0]["role"] == "healer"

    assert sorted(post_condition(host, "campaign-1", CONDITION)) == sorted(hero.lease["id"] for hero in heroes[1:])
    wait_until(lambda: {read_lease(hero)["status"] for hero in heroes} == {"destroyed"}, "leases are destroyed", within=120.0)
    wait_until(lambda: not fleet.list_containers(), "no container is left", within=120.0)
    check_bill(fleet, host, "campaign-1", calls=sum(hero.turns for hero in heroes))

    again = create_heroes(fleet, "campaign-2")
    disturbances = Disturbances(fleet, again, host, plan={5: "lose_sandbox", 9: "kill_control_plane"})
    second = create_campaign(again, "campaign-2", host, seed=2, on_move=lambda move: disturbances.note_move())
    assert second.play() == "victory"
    disturbances.finish()
    assert sum(len(hero.lost_leases) for hero in again) == 1
    for hero in again:
        assert hero.skipped == len(hero.lost_leases)  # the turn in which the sandbox was lost
        played = disturbances.read_played_turns(hero)
        assert played == sorted({*played}) and {*played} <= {*range(1, hero.turns + 1)}
        assert len(played) == hero.turns - hero.skipped
    dead, *living = [hero.character for hero in again if hero.character]
    assert [(each.role, each.campaigns) for each in [dead, *living]] == [("fighter", 2), ("healer", 2), ("mage", 2)]
    assert all(each.level >= 3 for each in living)
