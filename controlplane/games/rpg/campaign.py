"""Game host of a role-playing campaign whose characters are played by agents in leased sandboxes.

The world is TextWorld's, the rules of combat and town are those of rules.py. Each turn offers its agent `legal_actions`. Any
other answer is replaced by the fallback action of the phase and counted. A character's death posts `agent.death` for its agent
alone."""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from controlplane.games import DemoOptions
from controlplane.games.client import ApiError, Client, Player, post_condition
from controlplane.games.rpg.rules import (
    ROLES,
    TALE_XP,
    VICTORY_GOLD,
    Character,
    Monster,
    Party,
    create_character,
    create_monsters,
)
from controlplane.games.rpg.world import OPPOSITES, World

CONDITION = "campaign.ended"
DEATH_CONDITION = "agent.death"
NAMES = ("Ada", "Brook", "Cleo", "Dara")
MAX_ROUNDS = 60  # a longer campaign ends without a result
MAX_EVENTS = 12  # in one state; older ones are in the memory of the agents
MONSTERS = 3
RETURN_TO_TOWN = "return to town"
LEASE_ENDED = "lease_ended"
TOWN_SCENE = "The town at the entrance of the dungeon. The shop sells potions (5 gold) and blades (12), the inn has beds (3)."
SEED_BYTES = 4


@dataclass
class Hero(Player):
    """A player with a character, which the first turn creates."""

    name: str = ""
    character: Character | None = None
    seen: int = 0  # events that the agent has been told
    is_gone: bool = False  # the lease has ended

    @property
    def label(self) -> str:
        return self.name

    @property
    def is_playing(self) -> bool:
        return not self.is_gone and (self.character is None or self.character.is_alive)


@dataclass(frozen=True)
class Move:
    """A decision of an agent."""

    hero: Hero
    phase: str
    action: str
    accepted: bool
    seconds: float


@dataclass
class Campaign:
    """One campaign. Every hero must have joined the environment before."""

    heroes: list[Hero]
    environment: str
    host: Client
    world: World
    chance: random.Random
    monsters: dict[str, Monster]
    on_move: Callable[[Move], None]
    on_event: Callable[[str], None]
    events: list[str] = field(default_factory=list)
    map: dict[str, dict[str, str | None]] = field(default_factory=dict)
    came_from: str = ""  # direction back to the room before
    party: Party = field(init=False)

    def __post_init__(self) -> None:
        self.party = Party(self.chance)
        self._update_map()

    def play(self) -> str:
        """Play to the end. Return `victory`, `defeat` or `unfinished`."""
        self._create_characters()
        self._visit_town("town")
        for _ in range(MAX_ROUNDS):
            if self._play_round():
                break
        if self.world.won and self.playing:
            for member in self.party.living:
                member.xp, member.gold = member.xp + TALE_XP, member.gold + VICTORY_GOLD
            self._record("The quest is complete.")
            self._visit_town("epilogue")
            return "victory"
        if self.playing:
            self._visit_town("epilogue")
            return "unfinished"
        return "defeat"

    @property
    def playing(self) -> list[Hero]:
        return [hero for hero in self.heroes if hero.is_playing]

    @property
    def monster(self) -> Monster | None:
        """The living monster of the party's room."""
        monster = self.monsters.get(self.world.room)
        return monster if monster and monster.hp else None

    def _create_characters(self) -> None:
        for hero in self.heroes:
            roles = [f"play {role}" for role in ROLES]
            action, answer = self._request_turn(
                hero, "creation", TOWN_SCENE, roles, roles[len(self.party.members) % len(roles)]
            )
            if action is None:
                continue
            hero.character = create_character(hero.name, action.removeprefix("play "), answer.get("character"))
            self.party.members.append(hero.character)
            self._record(f"{hero.name} joins as {hero.character.role} of level {hero.character.level}.")

    def _visit_town(self, phase: str) -> None:
        """Give each hero one action in town."""
        for hero in self.playing:
            assert hero.character
            legal = self.party.list_town_actions(hero.character)
            action, _ = self._request_turn(hero, phase, TOWN_SCENE, legal, "wait")
            if action is not None:
                self._record(self.party.act_in_town(hero.character, action))

    def _play_round(self) -> bool:
        """Give each hero one action, then the monster. Return whether the campaign is over."""
        for hero in self.playing:
            if hero.is_playing:
                self._act(hero)
            if self.world.won or self.world.lost:
                return True
        if self.monster and self.party.living:
            target, event = self.party.suffer(self.monster)
            self._record(event)
            if not target.is_alive:
                self._bury(target)
        return not self.playing

    def _act(self, hero: Hero) -> None:
        if self.monster:
            self._fight(hero, self.monster)
        else:
            self._explore(hero)

    def _fight(self, hero: Hero, monster: Monster) -> None:
        assert hero.character
        back = f"go {self.came_from}"
        legal = self.party.list_combat_actions(hero.character, monster, can_retreat=back in self.world.legal)
        action, _ = self._request_turn(hero, "combat", self.world.describe(), legal, "defend")
        if action == "retreat":
            self._record(f"{hero.name} calls the retreat.")
            self._move(hero, back)
        elif action is not None:
            self._record(self.party.act_in_combat(hero.character, monster, action))
            if not monster.hp:
                self._record(self.party.reward(monster))

    def _explore(self, hero: Hero) -> None:
        at_entrance = self.world.room == self.world.entrance and len(self.map) > 1
        legal = self.world.legal + ([RETURN_TO_TOWN] if at_entrance else [])
        action, _ = self._request_turn(hero, "exploration", self.world.describe(), legal, "look")
        if action == RETURN_TO_TOWN:
            self._record(f"{hero.name} leads the party back to town.")
            self._visit_town("town")
        elif action is not None:
            self._move(hero, action)

    def _move(self, hero: Hero, command: str) -> None:
        """Execute a command of the world."""
        before = self.world.room
        self.world.perform(command)
        self._record(f"{hero.name}: {command}.")
        if self.world.room != before:
            direction = command.removeprefix("go ")
            self.map[before][direction], self.came_from = self.world.room, OPPOSITES[direction]
            self.map.setdefault(self.world.room, {})[self.came_from] = before
            monster = f" Enemy: {self.monster.name}." if self.monster else ""
            self._record(f"The party enters the {self.world.room}.{monster}")
        self._update_map()

    def _update_map(self) -> None:
        exits = self.map.setdefault(self.world.room, {})
        for direction in self.world.list_exits():
            exits.setdefault(direction, None)

    def _bury(self, dead: Character) -> None:
        """End the lease of a dead character's agent, and no other lease."""
        hero = next(hero for hero in self.heroes if hero.character is dead)
        post_condition(self.host, self.environment, DEATH_CONDITION, agents=[hero.did])

    def _request_turn(
        self, hero: Hero, phase: str, scene: str, legal: list[str], fallback: str
    ) -> tuple[str | None, dict[str, Any]]:
        """Return the action to perform and the turn's answer. None: the agent has left, because its lease has ended."""
        state = self._build_state(hero, phase, scene, legal)
        try:
            turn = hero.take_turn(state)
        except ApiError as error:
            if error.code != LEASE_ENDED:
                raise
            hero.is_gone = True
            if hero.character:
                hero.character.hp = 0
            self._record(f"{hero.name} has left the party.")
            return None, {}
        hero.seen = len(self.events)
        answer, action = dict(turn["action"]), turn["action"].get("action")
        accepted = not turn["skipped"] and isinstance(action, str) and action in legal
        hero.skipped += not accepted
        chosen = action if accepted else fallback
        self.on_move(Move(hero, phase, chosen, accepted, turn["duration_seconds"]))
        return chosen, answer

    def _build_state(self, hero: Hero, phase: str, scene: str, legal: list[str]) -> dict[str, Any]:
        monster = self.monster if phase == "combat" else None
        return {
            "environment_type": "rpg",
            "campaign": self.environment,
            "turn_number": hero.turns + 1,
            "phase": phase,
            "you": hero.name,
            "scene": scene,
            "objective": self.world.objective,
            "room": self.world.room,
            "map": self.map,
            "inventory": self.world.inventory,
            "character": hero.character.encode() if hero.character else None,
            "party": [
                {"name": each.name, "role": each.role, "level": each.level, "hp": each.hp, "max_hp": each.max_hp}
                for each in self.party.members
            ],
            "monster": monster.encode() if monster else None,
            "events": self.events[hero.seen :][-MAX_EVENTS:],
            "legal_actions": legal,
        }

    def _record(self, event: str) -> None:
        self.events.append(event)
        self.on_event(event)


def create_campaign(
    heroes: list[Hero],
    environment: str,
    host: Client,
    *,
    seed: int,
    strength: int = 0,
    on_move: Callable[[Move], None] = lambda move: None,
    on_event: Callable[[str], None] = lambda event: None,
) -> Campaign:
    """Create a campaign. Equal seeds and answers give equal campaigns. `strength` is added to the attack of monsters."""
    world, chance = World(seed), random.Random(seed)  # noqa: S311 - dice
    rooms = [room for room in world.rooms if room != world.entrance]
    monsters = create_monsters(chance, rooms, MONSTERS, strength=strength)
    return Campaign(heroes, environment, host, world, chance, monsters, on_move, on_event)


def create_player(number: int, did: str, client: Client) -> Hero:
    return Hero(did, client, name=NAMES[number])


def run_demo(
    players: list[Hero], environment: str, host: Client, options: DemoOptions, print_line: Callable[[str], None]
) -> str:
    """Play one campaign, print each decision, and return the outcome."""
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(SEED_BYTES))

    def on_move(move: Move) -> None:
        note = "" if move.accepted else " (fallback)"
        number = sum(hero.turns for hero in players)
        print_line(f"turn {number:>3}  {move.hero.name:<6} {move.phase:<11} {move.action + note:<32} {move.seconds:5.2f} s")

    campaign = create_campaign(
        players, environment, host, seed=seed, on_move=on_move, on_event=lambda event: print_line(f"          {event}")
    )
    print_line(f"Quest (seed {seed}): {campaign.world.objective}")
    outcome = campaign.play()
    alive = ", ".join(f"{hero.name} (level {hero.character.level})" for hero in players if hero.character and hero.is_playing)
    return f"The campaign ends in {outcome}. Alive: {alive or 'nobody'}."
