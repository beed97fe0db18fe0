"""Rules that the campaign adds to the world: characters, combat and town. docs/rpg.md documents them."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

XP_PER_LEVEL = 20
MAX_LEVEL = 20
MAX_GOLD = 999
MAX_POTIONS = 9
STARTING_GOLD = 8
POTION_PRICE, BLADE_PRICE, REST_PRICE = 5, 12, 3
POTION_HEALING = 6
HEALING = 5
FIRE_DAMAGE = 5
TALE_XP = 10  # for each survivor of a completed quest
VICTORY_GOLD = 10


@dataclass(frozen=True)
class Role:
    """Class of a character, at level 1."""

    max_hp: int
    attack: int
    mana: int = 0


ROLES = {
    "fighter": Role(max_hp=14, attack=4),
    "healer": Role(max_hp=11, attack=2, mana=4),
    "mage": Role(max_hp=9, attack=2, mana=4),
    "rogue": Role(max_hp=11, attack=3),
}


@dataclass
class Character:
    """A character in a campaign. Name, role, xp, gold and equipment are its sheet, which the agent keeps."""

    name: str
    role: str
    xp: int = 0
    gold: int = STARTING_GOLD
    potions: int = 1
    blade: bool = False
    campaigns: int = 0
    hp: int = 0
    mana: int = 0
    stance: str = ""  # defending or guarding until the monster has acted
    hidden: bool = True  # a rogue that has not struck in this combat

    @property
    def level(self) -> int:
        return min(1 + self.xp // XP_PER_LEVEL, MAX_LEVEL)

    @property
    def max_hp(self) -> int:
        return ROLES[self.role].max_hp + 2 * (self.level - 1)

    @property
    def max_mana(self) -> int:
        return ROLES[self.role].mana and ROLES[self.role].mana + self.level - 1

    @property
    def attack(self) -> int:
        return ROLES[self.role].attack + self.level - 1 + self.blade

    @property
    def is_alive(self) -> bool:
        return self.hp > 0

    def heal(self, points: int) -> int:
        """Restore up to this many hit points, and return how many were missing."""
        restored = min(points, self.max_hp - self.hp)
        self.hp += restored
        return restored

    def encode(self) -> dict[str, Any]:
        """Encode the character for the states of its agent."""
        names = ("name", "role", "level", "xp", "hp", "max_hp", "mana", "attack", "gold", "potions", "blade", "campaigns")
        return {name: getattr(self, name) for name in names}


@dataclass
class Monster:
    """A monster in one room."""

    name: str
    hp: int
    attack: int
    xp: int
    gold: int

    def encode(self) -> dict[str, Any]:
        return {"name": self.name, "hp": self.hp, "attack": self.attack}


def create_monsters(chance: random.Random, rooms: list[str], count: int, *, strength: int = 0) -> dict[str, Monster]:
    """Place monsters in different rooms. `strength` is added to the attack of each."""
    kinds = [("goblin", 8, 6, 8, 4), ("wolf", 10, 7, 10, 3), ("skeleton", 13, 7, 12, 5), ("ogre", 18, 8, 20, 8)]
    return {
        room: Monster(name, hp, attack + strength, xp, gold)
        for room, (name, hp, attack, xp, gold) in zip(
            chance.sample(rooms, min(count, len(rooms))), chance.sample(kinds, len(kinds)), strict=False
        )
    }


def create_character(name: str, role: str, sheet: Any) -> Character:
    """Create the character for a campaign, from the agent's sheet if that is valid and of this role.

    The agent keeps the sheet, so its values are bounded and otherwise believed."""
    character = Character(name, role)
    if isinstance(sheet, Mapping) and sheet.get("role") == role:
        character.xp = _bound(sheet.get("xp"), XP_PER_LEVEL * (MAX_LEVEL - 1), 0)
        character.gold = _bound(sheet.get("gold"), MAX_GOLD, STARTING_GOLD)
        character.potions = _bound(sheet.get("potions"), MAX_POTIONS, 1)
        character.campaigns = _bound(sheet.get("campaigns"), 10**6, 0)
        character.blade = sheet.get("blade") is True
    character.campaigns += 1
    character.hp, character.mana = character.max_hp, character.max_mana
    return character


def _bound(value: Any, maximum: int, default: int) -> int:
    return min(max(value, 0), maximum) if isinstance(value, int) and not isinstance(value, bool) else default


@dataclass
class Party:
    """Characters of a campaign in the order of play."""

    chance: random.Random
    members: list[Character] = field(default_factory=list)

    @property
    def living(self) -> list[Character]:
        return [member for member in self.members if member.is_alive]

    def list_town_actions(self, character: Character) -> list[str]:
        offers = [
            ("buy potion", POTION_PRICE, character.potions < MAX_POTIONS),
            ("buy blade", BLADE_PRICE, not character.blade),
            ("rest", REST_PRICE, character.hp < character.max_hp),
        ]
        return [name for name, price, useful in offers if useful and character.gold >= price] + ["wait"]

    def act_in_town(self, character: Character, action: str) -> str:
        """Perform an action of `list_town_actions`, and return the event."""
        if action == "buy potion":
            character.gold, character.potions = character.gold - POTION_PRICE, character.potions + 1
            return f"{character.name} buys a potion."
        if action == "buy blade":
            character.gold, character.blade = character.gold - BLADE_PRICE, True
            return f"{character.name} buys a blade."
        if action == "rest":
            character.gold, character.hp, character.mana = character.gold - REST_PRICE, character.max_hp, character.max_mana
            return f"{character.name} rests and is well again."
        return f"{character.name} waits."

    def list_combat_actions(self, character: Character, monster: Monster, *, can_retreat: bool) -> list[str]:
        actions = [f"attack {monster.name}", "defend"]
        if character.role == "fighter":
            actions.append("guard")
        if character.role == "rogue" and character.hidden:
            actions.append(f"ambush {monster.name}")
        if character.role == "mage" and character.mana:
            actions.append(f"cast fire at {monster.name}")
        if character.role == "healer" and character.mana:
            actions += [f"heal {member.name}" for member in self.living if member.hp < member.max_hp]
        if character.potions and character.hp < character.max_hp:
            actions.append("drink potion")
        return actions + (["retreat"] if can_retreat else [])

    def act_in_combat(self, character: Character, monster: Monster, action: str) -> str:
        """Perform an action of `list_combat_actions` other than `retreat`, and return the event."""
        verb = action.partition(" ")[0]
        character.stance = {"defend": "defending", "guard": "guarding"}.get(verb, "")
        if verb in ("attack", "ambush", "cast"):
            return self._strike(character, monster, verb)
        if verb == "heal":
            target = next(member for member in self.living if action == f"heal {member.name}")
            character.mana -= 1
            return f"{character.name} heals {target.name} by {target.heal(HEALING)}."
        if verb == "drink":
            character.potions -= 1
            return f"{character.name} drinks a potion and regains {character.heal(POTION_HEALING)}."
        return f"{character.name} is {character.stance}."

    def _strike(self, character: Character, monster: Monster, verb: str) -> str:
        damage = max(1, character.attack + self.chance.randint(-1, 2))
        if verb == "ambush":
            damage *= 2
        elif verb == "cast":
            character.mana, damage = character.mana - 1, damage + FIRE_DAMAGE
        character.hidden = False
        monster.hp = max(0, monster.hp - damage)
        return f"{character.name} hits the {monster.name} for {damage}."

    def reward(self, monster: Monster) -> str:
        """Give each living character the monster's xp and a share of its gold, and return the event."""
        before = {member.name: member.level for member in self.living}
        for member in self.living:
            member.xp += monster.xp
            member.gold = min(MAX_GOLD, member.gold + monster.gold)
            member.hp += 2 * (member.level - before[member.name])
            member.stance, member.hidden = "", True
        levelled = [
            f" {member.name} is level {member.level} now." for member in self.living if member.level > before[member.name]
        ]
        return f"The {monster.name} is dead.{''.join(levelled)}"

    def suffer(self, monster: Monster) -> tuple[Character, str]:
        """Let the monster strike one living character, a guarding one first. Return the character and the event."""
        guards = [member for member in self.living if member.stance == "guarding"]
        target = guards[0] if guards else self.chance.choice(self.living)
        damage = max(1, monster.attack + self.chance.randint(-1, 2))
        if target.stance:
            damage = max(1, damage // 2)
        target.hp = max(0, target.hp - damage)
        for member in self.members:
            member.stance = ""
        death = "" if target.is_alive else f" {target.name} dies."
        return target, f"The {monster.name} hits {target.name} for {damage}.{death}"
