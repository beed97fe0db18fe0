"""Folder format of environment packs.

    pack.toml             name, version, description, [environment_type] with defaults, [schemas] with file names
    skill/                written to /data/skills/<environment type>/; prompt.md is required
    state.schema.json     JSON Schema (draft 2020-12) of the state that the game sends
    action.schema.json    JSON Schema of the action that the agent answers
    examples/*.json       states of real games, which `pack check` plays

docs/packs.md describes each key."""

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from leases.errors import InvalidPack
from sandboxes.state.skills import MARKER_NAME, MAX_SKILL_BYTES, is_skill_path

SHIPPED_DIRECTORY = Path(__file__).resolve().parent / "shipped"
FORMAT_VERSION = 1
MAX_FILES = 200  # of a skill
MAX_SCHEMA_BYTES = 256 << 10
MAX_EXAMPLES = 50
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
DESCRIPTION_PATTERN = re.compile(r"[^\x00-\x1f]{0,200}")
VERSION_PATTERN = re.compile(r"[0-9]+(\.[0-9]+){0,3}([-+.][A-Za-z0-9.-]+)?")
MAX_VERSION_LENGTH = 50  # leaves room for the suffix of installation.py
DEFAULT_KEYS = frozenset({
    "expiry_conditions", "ttl", "max_ttl", "sleep_after", "suspend_after", "auto_stop", "auto_delete", "snapshot_excludes",
    "turn_argv", "turn_timeout", "llm_limit", "llm_token_limit", "policy",
})  # fmt: skip


@dataclass(frozen=True)
class PackFolder:
    """Content of a valid pack folder."""

    name: str
    version: str
    description: str
    defaults: Mapping[str, Any]  # of the environment type, as in pack.toml
    schemas: Mapping[str, Any]  # "state" and "action"
    skill: Mapping[str, bytes]  # path -> content
    examples: Mapping[str, dict[str, Any]]  # file name -> state

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of each file of the skill."""
        return {path: hashlib.sha256(content).hexdigest() for path, content in self.skill.items()}

    @property
    def digest(self) -> str:
        """SHA-256 of everything that a version stores."""
        stored = [self.name, self.description, self.defaults, self.schemas, self.files]
        return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()


def list_shipped_folders() -> list[Path]:
    """Return the folders of the packs that are part of this release."""
    return sorted(path.parent for path in SHIPPED_DIRECTORY.glob("*/pack.toml"))


def read_folder(path: Path) -> PackFolder:
    """Read and validate a pack folder. Raise InvalidPack, which names the file and the key."""
    manifest = _read_manifest(path / "pack.toml")
    schemas = manifest.get("schemas", {})
    if not isinstance(schemas, dict) or schemas.keys() - {"state", "action"}:
        raise InvalidPack("pack.toml", "schemas: a table with the keys state and action.")
    skill = _read_skill(path / "skill")
    return PackFolder(
        name=_read_text(manifest, "name", NAME_PATTERN, "lower-case letters, digits and hyphens, at most 63"),
        version=_read_text(manifest, "version", VERSION_PATTERN, 'a version such as "1.2.0"'),
        description=_read_text(manifest, "description", DESCRIPTION_PATTERN, "one line of at most 200 characters"),
        defaults=_read_defaults(manifest),
        schemas={key: _read_schema(path, str(schemas.get(key, f"{key}.schema.json"))) for key in ("state", "action")},
        skill=skill,
        examples=_read_examples(path / "examples"),
    )


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidPack("pack.toml", f"cannot be read: {error}") from error
    if manifest.get("format") != FORMAT_VERSION:
        raise InvalidPack("pack.toml", f"format: must be {FORMAT_VERSION}.")
    known = {"format", "name", "version", "description", "environment_type", "schemas"}
    if unknown := manifest.keys() - known:
        raise InvalidPack("pack.toml", f"unknown key {min(unknown)}. Known keys: {', '.join(sorted(known))}.")
    return manifest


def _read_text(manifest: Mapping[str, Any], key: str, pattern: re.Pattern[str], form: str) -> str:
    value = manifest.get(key, "" if key == "description" else None)
    if not isinstance(value, str) or not pattern.fullmatch(value) or (key == "version" and len(value) > MAX_VERSION_LENGTH):
        raise InvalidPack("pack.toml", f"{key}: must be {form}.")
    return value


def _read_defaults(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table `environment_type`. Its values are validated with the environment type's model."""
    defaults = manifest.get("environment_type", {})
    if not isinstance(defaults, dict):
        raise InvalidPack("pack.toml", "environment_type: must be a table.")
    if unknown := defaults.keys() - DEFAULT_KEYS:
        raise InvalidPack(
            "pack.toml", f"environment_type: unknown key {min(unknown)}. Known: {', '.join(sorted(DEFAULT_KEYS))}"
        )
    try:
        return dict(json.loads(json.dumps(defaults)))
    except TypeError as error:  # a date or time of TOML
        raise InvalidPack("pack.toml", f"environment_type: {error}.") from error


def _read_schema(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if path.resolve().parent != folder.resolve():
        raise InvalidPack("pack.toml", f"schemas: {name} is not in the folder of the pack.")
    try:
        if path.stat().st_size > MAX_SCHEMA_BYTES:
            raise InvalidPack(name, f"larger than {MAX_SCHEMA_BYTES >> 10} KiB.")
        schema = json.loads(path.read_text(encoding="utf-8"))
        Draft202012Validator.check_schema(schema)
    except (OSError, ValueError) as error:
        raise InvalidPack(name, f"cannot be read: {error}") from error
    except SchemaError as error:
        raise InvalidPack(name, f"is not a JSON Schema: {error.message}") from error
    if not isinstance(schema, dict):
        raise InvalidPack(name, "is not a JSON object.")
    return schema


def _read_skill(folder: Path) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise InvalidPack(f"skill/{name}", "is a symbolic link.")
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        if not path.is_file() or not is_skill_path(name):
            raise InvalidPack(f"skill/{name}", "is not a regular file with a plain name: letters, digits, _ . -, not hidden.")
        contents[name] = path.read_bytes()
        if len(contents) > MAX_FILES or sum(map(len, contents.values())) > MAX_SKILL_BYTES:
            raise InvalidPack("skill", f"has more than {MAX_FILES} files or {MAX_SKILL_BYTES >> 10} KiB.")
    try:
        contents["prompt.md"].decode()
    except (LookupError, UnicodeDecodeError) as error:
        raise InvalidPack("skill/prompt.md", "is required, as UTF-8 text: the system prompt of a turn.") from error
    assert MARKER_NAME not in contents  # it is hidden
    return contents


def _read_examples(folder: Path) -> dict[str, dict[str, Any]]:
    examples: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json"))[:MAX_EXAMPLES]:
        try:
            examples[path.name] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidPack(f"examples/{path.name}", f"cannot be read: {error}") from error
        if not isinstance(examples[path.name], dict):
            raise InvalidPack(f"examples/{path.name}", "is not a JSON object.")
    return examples
