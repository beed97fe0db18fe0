"""Campaign host and role-playing skill: the taught answer is the accepted answer, and a death concerns one agent."""

import json
import random
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from controlplane.games.client import ApiError
from controlplane.games.rpg.campaign import NAMES, Campaign, Hero, Move, create_campaign
from controlplane.games.rpg.rules import Character, Monster, Party, create_character
from controlplane.games.rpg.world import World
from leases.packs.folder import SHIPPED_DIRECTORY, read_folder
from leases.packs.shipped.rpg.skill import policy, sheet
from sandboxes.image import take_turn

PACK = read_folder(SHIPPED_DIRECTORY / "rpg")
PROMPT = PACK.skill["prompt.md"].decode()
NAME_PATTERN = re.compile(r"`([a-z_]+)`")
SEED_WITH_ONE_DEATH = 4
State = dict[str, Any]


class Host:
    """Game host's client: records the conditions that it posts."""

    def __init__(self) -> None:
        self.posted: list[State] = []

    def call(self, method: str, path: str, body: State) -> State:
        assert (method, path) == ("POST", "/environments/campaign/conditions")
        self.posted.append(body)
        return {"ended": []}


class Agent:
    """Client of an agent that answers each turn by itself."""

    def __init__(self) -> None:
        self.states: list[State] = []

    def call(self, method: str, path: str, body: State) -> State:
        state = json.loads(json.dumps(body["state"]))
        assert (method, path, body["turn_number"]) == ("POST", "/leases/x/turns", state["turn_number"])
        self.states.append(state)
        return {"action": self.answer(deepcopy(state)), "skipped": False, "duration_seconds": 0.0}

    def answer(self, state: State) -> State:
        raise NotImplementedError


class LiteralAgent(Agent):
    """Stand-in for a model that does what the prompt says: it answers in the form of the prompt's example."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        self.form, self.random = take_turn.extract_first_object(PROMPT), random.Random(seed)

    def answer(self, state: State) -> State:
        return {**self.form, "action": self.random.choice(state["legal_actions"])}


class SkilledAgent(Agent):
    """The skill's policy with its hooks, as the turn script calls them."""

    def __init__(self, data: Path) -> None:
        super().__init__()
        self.data = data

    def answer(self, state: State) -> State:
        state = policy.prepare_state(state, self.data)
        return policy.record_turn(state, policy.choose_action(state), self.data)


def create(agents: list[Any], host: Host | None = None, *, seed: int, strength: int = 0) -> tuple[Campaign, list[Move]]:
    moves: list[Move] = []
    heroes = [Hero(f"did:plc:{number}", agent, {"id": "x"}, name=NAMES[number]) for number, agent in enumerate(agents)]
    host_client: Any = host or Host()
    return create_campaign(heroes, "campaign", host_client, seed=seed, strength=strength, on_move=moves.append), moves


@pytest.fixture(scope="module")
def literal() -> tuple[list[LiteralAgent], Campaign, list[Move]]:
    """A campaign of three literal agents, to its end."""
    agents = [LiteralAgent(number) for number in range(3)]
    campaign, moves = create(agents, seed=3)
    campaign.play()
    return agents, campaign, moves


def test_every_answer_in_the_taught_form_is_performed(literal: tuple[list[LiteralAgent], Campaign, list[Move]]) -> None:
    agents, campaign, moves = literal
    assert len(moves) == sum(len(agent.states) for agent in agents) > 20
    assert all(move.accepted for move in moves)
    assert [hero.skipped for hero in campaign.heroes] == [0, 0, 0]


def test_every_state_and_answer_matches_the_schemas_of_the_pack(
    literal: tuple[list[LiteralAgent], Campaign, list[Move]],
) -> None:
    check_state, check_action = (Draft202012Validator(PACK.schemas[key]).validate for key in ("state", "action"))
    for agent in literal[0]:
        for state in agent.states:
            check_state(state)
            check_action(agent.answer(state))


def test_every_field_that_the_prompt_names_is_in_the_state(tmp_path: Path) -> None:
    agents = [SkilledAgent(tmp_path / name) for name in NAMES[:3]]
    campaign, _ = create(agents, seed=SEED_WITH_ONE_DEATH)
    campaign.play()
    fields: set[str] = set()
    for state in (state for agent in agents for state in agent.states):
        nested = (state["character"], state["monster"], *state["party"])
        fields |= {*state, state["phase"]}.union(*(part for part in nested if part))
    named = set(NAME_PATTERN.findall(PROMPT))
    assert named - fields == {"action", "narration", "memories", "sheet"}  # of the answer, and added in the sandbox
    assert fields - named == {"environment_type", "turn_number", "campaign"}


@pytest.mark.parametrize(
    "answer", [{"action": "fly to the moon"}, {"action": ["go north"]}, {"reason": "none"}, {"action": None}]
)
def test_answer_that_is_not_offered_is_replaced_by_the_fallback_and_counted(answer: State) -> None:
    class IllegalAgent(Agent):
        def answer(self, state: State) -> State:
            return answer

    campaign, moves = create([IllegalAgent(), IllegalAgent()], seed=3)
    assert campaign.play() == "unfinished"
    assert all(hero.skipped == hero.turns > 0 for hero in campaign.heroes)
    assert {(move.phase, move.action) for move in moves} == {
        ("creation", "play fighter"), ("creation", "play healer"),
        ("town", "wait"), ("exploration", "look"), ("epilogue", "wait"),
    }  # fmt: skip


def test_policies_complete_the_quest_and_a_death_is_posted_for_one_agent(tmp_path: Path) -> None:
    host = Host()
    campaign, moves = create([SkilledAgent(tmp_path / name) for name in NAMES[:3]], host, seed=SEED_WITH_ONE_DEATH)
    assert campaign.play() == "victory"
    [dead] = [hero for hero in campaign.heroes if hero.character and not hero.character.is_alive]
    assert host.posted == [{"condition": "agent.death", "agent_did": [dead.did]}]
    assert {move.phase for move in moves} == {"creation", "town", "exploration", "combat", "epilogue"}
    death = next(index for index, event in enumerate(campaign.events) if event.endswith(f"{dead.name} dies."))
    assert all(hero.turns > dead.turns for hero in campaign.playing) and death < len(campaign.events) - 1


def test_policies_complete_the_quests_of_ten_worlds(tmp_path: Path) -> None:
    for seed in range(10):
        campaign, moves = create([SkilledAgent(tmp_path / str(seed) / name) for name in NAMES[:3]], seed=seed)
        assert (campaign.play(), {move.accepted for move in moves}) == ("victory", {True}), seed


def test_same_seed_and_answers_repeat_the_campaign(tmp_path: Path) -> None:
    played = []
    for run in ("a", "b"):
        campaign, _ = create([SkilledAgent(tmp_path / run / name) for name in NAMES[:2]], seed=5)
        campaign.play()
        played.append(campaign.events)
    assert played[0] == played[1] != []


def test_party_without_living_characters_is_defeated(tmp_path: Path) -> None:
    host = Host()
    agents = [SkilledAgent(tmp_path / name) for name in NAMES[:2]]
    campaign, _ = create(agents, host, seed=SEED_WITH_ONE_DEATH, strength=50)
    assert campaign.play() == "defeat"
    assert sorted(body["agent_did"][0] for body in host.posted) == ["did:plc:0", "did:plc:1"]


def test_agent_whose_lease_ends_leaves_the_party(tmp_path: Path) -> None:
    class LeavingAgent(SkilledAgent):
        def call(self, method: str, path: str, body: State | None = None) -> State:
            if body is None:
                return {"end_reason": "ttl"}
            if len(self.states) == 3:
                raise ApiError("the lease has ended", {"code": "lease_ended"})
            return super().call(method, path, body)

    campaign, _ = create([SkilledAgent(tmp_path / "a"), LeavingAgent(tmp_path / "b")], seed=9)
    assert campaign.play() == "victory"
    assert [hero.name for hero in campaign.playing] == ["Ada"] and "Brook has left the party." in campaign.events


def test_second_campaign_starts_with_the_sheet_and_the_memories(tmp_path: Path) -> None:
    def play(seed: int) -> tuple[Campaign, list[SkilledAgent]]:
        agents = [SkilledAgent(tmp_path / name) for name in NAMES[:3]]
        campaign, _ = create(agents, seed=seed)
        assert campaign.play() == "victory"
        return campaign, agents

    first, _ = play(3)
    before = first.heroes[0].character
    assert before and before.xp > 0
    assert json.loads((tmp_path / "Ada" / "character.json").read_text())["xp"] == before.xp
    second, agents = play(11)
    entered = agents[0].states[1]["character"]  # the first state with a character
    assert (entered["role"], entered["xp"], entered["level"], entered["campaigns"]) == (before.role, before.xp, before.level, 2)
    prepared = sheet.prepare_state(deepcopy(agents[0].states[0]), tmp_path / "Ada")
    assert prepared["legal_actions"] == [f"play {before.role}"] and prepared["memories"]
    after = second.heroes[0].character
    assert after and after.xp > before.xp


def test_turn_that_is_played_again_is_remembered_once(tmp_path: Path) -> None:
    state = {
        "phase": "creation",
        "you": "Ada",
        "campaign": "c",
        "turn_number": 1,
        "legal_actions": ["play mage"],
        "events": ["Rain."],
    }
    for _ in range(2):
        answer = sheet.record_turn(dict(state), {"action": "play mage"}, tmp_path)
    assert answer["character"] == {"name": "Ada", "role": "mage", "level": 1, "xp": 0}
    texts = [json.loads(line)["text"] for line in (tmp_path / "memory" / "rpg.jsonl").read_text().splitlines()]
    assert texts == ["Rain.", "Ada chose: play mage"]
    assert sheet.prepare_state({**state, "turn_number": 2}, tmp_path)["memories"] == texts


@pytest.mark.parametrize("damaged", ["", "[1]", '{"role": 5}', "\x00"])
def test_damaged_sheet_and_memory_are_no_obstacle(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "character.json").write_text(damaged)
    (tmp_path / "memory" / "rpg.jsonl").write_text(f'{damaged}\n{{"text": "kept"}}\n')
    agent = SkilledAgent(tmp_path)
    campaign, moves = create([agent, LiteralAgent()], seed=3)
    campaign.play()
    assert all(move.accepted for move in moves)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"role": "mage", "xp": 45, "gold": 7, "potions": 0, "blade": True, "campaigns": 1}, (3, 45, 7, 0, True, 2)),
        ({"role": "mage", "xp": 10**9, "gold": -5, "potions": "9", "blade": 1}, (20, 380, 0, 1, False, 1)),
        ({"role": "rogue", "xp": 45}, (1, 0, 8, 1, False, 1)),
        ("a sheet", (1, 0, 8, 1, False, 1)),
        (None, (1, 0, 8, 1, False, 1)),
    ],
)
def test_sheet_of_an_agent_is_bounded(given: object, expected: tuple[object, ...]) -> None:
    made = create_character("Cleo", "mage", given)
    assert (made.level, made.xp, made.gold, made.potions, made.blade, made.campaigns) == expected
    assert made.hp == made.max_hp > 0


def test_actions_of_a_role_are_offered_while_they_can_be_paid() -> None:
    party = Party(
        random.Random(1),
        [create_character(name, role, None) for name, role in zip(NAMES, ("healer", "mage", "rogue"), strict=False)],
    )
    healer, mage, rogue = party.members
    goblin = Monster("goblin", 50, 3, 1, 1)
    mage.hp -= 5
    assert "heal Cleo" not in party.list_combat_actions(healer, goblin, can_retreat=False)
    assert "heal Brook" in party.list_combat_actions(healer, goblin, can_retreat=False)
    party.act_in_combat(healer, goblin, "heal Brook")
    assert mage.hp == mage.max_hp
    party.act_in_combat(rogue, goblin, "ambush goblin")
    assert "ambush goblin" not in party.list_combat_actions(rogue, goblin, can_retreat=False)
    mage.mana = 0
    assert party.list_combat_actions(mage, goblin, can_retreat=True) == ["attack goblin", "defend", "retreat"]


def test_guard_draws_the_blow_and_halves_it() -> None:
    fighter, mage = Character("Ada", "fighter", hp=14), Character("Brook", "mage", hp=9)
    party = Party(random.Random(1), [mage, fighter])
    party.act_in_combat(fighter, goblin := Monster("goblin", 9, 8, 1, 1), "guard")
    target, _ = party.suffer(goblin)
    assert target is fighter and 14 - fighter.hp in (3, 4, 5) and fighter.stance == ""


def test_level_raises_hit_points_and_attack() -> None:
    character = Character("Ada", "fighter", xp=15, hp=3)
    Party(random.Random(1), [character]).reward(Monster("wolf", 0, 1, xp=8, gold=2))
    assert (character.level, character.max_hp, character.attack, character.hp, character.gold) == (2, 16, 5, 5, 10)


def test_world_refuses_a_command_that_is_not_admissible() -> None:
    world = World(3)
    with pytest.raises(ValueError, match="not admissible"):
        world.perform("go nowhere")
    assert world.room in world.rooms and world.room in world.describe() and not world.won
