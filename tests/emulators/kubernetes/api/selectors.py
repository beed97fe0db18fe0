"""Label and field selectors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.emulators.kubernetes.api.status import ApiError

_SET = re.compile(r"\s*(?P<key>[^\s!=(),]+)\s+(?P<operator>in|notin)\s+\((?P<values>[^)]*)\)\s*")
_EQUALITY = re.compile(r"\s*(?P<key>[^\s!=(),]+)\s*(?P<operator>==|=|!=)\s*(?P<value>[^\s,=!()]*)\s*")
_EXISTENCE = re.compile(r"\s*(?P<operator>!?)\s*(?P<key>[^\s!=(),]+)\s*")


@dataclass(frozen=True)
class Requirement:
    """One requirement of a label selector. Operators: in, notin, exists, absent."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        match self.operator:
            case "in":
                return value in self.values
            case "notin":
                return value not in self.values
            case "exists":
                return value is not None
        return value is None


def parse_labels(text: str) -> list[Requirement]:
    """Parse a label selector. Raise ApiError."""
    found = []
    for part in re.split(r",(?![^(]*\))", text) if text.strip() else []:
        if match := _SET.fullmatch(part):
            values = tuple(value.strip() for value in match["values"].split(","))
            found.append(Requirement(match["key"], match["operator"], values))
        elif match := _EQUALITY.fullmatch(part):
            found.append(Requirement(match["key"], "notin" if match["operator"] == "!=" else "in", (match["value"],)))
        elif match := _EXISTENCE.fullmatch(part):
            found.append(Requirement(match["key"], "absent" if match["operator"] else "exists"))
        else:
            raise ApiError(400, f"unable to parse requirement: {part!r}")
    return found


def parse_object_selector(selector: Mapping[str, Any]) -> list[Requirement]:
    """Return the requirements of a LabelSelector object. An empty one selects everything."""
    found = [Requirement(key, "in", (value,)) for key, value in (selector.get("matchLabels") or {}).items()]
    operators = {"In": "in", "NotIn": "notin", "Exists": "exists", "DoesNotExist": "absent"}
    for entry in selector.get("matchExpressions") or ():
        found.append(Requirement(entry["key"], operators[entry["operator"]], tuple(entry.get("values") or ())))
    return found


def select_labels(requirements: list[Requirement], labels: Mapping[str, str] | None) -> bool:
    return all(requirement.matches(labels or {}) for requirement in requirements)


@dataclass(frozen=True)
class Selection:
    """Label and field selector of a list or watch."""

    labels: tuple[Requirement, ...]
    fields: tuple[tuple[str, bool, str], ...]  # (path, is equal, value)

    @classmethod
    def parse(cls, labels: str, fields: str) -> "Selection":
        parsed = []
        for part in fields.split(",") if fields.strip() else []:
            if not (match := _EQUALITY.fullmatch(part)):
                raise ApiError(400, f"invalid field selector: {part!r}")
            parsed.append((match["key"], match["operator"] != "!=", match["value"]))
        return cls(tuple(parse_labels(labels)), tuple(parsed))

    def matches(self, item: Mapping[str, Any]) -> bool:
        if not select_labels(list(self.labels), item["metadata"].get("labels")):
            return False
        return all((_get_field(item, path) == value) is is_equal for path, is_equal, value in self.fields)


def _get_field(item: Any, path: str) -> str:
    for part in path.split("."):
        item = item.get(part) if isinstance(item, Mapping) else None
    return "" if item is None else str(item)
